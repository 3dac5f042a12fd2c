"""Which device this rank computes on, in which dtype, and what lets Megatron-Core run without a
GPU.

Megatron-Core asks for CUDA by name in some thirty places. On a machine without CUDA
`prepare_device` answers those calls with the CPU; on a GPU it changes nothing in torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_grpo.config import DType
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.errors import ConfigError
from megatron_grpo.weights.specs import torch_dtype

_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "tensor",
    "full",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "ones_like",
)
_CPU = torch.device("cpu")


def prepare_device(threads: int) -> torch.device:
    """Choose this process's device and make Megatron-Core run on it. Safe to call again.

    Args:
        threads: CPU threads for torch.
    """
    torch.set_num_threads(threads)
    # Sequence and tensor parallel overlap rely on one hardware queue in launch order.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.cuda.current_device())
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.current_device is not _current_device:
        _answer_for_cuda()
    return _CPU


def compute_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """What the layers compute in; see config.MegatronPolicyConfig.dtype."""
    return torch_dtype(resolve_dtype(dtype, gpu=device.type == "cuda"))


def choose_transformer_engine(wish: str, device: torch.device) -> bool:
    """Layers of Transformer Engine, or Megatron's local ones.

    Raises:
        ConfigError: "on" without a GPU or without the package.
    """
    possible = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if wish == "on" and not possible:
        raise ConfigError(
            "policy.transformer_engine",
            "needs a CUDA device and the transformer-engine package",
            found=str(device),
            remedy="install the gpu extra, or set it to auto",
        )
    return possible and wish != "off"


def _current_device() -> torch.device:
    return _CPU


def _is_cuda(device: object) -> bool:
    return device is not None and (isinstance(device, int) or str(device).startswith("cuda"))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


class _Stream:
    """Streams and events on a device that runs everything in order."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


@contextlib.contextmanager
def _stream_context(stream: object) -> Iterator[None]:
    yield


def _cuda_style_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        asked = not args and not kwargs and isinstance(result, str)
        # Megatron's optimizers accept parameters of type torch.cuda.FloatTensor only.
        if asked and not result.startswith("torch.cuda"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_of


def _answer_for_cuda() -> None:
    """Replace the CUDA entry points Megatron-Core calls by their CPU meaning. Each was needed by
    some path; what breaks without it stands beside it.
    """
    cuda = cast(Any, torch.cuda)
    tensor = cast(Any, torch.Tensor)
    cuda.current_device = _current_device  # rope, p2p, DDP buffers: device=current_device()
    for name in _FACTORIES:  # schedules and optimizers: device="cuda", pin_memory=True
        setattr(torch, name, _on_cpu(vars(torch)[name]))
    tensor.cuda = lambda self, *args, **kwargs: self  # tied embeddings over the pipeline
    tensor.type = _cuda_style_type(torch.Tensor.type)  # optimizer constructors, clipping
    tensor.record_stream = lambda self, stream: None
    cuda.synchronize = lambda *args, **kwargs: None  # variable-length p2p, checkpoint writer
    stream = _Stream()
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _stream_context
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    # Without these the tracker queues states for a lazy CUDA initialisation that never comes, and
    # grows.
    rng = cast(Any, megatron_random)
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
