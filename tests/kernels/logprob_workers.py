"""A few gloo processes that stay up for a whole test module, and what they can be asked to run.

Starting a process costs seconds (torch's import), a case costs milliseconds: so the processes are
started once, and each request is a function of this module with a list of cases.
"""

import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from grpo_kernels import linear_logprob
from grpo_kernels.chunked import ChunkedBackend
from grpo_kernels.shard import Backend
from logprob_oracle import VOCAB, Case, Problem, disagreements, make_problem
from torch import Tensor

DEADLINE_S = 60.0
START_DEADLINE_S = 240.0  # imports of torch and triton in every process, on a busy machine
WORLD_SIZE = 4
# A few units in the last place of fp32 (6e-8), for sums of tens of terms in two orders.
FP32_ROUNDING = 4e-6


class GlooWorld:
    """Four worker processes; `run` hands one request to all and returns rank -> answer."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self._answers = context.Queue()
        self._requests = [context.Queue() for _ in range(WORLD_SIZE)]
        self._processes = [
            context.Process(target=_serve, args=(r, port, self._requests[r], self._answers))
            for r in range(WORLD_SIZE)
        ]
        for process in self._processes:
            process.start()
        self.run(_import_triton, deadline_s=START_DEADLINE_S)

    def run(
        self, function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> dict[int, Any]:
        for requests in self._requests:
            requests.put((function, args))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        for _ in range(WORLD_SIZE):
            try:
                rank, answer, failure = self._answers.get(timeout=deadline_s)
            except queue.Empty:
                missing = sorted(set(range(WORLD_SIZE)) - set(answers))
                raise TimeoutError(f"no answer from ranks {missing} in {deadline_s} s") from None
            answers[rank] = answer
            if failure:
                failures.append(f"rank {rank} failed:\n{failure}")
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> None:
        for requests in self._requests:
            requests.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, port: int, requests: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    # Read when triton is first imported, which is when a case first asks for the Triton kernels.
    os.environ["TRITON_INTERPRET"] = "1"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE
    )
    # Every process must take part in the making of every group. At size 2 both pairs work.
    groups = {4: dist.new_group([0, 1, 2, 3])}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups[2] = pairs[rank // 2]
    while (request := requests.get()) is not None:
        function, args = request
        try:
            answers.put((rank, function(groups, *args), None))
        except Exception:  # handed to the parent, which fails the test with it  # noqa: BLE001
            answers.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


def _import_triton(groups: dict[int, dist.ProcessGroup]) -> None:
    from grpo_kernels.triton_backend import TritonBackend

    TritonBackend()


class _SumOverGroup(torch.autograd.Function):
    """Sum over the group forward; the gradient is whole on every rank already."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SliceOfTokens(torch.autograd.Function):
    """This rank's slice of the tokens forward; all slices' gradients gathered backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.new_empty(grad.shape[0] * ctx.group.size(), *grad.shape[1:])
        dist.all_gather_single(whole, grad.contiguous(), group=ctx.group)
        return whole, None


def sharded(values_V: Tensor, group: dist.ProcessGroup | None, fill: float = 10.0) -> Tensor:
    """This rank's rows, after padding to a multiple of the group; padding must not matter."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    rows = -(-values_V.shape[0] // size) + 1
    padded = values_V.new_full((rows * size, *values_V.shape[1:]), fill)
    padded[: values_V.shape[0]] = values_V
    return padded.chunk(size)[rank].contiguous()


