"""The Hugging Face model in plain torch on one CPU: the oracle of every other policy.

It un-packs what it is given and runs one sequence at a time, so that it shares no packing, no
masking across sequences, no fused head and no parallelism with the policies it checks. Parameters
and optimizer are fp32; with dtype bfloat16 only the compute is bfloat16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_grpo.batch import (
    IGNORED_TARGET,
    BatchShape,
    LossOutput,
    MicroBatch,
    TrainBatch,
    in_batch_order,
    split_sequences,
)
from megatron_grpo.config import ReferencePolicyConfig
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.errors import CheckpointError, PolicyError
from megatron_grpo.policy.reference_checkpoint import (
    copy_state,
    export_hugging_face,
    load_state,
    save_state,
)
from megatron_grpo.policy.reference_optimizer import make_optimizers
from megatron_grpo.policy.schedules import learning_rate_at
from megatron_grpo.protocols import Loss, PushReport, StepStats, UpdateStats, WeightSender
from megatron_grpo.types import Float32


class ReferencePolicy:
    """See protocols.PolicyBackend. Dropout is always off, so nothing here draws random numbers.

    Args:
        folder: local Hugging Face checkpoint.
        config: dtype, micro-batch size, optimizer.
        sender: its end of a weight channel.
        attention: implementation inside transformers; "eager" is the plainest.
        frozen: folder of the model that `reference_logprobs` scores with, or None.
    """

    def __init__(
        self,
        folder: Path,
        config: ReferencePolicyConfig,
        sender: WeightSender,
        attention: Literal["sdpa", "eager"] = "sdpa",
        frozen: Path | None = None,
    ) -> None:
        self.model = load_model(folder, attention)
        self._frozen: PreTrainedModel | None = None
        if frozen is not None:
            self._frozen = load_model(frozen, attention).requires_grad_(False)
        self._folder = folder
        self._config = config
        self._sender = sender
        self._bfloat16 = resolve_dtype(config.dtype, gpu=False) == "bfloat16"
        self._optimizers = make_optimizers(self.model, config.optimizer)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save-policy")
        self._steps = 0
        self._accumulated = False
        self._zero_gradients()

    @property
    def batch_shape(self) -> BatchShape:
        return BatchShape(microbatch_tokens=self._config.microbatch_tokens)

    @property
    def layout(self) -> str:
        return "TP1 PP1 DP1"

    def forward_backward(self, batch: TrainBatch, loss: Loss) -> StepStats:
        start = time.monotonic()
        outputs = [
            self._backward(microbatch, batch.temperature, loss)
            for replica in batch.replicas
            for microbatch in replica
        ]
        self._accumulated = True
        return StepStats(
            loss=sum(float(output.loss) for output in outputs),
            means=_means(outputs),
            maxima={
                name: max(float(output.maxima[name]) for output in outputs)
                for name in outputs[0].maxima
            },
            forward_backward_s=time.monotonic() - start,
        )

    def optimizer_step(self) -> UpdateStats:
        start = time.monotonic()
        limit = self._config.optimizer.max_grad_norm
        norm = float(
            nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        )
        if not math.isfinite(norm):
            self._zero_gradients()
            raise PolicyError(
                f"optimizer step {self._steps + 1}",
                "the gradient is not finite",
                found=norm,
                remedy="replay the step; its gradients were dropped and no weight has changed",
            )
        rate = learning_rate_at(self._steps, self._config.optimizer)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._zero_gradients()
        self._steps += 1
        return UpdateStats(norm, rate, time.monotonic() - start)

    def reset_optimizer(self) -> None:
        self._optimizers = make_optimizers(self.model, self._config.optimizer)
        self._steps = 0

    def logprobs(self, batch: TrainBatch) -> list[Float32]:
        return self._logprobs(self.model, batch)

    def reference_logprobs(self, batch: TrainBatch) -> list[Float32]:
        if self._frozen is None:
            raise PolicyError(
                "reference_logprobs",
                "this policy was built without a frozen model",
                remedy="give its folder when the policy is made",
            )
        return self._logprobs(self._frozen, batch)

    def push_weights(self, version: int) -> PushReport:
        return self._sender.send(version, self._named_weights())

    def export(self, folder: Path) -> None:
        export_hugging_face(self.model, self._folder, folder)

    def save(self, folder: Path) -> Future[None]:
        if self._accumulated:
            raise CheckpointError(
                str(folder),
                "gradients have accumulated that a checkpoint does not hold",
                remedy="save after optimizer_step",
            )
        copy = copy_state(self.model, self._optimizers, self._steps)
        return self._writer.submit(save_state, folder, copy)

    def load(self, folder: Path) -> None:
        self._steps = load_state(folder, self.model, self._optimizers)
        self._zero_gradients()

    def close(self) -> None:
        self._writer.shutdown()
        self._sender.close()

    def _backward(self, microbatch: MicroBatch, temperature: float, loss: Loss) -> LossOutput:
        logprob_T, entropy_T = self._score(self.model, microbatch, temperature)
        output = loss(logprob_T, entropy_T, microbatch)
        output.loss.backward()
        return LossOutput(output.loss.detach(), output.sums, output.maxima)

    def _logprobs(self, model: PreTrainedModel, batch: TrainBatch) -> list[Float32]:
        parts: list[tuple[int, Tensor]] = []
        with torch.no_grad():
            for microbatch in (mb for replica in batch.replicas for mb in replica):
                logprob_T, _ = self._score(model, microbatch, batch.temperature)
                parts += split_sequences(microbatch, logprob_T)
        return [values.numpy() for values in in_batch_order(parts, batch.num_sequences)]

    def _score(
        self, model: PreTrainedModel, microbatch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(logprob_T, entropy_T), one sequence at a time; 0 on padding."""
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        bounds = microbatch.cu_seqlens.tolist()
        ends = bounds[1:]
        for start, end, length in zip(bounds[:-1], ends, microbatch.sequence_tokens, strict=True):
            here = slice(start, start + length)
            with torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16):
                logits_LV = model(
                    input_ids=microbatch.token_ids_T[here][None], use_cache=False
                ).logits[0]
            logprob_L, entropy_L = score_logits(
                logits_LV, microbatch.target_ids_T[here], temperature
            )
            padding = logprob_L.new_zeros(end - start - length)
            logprobs += [logprob_L, padding]
            entropies += [entropy_L, padding]
        return torch.cat(logprobs), torch.cat(entropies)

    def _zero_gradients(self) -> None:
        # Zeros rather than None: every parameter then has the same number of optimizer steps.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._accumulated = False

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():  # tied ones come once
            yield name, parameter.detach()


