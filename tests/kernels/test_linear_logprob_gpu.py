"""The Triton kernels on a real GPU, against the oracle. Skipped, and so unproven, without one."""

import pytest
import torch
from grpo_kernels import linear_logprob
from logprob_oracle import Case, disagreements, full_grid, make_problem, naive_logprob
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("implementation", ["triton", "chunked"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_grid_agrees_with_the_oracle_on_a_gpu(dtype: str, implementation: str) -> None:
    wrong = []
    for case in full_grid(sequence_parallel=False):
        if case.dtype == dtype and not case.tied:
            wrong += _run(case, implementation)
    assert not wrong, f"{wrong[:5]} and {len(wrong)} in all"


def _run(case: Case, implementation: str) -> list[str]:
    problem = make_problem(case)
    assert problem.bias_V is not None
    hidden_TD = problem.base_TD.cuda().requires_grad_()
    weight_VD = problem.weight_VD.cuda().requires_grad_()
    bias_V = problem.bias_V.cuda().requires_grad_()
    temperature = problem.temperature
    logprob_T, entropy_T = linear_logprob(
        hidden_TD,
        weight_VD,
        problem.targets_T.cuda(),
        temperature=temperature.cuda() if isinstance(temperature, Tensor) else temperature,
        bias=bias_V,
        implementation="triton" if implementation == "triton" else "chunked",
        chunk_tokens=case.chunk,
        chunk_vocab=case.chunk,
    )
    problem.loss(case, logprob_T.cpu(), entropy_T.cpu()).backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None and bias_V.grad is not None
    found = {
        "logprob": logprob_T.detach().cpu(),
        "entropy": entropy_T.detach().cpu(),
        "hidden gradient": hidden_TD.grad.cpu(),
        "weight gradient": weight_VD.grad.cpu(),
        "bias gradient": bias_V.grad.cpu(),
    }
    return disagreements(case, found, problem.answers)


@pytest.mark.parametrize("width", [1536, 4096])
def test_a_real_head_in_bf16_agrees_with_naive_fp32_and_is_repeatable(width: int) -> None:
    """1000 tokens (no multiple of a tile) of a 151936-id head: the chosen configurations run."""
    rng = torch.Generator("cuda").manual_seed(0)
    hidden_TD = torch.randn(1000, width, generator=rng, device="cuda").bfloat16()
    weight_VD = torch.randn(151936, width, generator=rng, device="cuda") / width**0.5
    targets_T = torch.randint(0, 151936, (1000,), generator=rng, device="cuda")
    results = []
    for _ in range(2):
        hidden = hidden_TD.clone().requires_grad_()
        weight = weight_VD.bfloat16().requires_grad_()
        logprob_T, entropy_T = linear_logprob(hidden, weight, targets_T)
        (logprob_T.mean() + 0.1 * entropy_T.mean()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((logprob_T.detach(), entropy_T.detach(), hidden.grad, weight.grad))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    reference_T, reference_entropy_T = naive_logprob(
        hidden_TD.float(), weight_VD.bfloat16().float(), targets_T
    )
    torch.testing.assert_close(results[0][0], reference_T, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(results[0][1], reference_entropy_T, atol=1e-3, rtol=1e-3)
