"""Fused kernels for GRPO training; needs torch, and triton on GPUs.

linear_logprob  log-probabilities and entropies of an LM head without materialised logits
"""

from .linear_logprob import linear_logprob

__all__ = ["linear_logprob"]
