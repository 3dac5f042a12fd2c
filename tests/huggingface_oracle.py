"""The oracle of the policy tests: a Hugging Face model and autograd, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron_cases import RatioLoss

from megatron_grpo.algorithms.packing import TokenSequence


class Oracle:
    """Loss, gradients and one AdamW step of a model on a token-mean batch."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature

    def logprobs(self, token_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """[L - 1] log-probability of the tokens after the first, and entropies."""
        ids = torch.from_numpy(token_ids.astype(np.int64))
        logits = self.model(ids[None]).logits[0, :-1] / self.temperature
        all_logprobs = torch.log_softmax(logits, -1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, ids[1:, None])[:, 0], entropy

    def scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        with torch.no_grad():
            return [self.logprobs(s.token_ids)[0].numpy() for s in sequences]

    def backward(self, sequences: Sequence[TokenSequence], loss: RatioLoss) -> dict[str, float]:
        """Gradients onto the model; loss, and statistics over trained tokens."""
        trained = sum(s.num_trained_tokens for s in sequences)
        total, entropies, chosen = 0.0, [], []
        for sequence in sequences:
            if not sequence.num_trained_tokens:
                continue
            logprob, entropy = self.logprobs(sequence.token_ids)
            mask = torch.from_numpy(sequence.loss_mask[1:])
            ratio = (logprob - torch.from_numpy(sequence.behavior_logprobs[1:])).exp()
            per_token = -ratio * torch.from_numpy(sequence.advantages[1:])
            per_token = per_token - loss.entropy_coefficient * entropy
            value = per_token[mask].sum() / trained
            value.backward()
            total += float(value)
            entropies.append(entropy[mask].detach())
            chosen.append(logprob[mask].detach())
        return {
            "loss": total,
            "entropy": float(torch.cat(entropies).mean()),
            "logprob": float(torch.cat(chosen).mean()),
            "logprob_max": float(torch.cat(chosen).max()),
        }

    def gradients(self) -> dict[str, np.ndarray]:
        return per_expert({n: p.grad.numpy().copy() for n, p in self.model.named_parameters()})

    def weights(self) -> dict[str, np.ndarray]:
        biases = [b for b in self.model.named_buffers() if b[0].endswith("correction_bias")]
        named = (*self.model.named_parameters(), *biases)
        return per_expert({name: tensor.detach().numpy() for name, tensor in named})

    def step(self, optimizer: dict[str, float]) -> float:
        """Clip and step with torch; the norm before clipping."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optimizer["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=optimizer["learning_rate"],
            betas=(0.9, 0.999),
            eps=optimizer["eps"],
        )
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer["max_grad_norm"])
        adam.step()
        return float(norm)


def per_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks of experts, which transformers keeps in memory, under the names it writes to disk."""
    named = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            named[name] = value
            continue
        for expert, matrix in enumerate(value):
            if kind == "gate_up_proj":
                gate, up = np.split(matrix, 2)
                named[f"{stem}.{expert}.gate_proj.weight"] = gate
                named[f"{stem}.{expert}.up_proj.weight"] = up
            else:
                named[f"{stem}.{expert}.{kind}.weight"] = matrix
    return named


def relative(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Largest |got - want| / max|want| over all tensors; the name sets must be equal."""
    assert set(got) == set(want)
    return max(
        float(np.abs(got[name] - want[name]).max() / (np.abs(want[name]).max() + 1e-12))
        for name in want
    )
