"""Which compute type "auto" stands for."""

from __future__ import annotations

import pytest

from megatron_grpo.devices import cpu_flags, resolve_dtype


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 fma", "float32"),
        ("flags\t\t: fpu avx2 avx512f", "float32"),
        ("flags\t\t: fpu avx512_bf16", "bfloat16"),
        ("flags\t\t: amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
    ],
)
def test_auto_is_bfloat16_only_where_the_processor_multiplies_it(tmp_path, line, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\nbugs : none\n")
    assert resolve_dtype("auto", gpu=False, cpuinfo=cpuinfo) == expected
    assert resolve_dtype("auto", gpu=True, cpuinfo=cpuinfo) == "bfloat16"


def test_a_named_dtype_is_kept_whatever_the_hardware(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : amx_bf16\n")
    assert resolve_dtype("float32", gpu=True, cpuinfo=cpuinfo) == "float32"
    assert resolve_dtype("bfloat16", gpu=False, cpuinfo=cpuinfo) == "bfloat16"


def test_a_kernel_without_cpuinfo_has_no_flags(tmp_path):
    assert cpu_flags(tmp_path / "absent") == frozenset()
