"""What the hardware does natively, asked without loading torch."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""x86 flags of processors that multiply bfloat16 matrices; "bf16" is Linux's name for it on Arm."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment of a process that computes on a CPU. glibc gives blocks of more than 32 MiB back to
Linux when they are freed, and the next ones are faulted in anew, page by page; in huge pages, where
Linux offers them, a tensor of 57 MB costs 12 ms instead of 48 (EPYC with AVX-512, one thread)."""


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Feature flags of this machine's processor; empty where the kernel does not list them."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def resolve_dtype(dtype: str, *, gpu: bool, cpuinfo: Path = CPUINFO) -> str:
    """Turn "auto" into the compute type the hardware is good at; other names pass through.

    Policy and engine both ask here, so that "auto" means the same on both sides of one machine
    type: bfloat16 on a GPU or on a processor that multiplies it natively, else float32 (emulated
    bfloat16 is slower).

    >>> resolve_dtype("auto", gpu=True), resolve_dtype("float32", gpu=True)
    ('bfloat16', 'float32')
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if gpu or cpu_flags(cpuinfo) & NATIVE_BFLOAT16_FLAGS else "float32"
