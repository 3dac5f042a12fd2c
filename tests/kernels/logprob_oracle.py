"""The grid of the log-probability tests and its oracle: naive logits in fp64, plain autograd.

Shared by the one-process tests and by the gloo workers, which import it by name.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


def naive_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy with the logits written out; computes in the inputs' dtype."""
    logits_TV = hidden_TD @ weight_VD[:vocab_size].t()
    if bias is not None:
        logits_TV = logits_TV + bias[:vocab_size]
    per_token = isinstance(temperature, Tensor)
    logits_TV = logits_TV / (temperature[:, None] if per_token else temperature)
    logp_TV = torch.log_softmax(logits_TV, -1)
    ignored_T = targets_T == IGNORED
    logprob_T = logp_TV.gather(1, targets_T.masked_fill(ignored_T, 0)[:, None]).squeeze(1)
    return logprob_T.masked_fill(ignored_T, 0.0), -(logp_TV.exp() * logp_TV).sum(-1)


@dataclass(frozen=True)
class Case:
    """One point of the grid. Example: `Case("fp32", 0.5, True, "first", tied=False, chunk=5)`."""

    dtype: str
    temperature: float | str  # a number, or "per token"
    entropy: bool
    ignored: str  # which targets: first, last, all, none
    tied: bool
    chunk: int | None
    sequence_parallel: bool = False
    bias: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return names[self.dtype]


TEMPERATURES = [0.5, 1.0, 1.7, "per token"]


def full_grid(sequence_parallel: bool) -> list[Case]:
    """Every combination of the options, 288 cases; those with untied weights have a bias."""
    return [
        Case(dtype, temperature, entropy, ignored, tied, chunk, sequence_parallel, bias=not tied)
        for dtype, temperature, entropy, ignored, tied, chunk in itertools.product(
            ["fp32", "bf16"],
            TEMPERATURES,
            [True, False],
            ["first", "last", "all"],
            [False, True],
            [1, 5, None],
        )
    ]


# The sizes of fault D7, and a vocabulary that no group size or chunk divides.
NUM_TOKENS, WIDTH, VOCAB = 12, 10, 15


@dataclass(frozen=True)
class Problem:
    """Inputs in the dtype under test, upstream gradients, and the oracle's answers in fp64."""

    base_TD: Tensor  # the hidden states, or with tied weights what is added to the embedding
    weight_VD: Tensor
    bias_V: Tensor | None
    token_ids_T: Tensor
    targets_T: Tensor
    temperature: float | Tensor
    logprob_grad_T: Tensor
    entropy_grad_T: Tensor
    answers: dict[str, Tensor]

    def loss(self, case: Case, logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
        loss = (logprob_T * self.logprob_grad_T).sum()
        if case.entropy:
            loss = loss + (entropy_T * self.entropy_grad_T).sum()
        return loss


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Random inputs of a case; upstream gradients have zeros and both signs."""
    rng = torch.Generator().manual_seed(seed)
    base_TD = torch.randn(NUM_TOKENS, WIDTH, generator=rng).to(case.torch_dtype)
    weight_VD = (torch.randn(VOCAB, WIDTH, generator=rng) * 0.5).to(case.torch_dtype)
    bias_V = torch.randn(VOCAB, generator=rng).to(case.torch_dtype) if case.bias else None
    token_ids_T = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=rng)
    targets_T = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=rng)
    where = {"first": slice(0, 2), "last": slice(-2, None), "all": slice(None), "none": slice(0, 0)}
    targets_T[where[case.ignored]] = IGNORED
    temperature = case.temperature
    if isinstance(temperature, str):
        temperature = torch.rand(NUM_TOKENS, generator=rng) * 1.5 + 0.3
    logprob_grad_T = torch.randn(NUM_TOKENS, generator=rng)
    logprob_grad_T[[2, 5]] = 0.0
    entropy_grad_T = torch.randn(NUM_TOKENS, generator=rng)
    entropy_grad_T[[2, 7]] = 0.0
    problem = Problem(
        base_TD,
        weight_VD,
        bias_V,
        token_ids_T,
        targets_T,
        temperature,
        logprob_grad_T,
        entropy_grad_T,
        {},
    )
    problem.answers.update(_answers(problem, case))
    return problem


def _answers(problem: Problem, case: Case) -> dict[str, Tensor]:
    base_TD = problem.base_TD.double().requires_grad_()
    weight_VD = problem.weight_VD.double().requires_grad_()
    bias_V = None if problem.bias_V is None else problem.bias_V.double().requires_grad_()
    hidden_TD = base_TD + weight_VD[problem.token_ids_T] if case.tied else base_TD
    temperature = problem.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.double()
    logprob_T, entropy_T = naive_logprob(
        hidden_TD, weight_VD, problem.targets_T, temperature, bias_V
    )
    problem.loss(case, logprob_T, entropy_T).backward()
    answers = {
        "logprob": logprob_T.detach(),
        "entropy": entropy_T.detach(),
        "hidden gradient": _gradient(base_TD),
        "weight gradient": _gradient(weight_VD),
    }
    if bias_V is not None:
        answers["bias gradient"] = _gradient(bias_V)
    return answers


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# Largest error over largest magnitude. In bf16 the inputs are the same rounded numbers on both
# sides; what differs is the rounding of returned gradients (2^-9) and of tied hidden states.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}


def disagreements(case: Case, found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What differs from the oracle by more than the dtype's tolerance, in words."""
    wrong = []
    for name, value in found.items():
        scale = max(expected[name].abs().max().item(), 1e-3)
        error = (value.double() - expected[name]).abs().max().item() / scale
        if not error <= TOLERANCE[case.dtype]:
            wrong.append(f"{case}: {name} is off by {error:.2e} of {scale:.2e}")
    return wrong
