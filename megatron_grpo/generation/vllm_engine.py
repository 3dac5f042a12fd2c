"""One vLLM engine: ids in, ids, log-probabilities and weight versions out. No Ray here.

    submit --> [ vLLM engine, stepped only inside `collect` ] --> collect
                       ^ pull_weights, between steps

Everything a checkpoint could change about sampling is set here in full: its generation_config.json
is not read, stop tokens are ours, and each request carries every sampling parameter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from megatron_grpo.config import (
    ModelConfig,
    RunningRequests,
    SamplingConfig,
    VllmGeneratorConfig,
)
from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.conversion.torch_dist import is_torch_dist
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.errors import RolloutError, WeightExchangeError
from megatron_grpo.generation.engine_output import completion
from megatron_grpo.generation.stopping import stop_token_ids
from megatron_grpo.generation.vllm_worker import BACKEND, EXTENSION
from megatron_grpo.ports import reserve_ports
from megatron_grpo.protocols import PullReport
from megatron_grpo.spans import SpanRecorder
from megatron_grpo.types import Completion, GenerationRequest
from megatron_grpo.weights.disk import latest
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.rendezvous import routable_address

CPU_KV_CACHE_BYTES = 512 << 20
# vLLM's own default on a CPU is 128, so that prompts shorter than that would share nothing; its CPU
# attention wants a multiple of 32.
CPU_BLOCK_TOKENS = 32
CPU_BATCH_TOKENS = 4096


class VllmEngine:
    """A vLLM engine of `config.tensor` workers.

    In the process that makes it, the variables of `engine_env` must be set before vLLM is imported.
    Not thread-safe: one call at a time.

    Raises:
        CheckpointError: the model folder names no stop token.
    """

    def __init__(
        self, config: VllmGeneratorConfig, model: ModelConfig, sampling: SamplingConfig
    ) -> None:
        self._config = config
        self._folder = model.folder
        self._sampling = sampling
        self._stop_ids = list(stop_token_ids(model.folder))
        self._cpu = current_platform.is_cpu()
        self._dtype = resolve_dtype(config.dtype, gpu=not self._cpu)
        self._ports = reserve_ports()
        os.environ["VLLM_PORT"] = str(self._ports.first)
        self._engine = LLMEngine.from_engine_args(self._engine_args())
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._version = -1
        self._requests: dict[str, GenerationRequest] = {}
        self._finished: list[Completion] = []
        self._running_requests: RunningRequests = "keep"
        self._deadline_s = 0.0
        self._num_tensors = self._held_bytes = 0
        self._broken: WeightExchangeError | None = None
        self.spans = SpanRecorder()

    def _engine_args(self) -> EngineArgs:
        config = self._config
        arguments = EngineArgs(
            model=str(self._folder),
            # A Megatron checkpoint holds no weights that vLLM reads; all come with the first push.
            load_format="dummy" if is_torch_dist(self._folder) else "auto",
            skip_tokenizer_init=True,
            dtype=self._dtype,  # pyright: ignore[reportArgumentType]
            seed=0,
            max_model_len=config.max_model_tokens,
            max_num_seqs=config.max_concurrent,
            tensor_parallel_size=config.tensor,
            enable_expert_parallel=config.expert,
            enable_sleep_mode=config.colocated and not self._cpu,
            gpu_memory_utilization=config.gpu_memory_fraction,
            kv_cache_memory_bytes=config.kv_cache_bytes,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            worker_extension_cls=EXTENSION,
            weight_transfer_config={"backend": BACKEND},  # pyright: ignore[reportArgumentType]
        )
        if config.tensor > 1:
            arguments.distributed_executor_backend = "mp"
        if self._cpu:
            # It overrides kv_cache_memory_bytes, in whole GiB.
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
            arguments.kv_cache_memory_bytes = config.kv_cache_bytes or CPU_KV_CACHE_BYTES
            arguments.enforce_eager = True
            arguments.block_size = CPU_BLOCK_TOKENS
            # A prompt cut over two steps is sampled from after the first and the sample thrown
            # away; vLLM then winds the request's generator back, which a CPU generator cannot do.
            arguments.enable_chunked_prefill = False
            arguments.max_num_batched_tokens = max(CPU_BATCH_TOKENS, config.max_model_tokens)
        return arguments

    @property
    def version(self) -> int:
        """Version of the weights in use, -1 before the first pull."""
        return self._version

    @property
    def in_flight(self) -> list[str]:
        """Ids that have not come out of `collect` yet, oldest first."""
        return [*(c.request_id for c in self._finished), *self._requests]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue all requests, or none if one of them is not valid.

        A budget that does not fit after the prompt is cut to what fits (the completion then ends
        with "length").

        Raises:
            RolloutError: no weights pulled yet, an id in flight, a prompt that leaves no room for
                one token or holds an id outside the vocabulary, or a budget below 1.
        """
        self._check_usable()
        if self._version < 0:
            raise RolloutError(
                "generator",
                "has no weights of the policy yet",
                found=self._version,
                remedy="push version 0 first: tokens of unknown weights cannot be trained on",
            )
        taken = set(self.in_flight)
        for request in requests:
            self._check_request(request, taken)
            taken.add(request.request_id)
        for request in requests:
            prompt = TokensPrompt(
                prompt_token_ids=request.prompt_ids.tolist(), cache_salt=self._cache_salt()
            )
            self._engine.add_request(request.request_id, prompt, self._parameters(request))
            self._requests[request.request_id] = request

    def collect(self, slice_s: float) -> list[Completion]:
        """Step until at least one request has finished or the slice is over.

        Returns all that have finished; nothing when none has yet, or nothing is in flight.
        """
        self._check_usable()
        until = time.monotonic() + slice_s
        with self.spans("generate") as attrs:
            steps = sequences = 0
            while not self._finished and self._requests and time.monotonic() < until:
                sequences += min(len(self._requests), self._config.max_concurrent)
                self._step()
                steps += 1
            attrs.update(steps=steps, sequences=sequences, left=len(self._requests))
        finished, self._finished = self._finished, []
        return finished

    def _step(self) -> None:
        for output in self._engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                self._finish(output.request_id, output.outputs[0])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; what they have so far, possibly nothing, comes out of `collect`.

        Ids that are not running (any more) are passed over.
        """
        processor = self._engine.output_processor
        for request_id in request_ids:
            if request_id not in self._requests:
                continue
            # vLLM hands the last output of an aborted request only to a queue, where there is one.
            queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request_id)
            for internal_id in processor.external_req_ids[request_id]:
                processor.request_states[internal_id].queue = queue
            self._engine.abort_request([request_id])
            output = queue.get_nowait()
            if not isinstance(output, RequestOutput):
                raise RolloutError(
                    f"request {request_id}", "was aborted without an output", found=output
                )
            self._finish(request_id, output.outputs[0])

    @property
    def host(self) -> str:
        """Address of this engine's node."""
        return routable_address()

    def connect_weights(self, exchange: Exchange, engine: int) -> None:
        """Join the weight exchange as engine number `engine`; blocks until all ends have. Over disk
        nobody is waited for, and an engine that comes late has the newest weights when it is back.

        Raises:
            WeightExchangeError: the exchange carries another dtype or has another plan, or somebody
                did not join within the deadline.
        """
        if exchange.dtype != self._dtype:
            raise WeightExchangeError(
                "weight exchange",
                f"carries {exchange.dtype}, but the engine computes in {self._dtype}",
                remedy="give both the generator's dtype",
            )
        init_info = {
            "exchange": exchange.to_json(),
            "first_worker": engine * exchange.fleet.workers,
            "folder": str(self._folder),
        }
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})
        plan = exchange.plan(read_model_spec(self._folder / "config.json"))
        self._num_tensors, self._held_bytes = len(plan.tensors), sum(plan.received_bytes())
        self._deadline_s = exchange.deadline_s
        self._running_requests = exchange.running_requests
        if exchange.backend == "disk":
            newest = latest(Path(exchange.folder))
            if newest is not None:
                self.pull_weights(newest)

    def pull_weights(self, version: int) -> PullReport:
        """Take the weights that are pushed under `version`; blocks until they are in use.

        Requests in flight are treated as `weights.running_requests` says. But for those that
        keep_cache leaves as they are, no key or value computed under the old weights is used
        again: neither theirs nor a cached prefix.

        Raises:
            WeightExchangeError: they did not arrive whole; the engine refuses all work afterwards.
        """
        self._check_usable()
        start = time.monotonic()
        self._settle_requests(start + self._deadline_s)
        rpc = self._engine.collective_rpc
        try:
            rpc("start_weight_update")
            rpc("update_weights", kwargs={"update_info": {"version": version}})
            rpc("finish_weight_update")  # checks what is held, and tells the policy
        except Exception as error:
            self._broken = WeightExchangeError(
                f"engine, pull of version {version}",
                f"failed, and half of it may be in place: {error}",
                remedy="start the run again from its last checkpoint",
            )
            raise self._broken from error
        if self._running_requests != "keep_cache":
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(version))
        self._version = version
        seconds = time.monotonic() - start
        return PullReport(version, self._num_tensors, self._held_bytes, seconds)

    def _settle_requests(self, until: float) -> None:
        if self._running_requests == "abort":
            self.abort(list(self._requests))
        elif self._running_requests == "finish":
            while self._requests:
                if time.monotonic() > until:
                    raise WeightExchangeError(
                        f"request {next(iter(self._requests))}",
                        f"had not finished {self._deadline_s:g} s after new weights came",
                        remedy="raise weights.deadline_s, or set weights.running_requests to keep",
                    )
                self._step()

    def sleep(self) -> None:
        """Give the device's memory to training: weights and caches are dropped, and all work is
        refused until weights have been pulled again. On a CPU nothing is freed.

        Raises:
            RolloutError: requests are in flight.
        """
        if self.in_flight:
            raise RolloutError(
                "engine",
                f"cannot sleep with {len(self.in_flight)} requests in flight",
                remedy="collect or abort them first",
            )
        self._engine.sleep(level=2)
        self._version = -1

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take back room for one of them, weights first; what was in it is gone."""
        self._engine.wake_up([what])

    def close(self) -> None:
        """Leave the weight channel and end the engine's own processes, if it has any."""
        self._engine.collective_rpc("shutdown_weight_transfer_engine")
        self._engine.engine_core.shutdown()
        self._ports.close()

    def _cache_salt(self) -> str:
        """Part of the prefix cache's key: under keep_cache, what running requests have of old
        weights, and go on adding to, must not become the prefix of a new one."""
        keeps = self._running_requests == "keep_cache"
        return str(self._version) if keeps else "shared"

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _check_request(self, request: GenerationRequest, taken: set[str]) -> None:
        where = f"request {request.request_id}"
        if request.request_id in taken:
            raise RolloutError(
                where, "is in flight already", remedy="give every request its own id"
            )
        limit = self._config.max_model_tokens
        if not 1 <= len(request.prompt_ids) < limit:
            raise RolloutError(
                where,
                f"a prompt must have 1 to {limit - 1} tokens, so that one more fits",
                found=len(request.prompt_ids),
                remedy="shorten it, or raise generator.max_model_tokens",
            )
        low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if low < 0 or high >= self._vocab_size:
            raise RolloutError(
                where,
                f"holds a token id outside the model's vocabulary of {self._vocab_size}",
                found=low if low < 0 else high,
                remedy="use the tokenizer of the same checkpoint",
            )
        if request.max_new_tokens < 1:
            raise RolloutError(where, "needs a budget of at least 1", found=request.max_new_tokens)

    def _parameters(self, request: GenerationRequest) -> SamplingParams:
        """Every parameter that could change what is drawn, spelled out."""
        sampling = self._sampling
        room = self._config.max_model_tokens - len(request.prompt_ids)
        return SamplingParams(
            n=1,
            temperature=0.0 if request.greedy else sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=request.seed,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the list above is the whole rule
            max_tokens=min(request.max_new_tokens, room),
            min_tokens=0,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finish(self, request_id: str, output: CompletionOutput) -> None:
        self._finished.append(
            completion(
                request_id,
                output.token_ids,
                output.logprobs or [],
                [(span.version, span.start, span.end) for span in output.weight_versions or []],
                output.finish_reason,
            )
        )
        del self._requests[request_id]
