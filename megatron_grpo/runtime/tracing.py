"""Tools that a profile starts beside a rank or an engine, in its process (ray_cluster.Host)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_grpo.errors import ClusterError


class Tracer:
    """torch.profiler over everything between `start` and `stop`.

    Args:
        path: of the Chrome trace (also read by Perfetto); ".json.gz" is compressed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: profile | None = None

    def start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        if self._profile is None:
            raise ClusterError("trace", "was never started", found=str(self._path))
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None


class CudaWindow:
    """Marks the measured steps on a GPU: the range that Nsight Systems captures, and the peak of
    the device memory.
    """

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.profiler.start()

    def stop(self) -> int:
        """Peak bytes of tensors on the device since `start`."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return torch.cuda.max_memory_allocated()
