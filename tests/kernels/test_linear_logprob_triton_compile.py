"""The Triton kernels compile for GPUs that are not here, and what the assembler says of them.

Nothing runs on a GPU: triton.compile takes an explicit target, and the ptxas of the triton wheel
reports registers and spills. Integer arguments are marked divisible by 16, as Triton's own launcher
marks them at the shapes that matter (D, the vocabulary block, strides).
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from grpo_kernels.triton_kernels import (  # noqa: E402
    KernelConfig,
    configs_for,
    gradient_kernel,
    product_kernel,
    stats_kernel,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

OPERANDS = {"hidden_ptr", "weight_ptr", "bias_ptr", "left_ptr", "right_ptr", "out_ptr"}
# Shared memory a block may have, by architecture (CUDA C++ programming guide, technical data).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_REGISTERS = 255

KERNELS = {
    "stats": (stats_kernel, {"HAS_BIAS": True, "WITH_ENTROPY": True}),
    "gradient": (gradient_kernel, {"HAS_BIAS": True, "WITH_ENTROPY": True}),
    "hidden product": (product_kernel, {"ADD": True, "left_depth_stride": 1}),
    "weight product": (product_kernel, {"ADD": True, "left_row_stride": 1}),
}


@dataclass(frozen=True)
class Report:
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    uses_tensor_cores: bool


def _argument_type(name: str, constants: dict[str, object], operand: str) -> str:
    if name in constants:
        return "constexpr"
    if name in OPERANDS:
        return f"*{operand}"
    if name == "target_ptr":
        return "*i64"
    return "*fp32" if name.endswith("_ptr") else "i32"


def _compile(name: str, config: KernelConfig, arch: int, operand: str, folder: Path) -> Report:
    kernel, flags = KERNELS[name]
    constants = {
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "PRECISION": "ieee" if operand == "fp32" else "tf32",
        **flags,
    }
    names = kernel.arg_names
    signature = {n: _argument_type(n, constants, operand) for n in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants},
    )
    options = {"num_warps": config.warps, "num_stages": config.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    command = [get_ptxas(arch).path, "-v", "--gpu-name", target[1]]
    command += [str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers is not None and spills is not None, report
    return Report(
        int(registers[1]),
        int(spills[1]),
        int(spills[2]),
        compiled.metadata.shared,
        re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx) is not None,
    )


def _config(name: str, arch: int, dtype: torch.dtype) -> KernelConfig:
    configs = configs_for((arch // 10, arch % 10), dtype)
    if name == "stats":
        return configs.stats
    return configs.gradient if name == "gradient" else configs.product


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_bf16_kernels_use_tensor_cores_and_spill_nothing(
    name: str, arch: int, tmp_path: Path
) -> None:
    report = _compile(name, _config(name, arch, torch.bfloat16), arch, "bf16", tmp_path)
    print(f"sm_{arch} {name}: {report}")
    assert report.spill_store_bytes == report.spill_load_bytes == 0
    assert report.registers <= MAX_REGISTERS
    assert report.shared_bytes <= SHARED_BYTES[arch]
    assert report.uses_tensor_cores


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_exact_fp32_kernels_spill_nothing_and_never_round_to_tf32(
    name: str, tmp_path: Path
) -> None:
    report = _compile(name, _config(name, 90, torch.float32), 90, "fp32", tmp_path)
    print(f"sm_90 fp32 {name}: {report}")
    assert report.spill_store_bytes == report.spill_load_bytes == 0
    assert report.shared_bytes <= SHARED_BYTES[90]
    assert not report.uses_tensor_cores
