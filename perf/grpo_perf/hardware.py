"""What one accelerator and its links can do at most, with the source of every number.

Rates are for one GPU. Matrix rates are dense (data sheets of NVIDIA print them with sparsity,
twice as much); links count one direction (data sheets print both, twice as much).
"""

from __future__ import annotations

import time
from types import MappingProxyType

from megatron_grpo.config.base import PositiveFloat, PositiveInt, Section
from megatron_grpo.errors import ConfigError


class Hardware(Section):
    """One kind of device. `sources` names the document behind each number, by field."""

    name: str
    bf16_flops_per_s: PositiveFloat
    """Dense matrix products in the type that training uses (fp32 on a CPU without bf16)."""
    fp8_flops_per_s: PositiveFloat | None = None
    """null: the hardware has no fp8."""
    memory_bytes: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    link_bytes_per_s: PositiveFloat
    """Within the scale-up domain (NVLink, Infinity Fabric), one direction."""
    link_domain: PositiveInt
    """Devices that reach each other over it."""
    network_bytes_per_s: PositiveFloat
    """Between domains (InfiniBand, RoCE), one direction, per device."""
    host_bytes_per_s: PositiveFloat
    """Between device and host memory, one direction, per device."""
    devices_per_node: PositiveInt
    sources: dict[str, str]

    def flops_per_s(self, precision: str) -> float:
        """Peak of "bf16" or "fp8".

        Raises:
            ConfigError: the hardware lacks it.
        """
        if precision == "bf16":
            return self.bf16_flops_per_s
        if precision == "fp8" and self.fp8_flops_per_s is not None:
            return self.fp8_flops_per_s
        raise ConfigError(
            "precision",
            f"{self.name} has no matrix rate for it",
            found=precision,
            remedy="use bf16",
        )

    def bytes_per_s_among(self, devices: int) -> float:
        """The slowest link that a group of this many neighbours has to cross."""
        inside = devices <= self.link_domain
        return self.link_bytes_per_s if inside else self.network_bytes_per_s


def _nvidia(
    name: str,
    sheet: str,
    system: str,
    *,
    bf16: float,
    fp8: float | None,
    memory: float,
    bandwidth: float,
    nvlink: float,
    host: str,
    host_rate: float,
    network: float,
    domain: int = 8,
    node: int = 8,
) -> Hardware:
    return Hardware(
        name=name,
        bf16_flops_per_s=bf16,
        fp8_flops_per_s=fp8,
        memory_bytes=memory,
        memory_bytes_per_s=bandwidth,
        link_bytes_per_s=nvlink,
        link_domain=domain,
        network_bytes_per_s=network,
        host_bytes_per_s=host_rate,
        devices_per_node=node,
        sources={
            "bf16_flops_per_s": f"{sheet}: BFLOAT16 Tensor Core, without sparsity",
            "fp8_flops_per_s": f"{sheet}: FP8 Tensor Core, without sparsity",
            "memory_bytes": f"{sheet}: GPU memory",
            "memory_bytes_per_s": f"{sheet}: GPU memory bandwidth",
            "link_bytes_per_s": f"{sheet}: NVLink, half of the bidirectional figure",
            "link_domain": f"{system}: GPUs on one NVLink switch fabric",
            "network_bytes_per_s": f"{system}: one adapter per GPU",
            "host_bytes_per_s": host,
            "devices_per_node": system,
        },
    )


_GEN5 = "PCI Express Base Specification 5.0: 16 lanes x 32 GT/s, one direction"

