"""Engines of one checkpoint, fed from this process, and the oracle they are held against."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from generation.engine_process import EngineProcess
from weights.exchange import CPU

from megatron_grpo.config import ModelConfig, SamplingConfig, VllmGeneratorConfig
from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.protocols import PullReport
from megatron_grpo.types import Completion, GenerationRequest
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.rendezvous import host_store
from megatron_grpo.weights.sender import CollectiveSender

DEADLINE_S = 30.0
MAX_MODEL_TOKENS = 256
TEMPERATURE = 0.7
CONFIG = VllmGeneratorConfig(
    dtype="float32", max_model_tokens=MAX_MODEL_TOKENS, kv_cache_bytes=64 << 20, max_concurrent=64
)
SAMPLING = SamplingConfig(temperature=TEMPERATURE, max_new_tokens=64)


def start_engine(folder: Path, config: VllmGeneratorConfig = CONFIG) -> EngineProcess:
    return EngineProcess(config, ModelConfig(path=folder), SAMPLING)


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a policy holds: a tied head is not among the named parameters."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Fleet:
    """`push` sends a model's weights to all engines, of `workers` workers each, from one rank."""

    def __init__(
        self,
        engines: list[EngineProcess],
        folder: Path,
        workers: int = 1,
        *,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self.engines = engines
        self.version = -1
        store, rendezvous = host_store(DEADLINE_S)
        spec = read_model_spec(folder / "config.json")
        exchange = self.exchange = Exchange(
            rendezvous,
            PolicyLayout(layers=spec.num_layers),
            FleetLayout(len(engines), workers, layers=spec.num_layers),
            "float32",
            "gloo",
            bucket_bytes=1 << 16,
            deadline_s=DEADLINE_S,
            verify="every",
        )
        for index, engine in enumerate(engines):
            engine.begin("connect_weights", exchange, index)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(CollectiveSender, store, exchange, spec, 0, CPU, frozen)
            for engine in engines:
                engine.end()
            self.sender = joined.result(DEADLINE_S)

    def push(self, model: torch.nn.Module) -> list[PullReport]:
        return self.push_tensors(named(model))

    def push_tensors(self, tensors: Mapping[str, torch.Tensor]) -> list[PullReport]:
        self.version += 1
        for engine in self.engines:
            engine.begin("pull_weights", self.version)
        with ThreadPoolExecutor(1) as pool:
            push = pool.submit(self.sender.send, self.version, tensors)
            reports = [engine.end() for engine in self.engines]
            push.result(DEADLINE_S)
        return reports

    def stop(self) -> None:
        self.sender.close()
        threads = [threading.Thread(target=engine.stop) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def requests(
    count: int, *, name: str = "r", max_new_tokens: int = 48, greedy: bool = False, prompt: int = 0
) -> list[GenerationRequest]:
    """Seeds 0, 1, ...; prompts of 3, 4, ... random tokens, or all the same one of `prompt`."""
    random = np.random.default_rng(5)
    shared = random.integers(3, 128, MAX_MODEL_TOKENS).astype(np.int32)
    return [
        GenerationRequest(
            f"{name}{i}",
            shared[:prompt] if prompt else random.integers(3, 128, 3 + i).astype(np.int32),
            seed=i,
            max_new_tokens=max_new_tokens,
            greedy=greedy,
        )
        for i in range(count)
    ]


def logits(model, prompt_ids: np.ndarray, token_ids: np.ndarray) -> torch.Tensor:
    """[N, V] of plain Hugging Face, at the positions that predict the N tokens."""
    ids = np.concatenate([prompt_ids, token_ids]).astype(np.int64)
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None]).logits[0, len(prompt_ids) - 1 : -1].double()


def differences(
    model, asked: list[GenerationRequest], done: dict[str, Completion], temperature: float
) -> Iterator[np.ndarray]:
    """Per request [N]: |engine's log-probability - log_softmax(oracle's logits / temperature)|."""
    for request in asked:
        completion = done[request.request_id]
        scores = logits(model, request.prompt_ids, completion.token_ids) / temperature
        picked = torch.from_numpy(completion.token_ids.astype(np.int64))[:, None]
        expected = scores.log_softmax(-1).gather(1, picked)[:, 0].numpy()
        yield np.abs(expected - completion.behavior_logprobs)


def mean_difference(model, asked, done, temperature: float) -> float:
    return float(np.concatenate(list(differences(model, asked, done, temperature))).mean())


def greedy_continuation(model, ids: np.ndarray, count: int, stop: set[int]) -> np.ndarray:
    """The oracle's most likely tokens, one after the other, the stop token included."""
    out: list[int] = []
    while len(out) < count and not (out and out[-1] in stop):
        tokens = torch.from_numpy(np.concatenate([ids, np.array(out)]).astype(np.int64))[None]
        with torch.no_grad():
            out.append(int(model(tokens).logits[0, -1].argmax()))
    return np.array(out, np.int32)
