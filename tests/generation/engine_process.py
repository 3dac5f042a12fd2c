"""A VllmEngine in a process of its own, as in production; it would change pytest's too much.

Imports neither torch nor vLLM at the top: the child sets the engine's environment first.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from multiprocessing.connection import Connection

from megatron_grpo.config import ModelConfig, SamplingConfig, VllmGeneratorConfig
from megatron_grpo.generation.engine_env import engine_env

START_S = 280.0
CALL_S = 60.0


def serve(
    pipe: Connection, config: VllmGeneratorConfig, model: ModelConfig, sampling: SamplingConfig
) -> None:
    """The child: answers ("ok", value) or ("error", exception) to each (method, arguments)."""
    os.environ.update(engine_env(config, 1, gpu=False))
    import torch

    torch.set_num_threads(1)
    from generation import engine_probes

    from megatron_grpo.errors import GrpoError
    from megatron_grpo.generation.vllm_engine import VllmEngine

    engine = VllmEngine(config, model, sampling)
    pipe.send(("ok", None))
    while True:
        method, arguments = pipe.recv()
        if method == "stop":
            engine.close()
            # Taking the interpreter apart with all of torch and vLLM in it takes seconds.
            os._exit(0)
        try:
            if method.startswith("probe_"):
                value = getattr(engine_probes, method)(engine, *arguments)
            else:
                value = getattr(engine, method)
                value = value(*arguments) if callable(value) else value
            pipe.send(("ok", value))
        except GrpoError as error:
            pipe.send(("error", error))


class EngineProcess:
    """Starts at once; the first call waits until the engine is up."""

    def __init__(
        self, config: VllmGeneratorConfig, model: ModelConfig, sampling: SamplingConfig
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: an engine of several workers has children of its own.
        self._process = context.Process(target=serve, args=(theirs, config, model, sampling))
        self._process.start()
        theirs.close()
        self._started = False

    def begin(self, method: str, *arguments: object) -> None:
        if not self._started:
            self._answer(START_S)
            self._started = True
        self._pipe.send((method, arguments))

    def end(self, deadline_s: float = CALL_S):
        return self._answer(deadline_s)

    def call(self, method: str, *arguments: object):
        self.begin(method, *arguments)
        return self.end()

    def _answer(self, deadline_s: float):
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"the engine did not answer within {deadline_s:g} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value

    def run(self, requests) -> dict:
        """Submit and collect all of it; request_id -> Completion."""
        self.call("submit", requests)
        done = {}
        while len(done) < len(requests):
            done |= {c.request_id: c for c in self.call("collect", 5.0)}
        return done

    def stop(self) -> None:
        with suppress(BrokenPipeError, EOFError, TimeoutError):
            self.begin("stop")
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