HARDWARE = MappingProxyType(
    {
        "a100": _nvidia(
            "A100",
            "NVIDIA A100 Tensor Core GPU data sheet (SXM4 80 GB)",
            "NVIDIA DGX A100 data sheet (8 x 200 Gb/s)",
            bf16=312e12,
            fp8=None,
            memory=80e9,
            bandwidth=2.039e12,
            nvlink=300e9,
            host="PCI Express Base Specification 4.0: 16 lanes x 16 GT/s, one direction",
            host_rate=32e9,
            network=25e9,
        ),
        "h100": _nvidia(
            "H100",
            "NVIDIA H100 Tensor Core GPU data sheet (SXM5)",
            "NVIDIA DGX H100 data sheet (8 x 400 Gb/s)",
            bf16=989.4e12,
            fp8=1978.9e12,
            memory=80e9,
            bandwidth=3.35e12,
            nvlink=450e9,
            host=_GEN5,
            host_rate=64e9,
            network=50e9,
        ),
        "h200": _nvidia(
            "H200",
            "NVIDIA H200 Tensor Core GPU data sheet (SXM)",
            "NVIDIA DGX H200 data sheet (8 x 400 Gb/s)",
            bf16=989.4e12,
            fp8=1978.9e12,
            memory=141e9,
            bandwidth=4.8e12,
            nvlink=450e9,
            host=_GEN5,
            host_rate=64e9,
            network=50e9,
        ),
        "b200": _nvidia(
            "B200",
            "NVIDIA Blackwell architecture technical brief and HGX B200 specification",
            "NVIDIA DGX B200 data sheet (8 x 400 Gb/s)",
            bf16=2250e12,
            fp8=4500e12,
            memory=180e9,
            bandwidth=8e12,
            nvlink=900e9,
            host=_GEN5,
            host_rate=64e9,
            network=50e9,
        ),
        "gb200": _nvidia(
            "GB200",
            "NVIDIA GB200 NVL72 specification, divided by its 72 GPUs",
            "NVIDIA GB200 NVL72 specification (4 GPUs per tray, 400 Gb/s per GPU)",
            bf16=2500e12,
            fp8=5000e12,
            memory=186e9,
            bandwidth=8e12,
            nvlink=900e9,
            host="NVIDIA Grace Blackwell Superchip: NVLink-C2C 900 GB/s both ways for two GPUs",
            host_rate=225e9,
            network=50e9,
            domain=72,
            node=4,
        ),
        "mi300x": Hardware(
            name="MI300X",
            bf16_flops_per_s=1307.4e12,
            fp8_flops_per_s=2614.9e12,
            memory_bytes=192e9,
            memory_bytes_per_s=5.3e12,
            link_bytes_per_s=448e9,
            link_domain=8,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
            devices_per_node=8,
            sources={
                "bf16_flops_per_s": "AMD Instinct MI300X data sheet: peak bfloat16, no sparsity",
                "fp8_flops_per_s": "AMD Instinct MI300X data sheet: peak FP8, without sparsity",
                "memory_bytes": "AMD Instinct MI300X data sheet: 192 GB HBM3",
                "memory_bytes_per_s": "AMD Instinct MI300X data sheet: peak memory bandwidth",
                "link_bytes_per_s": "AMD Instinct MI300X data sheet: 7 Infinity Fabric links x 128 "
                "GB/s both ways, halved",
                "link_domain": "AMD Instinct MI300X Platform data sheet: 8 fully connected",
                "network_bytes_per_s": "common 8 x 400 Gb/s servers; the platform sheet names none",
                "host_bytes_per_s": _GEN5,
                "devices_per_node": "AMD Instinct MI300X Platform data sheet",
            },
        ),
        # A two-core virtual machine; a process per core, so that one core is one device.
        "cpu": Hardware(
            name="CPU",
            bf16_flops_per_s=78e9,
            memory_bytes=12e9,
            memory_bytes_per_s=9e9,
            link_bytes_per_s=4.5e9,
            link_domain=2,
            network_bytes_per_s=1.25e9,
            host_bytes_per_s=9e9,
            devices_per_node=2,
            sources={
                "bf16_flops_per_s": "fp32 on one Zen 3 core: 2 AVX2 FMA units x 8 lanes x 2 at the "
                "2.45 GHz the kernel reports (AMD Software Optimization Guide for Family 19h)",
                "memory_bytes": "half of a 24 GiB machine, less the operating system",
                "memory_bytes_per_s": "one core, measured by `python -m grpo_perf.hardware`",
                "link_bytes_per_s": "shared memory: a write and a read of every byte",
                "link_domain": "two cores",
                "network_bytes_per_s": "IEEE 802.3ae: 10 Gb/s Ethernet",
                "host_bytes_per_s": "the device memory is the host's",
                "devices_per_node": "two cores",
            },
        ),
    }
)


def hardware_named(name: str) -> Hardware:
    """A row of the table; spelling of upper and lower case does not matter.

    >>> hardware_named("H100").memory_bytes
    80000000000.0
    """
    if name.lower() not in HARDWARE:
        raise ConfigError(
            "hardware",
            "is not in the table",
            found=name,
            remedy=f"use one of {', '.join(HARDWARE)}",
        )
    return HARDWARE[name.lower()]


def measured_memory_bytes_per_s(num_bytes: int = 256 << 20) -> float:
    """Bytes read and written per second by one core copying a block larger than its caches."""
    source, target = bytearray(num_bytes), bytearray(num_bytes)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


if __name__ == "__main__":
    print(f"memory_bytes_per_s {measured_memory_bytes_per_s():.3g}")
