"""How fast this device multiplies matrices and moves memory, measured in a second or so.

    python -m grpo_perf.microbenchmark

The shapes are those of a model's layers, so that the rate is what its products can reach and not
what one large square product reaches.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch

# Long enough for a clock to settle, short enough to be asked before every profile.
_MEASURE_S = 0.25
_SOCKET_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one device with the threads this process may use.

    Attributes:
        flops_per_s: [tokens, hidden] x [hidden, width] products in the training type.
        decode_flops_per_s: the same with a decode batch of rows.
        memory_bytes_per_s: read plus written while copying more than the caches hold.
        read_bytes_per_s: read while summing the same.
        socket_bytes_per_s: from one thread to another through a local socket.
        launch_s: of one operator on one element.
    """

    flops_per_s: float
    decode_flops_per_s: float
    memory_bytes_per_s: float
    read_bytes_per_s: float
    socket_bytes_per_s: float
    launch_s: float


class MicroBenchmark:
    """A profile builds it beside a rank or an engine (ray_cluster.Host.use_tool).

    Args:
        hidden, width: of the model: its residual stream, its widest product.
        tokens: rows of a training product. rows: rows of a decoding one.
        dtype: "float32" or "bfloat16".
    """

    def __init__(self, hidden: int, width: int, tokens: int, rows: int, dtype: str) -> None:
        self._sizes = hidden, width, tokens, rows
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def measure(self) -> Speeds:
        hidden, width, tokens, rows = self._sizes
        with torch.inference_mode():
            return Speeds(
                flops_per_s=self._matmul(tokens, hidden, width),
                decode_flops_per_s=self._matmul(rows, hidden, width),
                memory_bytes_per_s=self._copy(),
                read_bytes_per_s=self._read(),
                socket_bytes_per_s=self._socket(),
                launch_s=self._launch(),
            )

    def _tensor(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=self._dtype, device=self._device)

    def _matmul(self, rows: int, hidden: int, width: int) -> float:
        """Both directions of a layer in turn, over several weights, as a model does."""
        up = [self._tensor(width, hidden) for _ in range(4)]
        x = self._tensor(rows, hidden)

        def run() -> None:
            for weight in up:
                torch.mm(torch.mm(x, weight.T), weight)

        return 4 * 4 * rows * hidden * width / self._seconds(run)

    def _copy(self) -> float:
        source, target = self._tensor(32 << 20), self._tensor(32 << 20)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _read(self) -> float:
        values = self._tensor(32 << 20)
        return values.nbytes / self._seconds(lambda: values.sum())

    def _socket(self) -> float:
        """Over TCP on this machine, as gloo sends."""
        payload = memoryview(bytearray(_SOCKET_BYTES))
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as sending,
            server.accept()[0] as receiving,
            ThreadPoolExecutor(1) as pool,
        ):
            target = memoryview(bytearray(_SOCKET_BYTES))

            def run() -> None:
                sent = pool.submit(sending.sendall, payload)
                left = target
                while left:
                    left = left[receiving.recv_into(left) :]
                sent.result()

            return _SOCKET_BYTES / self._seconds(run)

    def _launch(self) -> float:
        one = self._tensor(1)

        def run() -> None:
            for _ in range(100):
                one.add_(1)

        return self._seconds(run) / 100

    def _seconds(self, run: Callable[[], object]) -> float:
        """The median call: on a busy machine the fastest is luck, the mean is other people."""
        run()
        self._wait()
        spent: list[float] = []
        until = time.perf_counter() + _MEASURE_S
        while time.perf_counter() < until or len(spent) < 3:
            start = time.perf_counter()
            run()
            self._wait()
            spent.append(time.perf_counter() - start)
        return sorted(spent)[len(spent) // 2]

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    for name, value in asdict(MicroBenchmark(576, 1536, 1024, 128, "float32").measure()).items():
        print(f"{name} {value:.3g}")
