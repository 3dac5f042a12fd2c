"""How fast this device multiplies matrices and moves memory, measured in a few seconds.

    python -m grpo_perf.microbenchmark [float32 | bfloat16]

Sizes are those of a model's layers and of the micro-batches it is trained on: how fast a product or
a pass over memory is depends on its rows, on what the caches still hold, and on whether its result
goes into memory that is new.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import cycle
from statistics import median

import torch
import torch.nn.functional as F

# Everything is measured in turn, several times: a machine that others use is slow for seconds, and
# that must not be one speed's bad luck.
_ROUNDS, _MEASURE_S = 3, 0.08
_SOCKET_BYTES = 32 << 20
_LARGE = 32 << 20  # elements: more than caches hold, and than an allocator keeps
_COLD_BYTES = 192 << 20
_NEW_CALLS, _PAUSE_S = 2, 0.3
# Of the state of an optimizer, and of a gradient that is added piece by piece.
_STATE, _PIECE = 8 << 20, 1 << 18
# Weights that products take turns with, in bytes: more than caches hold, as a model's layers are.
_TURNS_BYTES = 64 << 20
_HEAD_COLUMNS = 8192  # of a tile of logits


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model and its batches look like to the kernels.

    Attributes:
        matrices: [out, in] of every matrix of a layer.
        hidden, ffn_hidden, vocab: of the model.
        heads, head_dim: of queries; keys and values are repeated to as many.
        tokens, head_tokens: rows of a training product, in the layers and in the head.
        rows: rows of a decoding product.
        prefix, members, own: a family of sequences: a beginning, how many share it, tokens of each.
        dtype: "float32" or "bfloat16".
    """

    matrices: tuple[tuple[int, int], ...]
    hidden: int
    ffn_hidden: int
    vocab: int
    heads: int
    head_dim: int
    tokens: int
    head_tokens: int
    rows: int
    prefix: int
    members: int
    own: int
    dtype: str

    @property
    def pairs(self) -> int:
        """Of the family, query and key.

        >>> Sizes(((8, 8),), 8, 8, 8, 1, 8, 1, 1, 1, prefix=4, members=2, own=3,
        ...       dtype="float32").pairs
        46
        """
        own = self.own * self.prefix + self.own * (self.own + 1) // 2
        return self.prefix * (self.prefix + 1) // 2 + self.members * own

    @property
    def keys_per_token(self) -> float:
        """Keys in attention's batches, where every member has the beginning's, per token of the
        family.

        >>> Sizes(((8, 8),), 8, 8, 8, 1, 8, 1, 1, 1, prefix=4, members=2, own=3,
        ...       dtype="float32").keys_per_token
        1.8
        """
        keys = self.prefix + self.members * (self.prefix + self.own)
        return keys / (self.prefix + self.members * self.own)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one device with the threads this process may use. In the training type, unless a line says
    fp32; what is "new" goes into memory that was allocated for it.

    Attributes:
        flops_per_s: of the layers' products forward, tokens as rows.
        gradient_flops_per_s: of the two products that a backward pass makes of each.
        head_flops_per_s: of a tile's: logits, gradient of the hidden states, of the weight.
        decode_flops_per_s: of the layers' products with a decoding batch as rows.
        pairs_per_s, gradient_pairs_per_s: query-key pairs of attention in one layer, all heads,
            fp32 on a CPU.
        pass_elements_per_s: of a new [tokens, ffn_hidden] that an elementwise operator makes.
        cached_elements_per_s: fp32, passes of a softmax over what the cache holds.
        accumulate_elements_per_s: a gradient added to an fp32 one.
        adam_elements_per_s: torch's fused AdamW, fp32.
        memory_bytes_per_s: read plus written while copying more than the caches hold.
        new_bytes_per_s: written to memory that Linux took back a moment ago, in large tensors.
        cold_bytes_per_s: written to memory that has not been used for seconds, and that a host of
            virtual machines may have taken back as well.
        packed_bytes_per_s: of a matrix that is laid out anew, as kernels want it.
        read_bytes_per_s: read while summing the same.
        socket_bytes_per_s: from one thread to another through a local socket.
        launch_s: of one operator on one element.
    """

    flops_per_s: float
    gradient_flops_per_s: float
    head_flops_per_s: float
    decode_flops_per_s: float
    pairs_per_s: float
    gradient_pairs_per_s: float
    pass_elements_per_s: float
    cached_elements_per_s: float
    accumulate_elements_per_s: float
    adam_elements_per_s: float
    memory_bytes_per_s: float
    new_bytes_per_s: float
    cold_bytes_per_s: float
    packed_bytes_per_s: float
    read_bytes_per_s: float
    socket_bytes_per_s: float
    launch_s: float


def median_of(rounds: Sequence[Speeds]) -> Speeds:
    """Of every speed by itself."""
    names = [field.name for field in fields(Speeds)]
    return Speeds(**{name: median(getattr(one, name) for one in rounds) for name in names})


class MicroBenchmark:
    """A profile builds it beside a rank or an engine (ray_cluster.Host.use_tool)."""

    def __init__(self, sizes: Sizes, rounds: int = _ROUNDS) -> None:
        self._sizes = sizes
        self._rounds = rounds
        self._dtype = torch.bfloat16 if sizes.dtype == "bfloat16" else torch.float32
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def measure(self) -> list[Speeds]:
        """By round; see `median_of`."""
        with torch.no_grad():
            cold_bytes_per_s = self._cold()  # before anything warms it
            rounds = [self._round() for _ in range(self._rounds)]
        return [Speeds(**one, cold_bytes_per_s=cold_bytes_per_s) for one in rounds]

    def _round(self) -> dict[str, float]:
        sizes = self._sizes
        pairs_per_s, gradient_pairs_per_s = self._attention()
        return {
            "flops_per_s": self._forward(sizes.tokens),
            "gradient_flops_per_s": self._gradients(),
            "head_flops_per_s": self._head(),
            "decode_flops_per_s": self._forward(sizes.rows),
            "pairs_per_s": pairs_per_s,
            "gradient_pairs_per_s": gradient_pairs_per_s,
            "pass_elements_per_s": self._passes(),
            "cached_elements_per_s": self._softmax(),
            "accumulate_elements_per_s": self._accumulate(),
            "adam_elements_per_s": self._adam(),
            "memory_bytes_per_s": self._copy(),
            "new_bytes_per_s": self._new(),
            "packed_bytes_per_s": self._pack(),
            "read_bytes_per_s": self._read(),
            "socket_bytes_per_s": self._socket(),
            "launch_s": self._launch(),
        }

    def _tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype or self._dtype, device=self._device)

    def _layers(self) -> Iterator[list[torch.Tensor]]:
        """The matrices of one layer after the other, forever."""
        size = sum(out * width for out, width in self._sizes.matrices) * self._dtype.itemsize
        count = max(2, min(8, _TURNS_BYTES // size))
        shapes = self._sizes.matrices
        return cycle([[self._tensor(*shape) for shape in shapes] for _ in range(count)])

    def _products(self, rows: int) -> int:
        """Operations of a layer's products."""
        return 2 * rows * sum(out * width for out, width in self._sizes.matrices)

    def _forward(self, rows: int) -> float:
        layers = self._layers()
        inputs = [self._tensor(rows, width) for _, width in self._sizes.matrices]

        def run() -> None:
            for x, weight in zip(inputs, next(layers)):
                torch.mm(x, weight.t())

        return self._products(rows) / self._seconds(run)

    def _gradients(self) -> float:
        layers, rows = self._layers(), self._sizes.tokens
        inputs = [self._tensor(rows, width) for _, width in self._sizes.matrices]
        above = [self._tensor(rows, out) for out, _ in self._sizes.matrices]

        def run() -> None:
            for x, gradient, weight in zip(inputs, above, next(layers)):
                torch.mm(gradient, weight)
                torch.mm(gradient.t(), x)

        return 2 * self._products(rows) / self._seconds(run)

    def _head(self) -> float:
        sizes = self._sizes
        rows, columns = sizes.head_tokens, min(_HEAD_COLUMNS, sizes.vocab)
        x, weight = self._tensor(rows, sizes.hidden), self._tensor(columns, sizes.hidden)
        tile = self._tensor(rows, columns)

        def run() -> None:
            torch.mm(x, weight.t(), out=tile)
            torch.mm(tile, weight)
            torch.mm(tile.t(), x)

        return 3 * 2 * rows * columns * sizes.hidden / self._seconds(run)

    def _attention(self) -> tuple[float, float]:
        """(pairs a second forward, backward): the beginning by itself, and the batch of what
        follows it."""
        sizes = self._sizes
        dtype = torch.float32 if self._device == "cpu" else self._dtype

        def heads(batch: int, length: int) -> torch.Tensor:
            values = self._tensor(batch, sizes.heads, length, sizes.head_dim, dtype=dtype)
            return values.requires_grad_()

        keys = sizes.prefix + sizes.own
        mask = self._tensor(sizes.own, keys, dtype=torch.bool).tril(diagonal=sizes.prefix)
        q, k, v = heads(sizes.members, sizes.own), *(heads(sizes.members, keys) for _ in range(2))
        shared = [heads(1, sizes.prefix) for _ in range(3 if sizes.prefix else 0)]

        def run(backward: bool) -> None:
            with torch.set_grad_enabled(backward):
                outputs = [F.scaled_dot_product_attention(q, k, v, attn_mask=mask)]
                if shared:
                    first, second, third = shared
                    alone = F.scaled_dot_product_attention(first, second, third, is_causal=True)
                    outputs.append(alone)
            if backward:
                torch.autograd.grad(outputs, [q, k, v, *shared], outputs)

        forward = self._seconds(lambda: run(backward=False))
        both = self._seconds(lambda: run(backward=True))
        # On a busy machine the second may have been luckier.
        return sizes.pairs / forward, sizes.pairs / max(both - forward, forward)

    def _passes(self) -> float:
        """The mean of what layers do: multiply, add, an activation, widen, narrow."""
        layers = [self._tensor(self._sizes.tokens, self._sizes.ffn_hidden) for _ in range(16)]
        turns = cycle(layers)
        other = torch.float32 if self._dtype != torch.float32 else torch.bfloat16

        def run() -> None:
            x, y = next(turns), next(turns)
            (x * y + y).to(other).to(self._dtype)
            F.silu(x)

        return 5 * layers[0].numel() / self._seconds(run)

    def _softmax(self) -> float:
        x, y = (self._tensor(_PIECE, dtype=torch.float32).view(32, -1) for _ in range(2))

        def run() -> None:
            torch.exp(x, out=y)
            y.sum(1)
            y.mul_(x)
            y.copy_(x)

        return 4 * _PIECE / self._seconds(run)

    def _accumulate(self) -> float:
        total, gradient = self._tensor(_STATE, dtype=torch.float32), self._tensor(_STATE)

        def run() -> None:
            for into, piece in zip(total.split(_PIECE), gradient.split(_PIECE)):
                into.add_(piece)

        return _STATE / self._seconds(run)

    def _adam(self) -> float:
        weight = torch.nn.Parameter(self._tensor(_STATE, dtype=torch.float32))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return _STATE / self._seconds(optimizer.step)

    def _copy(self) -> float:
        source, target = self._tensor(_LARGE), self._tensor(_LARGE)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _cold(self) -> float:
        """Once: a second try would find what the first has just given back."""
        start = time.perf_counter()
        self._tensor(_COLD_BYTES // 4, dtype=torch.float32)
        self._wait()
        return _COLD_BYTES / (time.perf_counter() - start)

    def _new(self) -> float:
        """With the pauses of a step, in which others take what one has given back."""
        spent = 0.0
        for _ in range(_NEW_CALLS):
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            self._tensor(_LARGE)
            self._wait()
            spent += time.perf_counter() - start
        return _NEW_CALLS * _LARGE * self._dtype.itemsize / spent

    def _pack(self) -> float:
        matrices = cycle([self._tensor(*max(self._sizes.matrices)) for _ in range(16)])

        def run() -> torch.Tensor:
            return next(matrices).t().contiguous()

        return run().nbytes / self._seconds(run)

    def _read(self) -> float:
        """Of fp32, which is summed as it is."""
        values = self._tensor(_LARGE // 2, dtype=torch.float32)
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
        """The mean call: on a busy machine others' share is part of a step as well."""
        run()
        self._wait()
        start, calls = time.perf_counter(), 0
        while calls < 3 or time.perf_counter() < start + _MEASURE_S:
            run()
            self._wait()
            calls += 1
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    shown = Sizes(
        matrices=((960, 576), (576, 576), (3072, 576), (576, 1536)),
        hidden=576,
        ffn_hidden=1536,
        vocab=49152,
        heads=9,
        head_dim=64,
        tokens=200,
        head_tokens=140,
        rows=128,
        prefix=40,
        members=16,
        own=8,
        dtype=sys.argv[1] if len(sys.argv) > 1 else "float32",
    )
    for name, value in asdict(median_of(MicroBenchmark(shown).measure())).items():
        print(f"{name} {value:.3g}")
