"""How far linear_logprob is from the bare matrix products, and from the paths it replaces.

    python kernels/bench/bench_linear_logprob.py [--json] [--shape T,D,V] [--dtype fp32]
        [--repeats N] [--threads N] [--clock cpu]

Methods, forward and backward with arbitrary upstream gradients per token:

    floor  the four bare products of the same sizes: logits, logits again, two gradients
    naive  materialised logits, log_softmax in fp32, gather, autograd
    liger  Liger-Kernel's chunked fused-linear GRPO loss (pip install liger-kernel==0.8.5)
    ours   linear_logprob without the entropy, which none of the others computes
    ours_entropy   linear_logprob with the entropy and its gradient

Time: the methods take turns, and the medians over the turns are compared. Memory: bytes beyond the
inputs and the gradients returned; on a CPU from the allocator's own log of every allocation
(torch.profiler), on a GPU torch.cuda.max_memory_allocated.

On a machine shared with other work, `--clock cpu --threads 1` compares processor seconds, which
waiting does not add to; `--repeats 0` takes the times of the runs that measure memory.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_kernels import linear_logprob

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_SHAPES = [(2048, 1024, 151936), (1024, 2048, 49152)]
GPU_SHAPES = [(8192, 1536, 151936), (8192, 4096, 151936)]
NUM_SEQUENCES = 8  # Liger works on [sequences, tokens], one sequence per chunk by default


@dataclass(frozen=True)
class Row:
    """One shape and dtype. Ratios are None where the other side was not run."""

    shape: list[int]
    dtype: str
    device: str
    clock: str
    repeats: int
    floor_s: float | None
    naive_s: float | None
    liger_s: float | None
    ours_s: float
    ours_entropy_s: float
    time_ratio_to_floor: float | None
    time_ratio_to_naive: float | None
    time_ratio_to_liger: float | None
    naive_extra_bytes: int | None
    liger_extra_bytes: int | None
    ours_extra_bytes: int
    extra_peak_ratio_to_naive: float | None
    tflop_per_s: float


@dataclass(frozen=True)
class Inputs:
    hidden_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    upstream_T: Tensor


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Inputs:
    num_tokens, width, vocab = shape
    rng = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, device=device)

    return Inputs(
        normal(num_tokens, width).to(dtype).requires_grad_(),
        (normal(vocab, width) / math.sqrt(width)).to(dtype).requires_grad_(),
        torch.randint(0, vocab, (num_tokens,), generator=rng, device=device),
        normal(num_tokens),
    )


def run_floor(inputs: Inputs) -> None:
    with torch.no_grad():
        hidden_TD, weight_VD = inputs.hidden_TD, inputs.weight_VD
        logits_TV = hidden_TD @ weight_VD.t()
        torch.mm(hidden_TD, weight_VD.t(), out=logits_TV)
        inputs.hidden_TD.grad = logits_TV @ weight_VD
        inputs.weight_VD.grad = logits_TV.t() @ hidden_TD


def run_naive(inputs: Inputs) -> None:
    logp_TV = (inputs.hidden_TD @ inputs.weight_VD.t()).float().log_softmax(-1)
    logprob_T = logp_TV.gather(1, inputs.targets_T[:, None]).squeeze(1)
    (logprob_T * inputs.upstream_T).sum().backward()


def run_ours(inputs: Inputs, with_entropy: bool = False) -> None:
    logprob_T, entropy_T = linear_logprob(
        inputs.hidden_TD, inputs.weight_VD, inputs.targets_T, with_entropy=with_entropy
    )
    loss = (logprob_T * inputs.upstream_T).sum()
    if entropy_T is not None:
        loss = loss + 0.01 * entropy_T.sum()
    loss.backward()


def run_liger(inputs: Inputs) -> None:
    """Upstream gradients per token are not possible there: advantages are per sequence."""
    module = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    loss_fn = module.LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
    grid = (NUM_SEQUENCES, -1)
    loss, _ = loss_fn(
        inputs.hidden_TD.view(*grid, inputs.hidden_TD.shape[1]),
        inputs.weight_VD,
        inputs.targets_T.view(grid),
        torch.ones_like(inputs.targets_T).view(grid),
        inputs.upstream_T[:NUM_SEQUENCES],
    )
    loss.backward()


def _synchronize(inputs: Inputs) -> None:
    if inputs.hidden_TD.is_cuda:
        torch.cuda.synchronize()


def _forget_gradients(inputs: Inputs) -> None:
    inputs.hidden_TD.grad = None
    inputs.weight_VD.grad = None


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def time_s(method: Callable[[Inputs], None], inputs: Inputs, clock: str) -> float:
    _forget_gradients(inputs)
    _synchronize(inputs)
    start_s = CLOCKS[clock]()
    method(inputs)
    _synchronize(inputs)
    return CLOCKS[clock]() - start_s


def extra_peak_bytes(
    method: Callable[[Inputs], None], inputs: Inputs, clock: str
) -> tuple[int, float]:
    """Peak beyond what was allocated before and the two gradients, and the time of that run."""
    _forget_gradients(inputs)
    gc.collect()
    returned = sum(t.numel() * t.element_size() for t in (inputs.hidden_TD, inputs.weight_VD))
    if inputs.hidden_TD.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = time_s(method, inputs, clock)
        return torch.cuda.max_memory_allocated() - before - returned, seconds
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        seconds = time_s(method, inputs, clock)
    kineto = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in kineto.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak - returned, seconds


def measure(
    shape: tuple[int, int, int],
    dtype: str,
    device: str,
    repeats: int,
    clock: str,
    skip: set[str],
) -> Row:
    inputs = make_inputs(shape, DTYPES[dtype], device)
    methods: dict[str, Callable[[Inputs], None]] = {
        "floor": run_floor,
        "naive": run_naive,
        "liger": run_liger,
        "ours": run_ours,
        "ours_entropy": lambda i: run_ours(i, with_entropy=True),
    }
    methods = {name: method for name, method in methods.items() if name not in skip}
    extra: dict[str, int] = {}
    first: dict[str, float] = {}
    for name, method in methods.items():
        extra[name], first[name] = extra_peak_bytes(method, inputs, clock)
        print(f"{shape} {dtype} {name}: {first[name]:.3f} s, {extra[name]} bytes", file=sys.stderr)
    turns: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            turns[name].append(time_s(method, inputs, clock))
            print(f"{shape} {dtype} {name}: {turns[name][-1]:.3f} s", file=sys.stderr)
    median = {n: statistics.median(values) if values else first[n] for n, values in turns.items()}

    def ratio(name: str) -> float | None:
        return median["ours"] / median[name] if name in median else None

    num_tokens, width, vocab = shape
    return Row(
        list(shape),
        dtype,
        device_name(device),
        clock,
        repeats,
        median.get("floor"),
        median.get("naive"),
        median.get("liger"),
        median["ours"],
        median["ours_entropy"],
        ratio("floor"),
        ratio("naive"),
        ratio("liger"),
        extra.get("naive"),
        extra.get("liger"),
        extra["ours"],
        extra["ours"] / extra["naive"] if "naive" in extra else None,
        4 * 2 * num_tokens * width * vocab / median["ours"] / 1e12,
    )


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpu = torch.cpu.get_capabilities()
    units = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if cpu.get(name)]
    name = cpu.get("cpu_name") or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {units[0] if units else 'no vector units'}"


def print_table(rows: list[Row]) -> None:
    def cell(value: float | None, form: str) -> str:
        return "not run" if value is None else format(value, form)

    print(
        "| T, D, V | dtype | floor s | naive s | Liger s | ours s | with entropy s | x floor |"
        " x naive | x Liger | extra MiB | of naive | TFLOP/s |"
    )
    print("|---" * 13 + "|")
    for row in rows:
        cells = [
            ", ".join(map(str, row.shape)),
            row.dtype,
            *(cell(v, ".2f") for v in (row.floor_s, row.naive_s, row.liger_s, row.ours_s)),
            cell(row.ours_entropy_s, ".2f"),
            cell(row.time_ratio_to_floor, ".2f"),
            cell(row.time_ratio_to_naive, ".2f"),
            cell(row.time_ratio_to_liger, ".2f"),
            cell(row.ours_extra_bytes / 2**20, ".1f"),
            cell(row.extra_peak_ratio_to_naive, ".1%"),
            cell(row.tflop_per_s, ".3f"),
        ]
        print("| " + " | ".join(cells) + " |")
    print(f"\n{rows[0].device}; torch {torch.__version__}")


def parse_shape(text: str) -> tuple[int, int, int]:
    num_tokens, width, vocab = (int(part) for part in text.split(","))
    return num_tokens, width, vocab


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="T,D,V")
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads; all by default")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skip", action="append", choices=["floor", "naive", "liger"], default=[])
    args = parser.parse_args()
    skip = set(args.skip)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if importlib.util.find_spec("liger_kernel") is None and "liger" not in skip:
        print("liger-kernel is not installed: its column stays empty", file=sys.stderr)
        skip.add("liger")
    on_gpu = args.device == "cuda"
    shapes = args.shape or (GPU_SHAPES if on_gpu else CPU_SHAPES)
    dtypes = args.dtype or (["bf16"] if on_gpu else ["fp32", "bf16"])
    rows = [
        measure(shape, dtype, args.device, args.repeats, args.clock, skip)
        for shape in shapes
        for dtype in dtypes
    ]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