def load_model(folder: Path, attention: Literal["sdpa", "eager"]) -> PreTrainedModel:
    """In fp32, without dropout; every row of the embedding learns.

    A config's pad token makes transformers leave the gradient of that row out, also where the
    token means something: SmolLM2 pads with the token that ends a turn.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    ).eval()
    embedding = model.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        embedding.padding_idx = None
    return model


def score_logits(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy, of softmax(logits / temperature); float32 [T].

    An ignored target has log-probability 0.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> score_logits(logits, torch.tensor([1]), 2.0)[0]
    tensor([-1.1803])
    """
    logprob_TV = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
    real_T = targets_T != IGNORED_TARGET
    picked_T = logprob_TV.gather(-1, torch.where(real_T, targets_T, 0)[:, None])[:, 0]
    entropy_T = -(logprob_TV.exp() * logprob_TV).sum(-1)
    return torch.where(real_T, picked_T, 0.0), entropy_T


def _means(outputs: list[LossOutput]) -> dict[str, float]:
    """Sums over micro-batches divided by their counts; 0 where nothing was counted."""
    means: dict[str, float] = {}
    for name in outputs[0].sums:
        total, count = torch.stack([output.sums[name] for output in outputs]).sum(0).tolist()
        means[name] = total / count if count else 0.0
    return means