def _embedded(token_ids_T: Tensor, shard_VD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of the tied weight for each token, looked up on whichever rank has them."""
    rank = 0 if group is None else group.rank()
    local_T = token_ids_T - rank * shard_VD.shape[0]
    inside_T = (local_T >= 0) & (local_T < shard_VD.shape[0])
    own_TD = shard_VD[local_T.masked_fill(~inside_T, 0)] * inside_T[:, None]
    return own_TD if group is None else _SumOverGroup.apply(own_TD, group)


def _backend(name: str, case: Case) -> Backend:
    # Tiles of one token by five ids, five by one, and everything: each side is 1, odd and all.
    if name == "chunked":
        return ChunkedBackend(case.chunk, {1: 5, 5: 1, None: None}[case.chunk])
    from grpo_kernels.triton_backend import TritonBackend
    from grpo_kernels.triton_kernels import KernelConfig, KernelConfigs

    # The smallest tiles a matrix unit takes; two vocabulary parts, so that parts are merged.
    small = KernelConfig(16, 16, 16, 4, 1)
    # An interpreted launch costs tens of milliseconds: fewer, larger tiles.
    tokens, vocab = {1: (None, 7), 5: (5, None), None: (None, None)}[case.chunk]
    return TritonBackend(tokens, vocab, 2, KernelConfigs(small, small, small))


def results_of(
    case: Case, problem: Problem, group: dist.ProcessGroup | None, backend: str
) -> dict[str, Tensor]:
    """Values and gradients of one case on this rank; of sharded tensors, this rank's shard."""
    shard_VD = sharded(problem.weight_VD, group).requires_grad_()
    bias_V = None if problem.bias_V is None else sharded(problem.bias_V, group).requires_grad_()
    base_TD = problem.base_TD.clone().requires_grad_()
    hidden_TD = base_TD
    if case.tied:
        hidden_TD = base_TD + _embedded(problem.token_ids_T, shard_VD, group)
    if case.sequence_parallel:
        hidden_TD = _SliceOfTokens.apply(hidden_TD, group)
    logprob_T, entropy_T = linear_logprob(
        hidden_TD,
        shard_VD,
        problem.targets_T,
        temperature=problem.temperature,
        vocab_group=group,
        vocab_size=VOCAB,
        bias=bias_V,
        sequence_parallel=case.sequence_parallel,
        implementation=_backend(backend, case),
    )
    problem.loss(case, logprob_T, entropy_T).backward()
    assert base_TD.grad is not None and shard_VD.grad is not None
    found = {
        "logprob": logprob_T.detach(),
        "entropy": entropy_T.detach(),
        "hidden gradient": base_TD.grad,
        "weight gradient": shard_VD.grad,
    }
    if bias_V is not None:
        assert bias_V.grad is not None
        found["bias gradient"] = bias_V.grad
    return found


def run_case(
    case: Case, problem: Problem, group: dist.ProcessGroup | None, backend: str = "chunked"
) -> list[str]:
    """Disagreements of one rank with the oracle, on this rank's shard of every gradient."""
    found = results_of(case, problem, group, backend)
    expected = dict(problem.answers)
    # Padding rows of the expected gradient are zero, and must be zero exactly.
    for name in ("weight gradient", "bias gradient"):
        if name in found:
            expected[name] = sharded(expected[name], group, fill=0.0)
    num_rows = found["weight gradient"].shape[0]
    first_id = 0 if group is None else group.rank() * num_rows
    real = min(max(VOCAB - first_id, 0), num_rows)
    wrong = disagreements(case, found, expected)
    if found["weight gradient"][real:].any():
        wrong.append(f"{case}: padding rows have a gradient")
    return wrong


def compare_backends(
    groups: dict[int, dist.ProcessGroup], group_size: int, cases: list[Case]
) -> list[str]:
    """Where interpreted Triton and chunked differ by more than the rounding of their sums."""
    group = groups[group_size] if group_size > 1 else None
    wrong = []
    for case in cases[dist.get_rank() // group_size :: WORLD_SIZE // group_size]:
        problem = make_problem(case)
        triton, chunked = (results_of(case, problem, group, b) for b in ("triton", "chunked"))
        for name, values in triton.items():
            gap = (values - chunked[name]).abs().max() / chunked[name].abs().max().clamp_min(1.0)
            if float(gap) > FP32_ROUNDING:
                wrong.append(f"{case}: {name} differs by {float(gap):.1e}")
    return wrong


def run_cases(
    groups: dict[int, dist.ProcessGroup], group_size: int, cases: list[Case], backend: str
) -> list[str]:
    """Disagreements over many cases, which groups smaller than the world share among them."""
    group = groups[group_size] if group_size > 1 else None
    mine = cases[dist.get_rank() // group_size :: WORLD_SIZE // group_size]
    return [word for case in mine for word in run_case(case, make_problem(case), group, backend)]
