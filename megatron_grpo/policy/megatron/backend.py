"""One rank of the Megatron policy: the one class others see. SPMD; knows nothing of Ray.

All ranks call the same verb at the same time. A rank that has nothing to contribute still takes
part in every collective: membership follows the rank's place in the layout, never the data.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import PrefixStore, TCPStore

from megatron_grpo.batch import BatchShape, MicroBatch
from megatron_grpo.config import MegatronPolicyConfig, ModelConfig
from megatron_grpo.conversion.megatron_folder import open_checkpoint
from megatron_grpo.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    PolicyError,
    WeightExchangeError,
)
from megatron_grpo.policy.megatron import mesh
from megatron_grpo.policy.megatron.checkpoint import begin_checkpoint, load_checkpoint
from megatron_grpo.policy.megatron.device import (
    prepare_device,
)
from megatron_grpo.policy.megatron.export import (
    LocalParts,
    export_folder,
    frozen_tensors,
)
from megatron_grpo.policy.megatron.mixture import check_stages
from megatron_grpo.policy.megatron.parts import Parts, build_parts, shares_prefixes
from megatron_grpo.policy.megatron.saving import Writing, finish_save
from megatron_grpo.policy.megatron.schedule import Totals
from megatron_grpo.protocols import Loss, PushReport, StepStats, UpdateStats
from megatron_grpo.spans import SpanRecorder
from megatron_grpo.types import Float32
from megatron_grpo.weights.channels import open_sender
from megatron_grpo.weights.disk import DiskSender
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.rendezvous import (
    Rendezvous,
    host_store,
    join_store,
    routable_address,
)
from megatron_grpo.weights.sender import CollectiveSender


class MegatronRank:
    """One rank; see protocols.PolicyBackend for what the ranks are together.

    Args:
        config: of the whole policy.
        model: the Hugging Face folder, or Megatron checkpoint, that initial weights, tokenizer
            and side files come from.
        seed: of the run; weights come from the checkpoint, so it feeds Megatron's generators only.
        rank: of this process, in [0, world_size).
        deadline_s: longest wait for another rank in any one collective.
        frozen: folder of the model that `reference_logprobs` scores with, or None.

    Raises:
        ConfigError: world_size is not what the layout needs.
    """

    def __init__(
        self,
        config: MegatronPolicyConfig,
        model: ModelConfig,
        seed: int,
        rank: int,
        world_size: int,
        deadline_s: float,
        frozen: Path | None = None,
    ) -> None:
        if world_size != config.parallel.world_size:
            raise ConfigError(
                "policy.parallel",
                f"{config.parallel.describe()} needs {config.parallel.world_size} ranks",
                found=world_size,
                remedy="start as many ranks as the layout has",
            )
        self._config = config
        self._model = model
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._frozen_folder = frozen
        self._rendezvous_store: TCPStore | None = None
        self._parts: Parts | None = None
        self._exchange_store: TCPStore | None = None
        self._sender: CollectiveSender | DiskSender | None = None
        self._writing: Writing | None = None
        self.spans = SpanRecorder()

    # Start and end

    def open_rendezvous(self) -> Rendezvous:
        """Rank 0: open the store that all ranks meet at."""
        self._rendezvous_store, rendezvous = host_store(self._deadline_s)
        return rendezvous

    def start(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks, build this rank's share of the model and load its weights.

        Raises:
            ConfigError: the layout does not divide the model.
            CheckpointError: the model folder is incomplete or not supported.
            ClusterError: another rank did not come within the deadline.
        """
        source = open_checkpoint(self._model.folder)
        self._config.parallel.check_model(source.spec.shape)
        check_stages(source.spec, self._config.parallel)
        device = prepare_device(self._config.threads_per_rank)
        self._join(rendezvous, device)
        frozen = None if self._frozen_folder is None else open_checkpoint(self._frozen_folder)
        self._parts = build_parts(self._config, source, frozen, device, self.spans)
        # Megatron collects garbage in every save; what stays for the whole run need not be looked
        # at each time.
        gc.freeze()

    def _join(self, rendezvous: Rendezvous, device: torch.device) -> None:
        store = PrefixStore("policy", join_store(rendezvous, self._deadline_s))
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=self._deadline_s),
            )
        except (RuntimeError, ValueError) as error:
            raise ClusterError(
                f"policy rank {self._rank}",
                f"did not meet all {self._world_size} ranks within {self._deadline_s:g} s: {error}",
                remedy="see the logs of the other ranks",
            ) from error
        mesh.build_mesh(self._config.parallel, self._deadline_s)
        model_parallel_cuda_manual_seed(self._seed)

    def close(self) -> None:
        """Leave the process groups; safe to call twice, and after a failure."""
        if self._sender is not None:
            self._sender.close()
        self._sender = self._exchange_store = None
        self._parts = None
        gc.unfreeze()
        if dist.is_initialized():
            mesh.leave_mesh()
            dist.destroy_process_group()

    @property
    def _started(self) -> Parts:
        if self._parts is None:
            raise ClusterError(
                f"policy rank {self._rank}", "is not running", remedy="call start first"
            )
        return self._parts

    # What the driver asks before the first batch

    @property
    def batch_shape(self) -> BatchShape:
        parallel = self._config.parallel
        return BatchShape(
            data_parallel=parallel.data,
            microbatch_tokens=self._config.microbatch_tokens,
            sequence_multiple=parallel.sequence_multiple,
            microbatch_multiple=parallel.microbatch_multiple,
            keep_groups=shares_prefixes(parallel, self._started.use_te),
        )

    @property
    def layout(self) -> str:
        return self._config.parallel.describe()

    @property
    def data_parallel_rank(self) -> int:
        """Which replica's micro-batches this rank wants."""
        return mesh.replica()

    # Training

    def forward_backward(
        self, microbatches: tuple[MicroBatch, ...], temperature: float, loss: Loss
    ) -> StepStats:
        """Add the gradients of this replica's micro-batches. The same StepStats on every rank."""
        parts = self._started
        start = time.monotonic()
        totals = parts.engine.train(microbatches, temperature, loss)
        return self._reduce(totals, time.monotonic() - start)

    def _reduce(self, totals: Totals, seconds: float) -> StepStats:
        """Add up the replicas, each counted once, and tell everyone."""
        speaker = mesh.on_last_stage() and mesh.first_of_shards()
        everyone: list[tuple[Totals | None, float] | None] = [None] * self._world_size
        dist.all_gather_object(everyone, (totals if speaker else None, seconds))
        whole, slowest = Totals(0.0, {}, {}), 0.0
        for entry in everyone:
            assert entry is not None
            part, part_s = entry
            slowest = max(slowest, part_s)
            if part is not None:
                whole.add(part)
        # A statistic that counted nothing (no trained token at all) is 0, not NaN.
        means = {n: total / count if count else 0.0 for n, (total, count) in whole.sums.items()}
        return StepStats(whole.loss, means, whole.maxima, slowest)

    def optimizer_step(self) -> UpdateStats:
        """Sum the gradients over the ranks, clip, update, zero.

        Raises:
            GrpoError: the gradient norm is not finite.
        """
        parts = self._started
        start = time.monotonic()
        if parts.engine.needs_sum:
            parts.updater.sum_gradients()
        parts.engine.gradients_taken()
        self._wait_until_copied()
        norm, rate = parts.updater.step()
        return UpdateStats(norm, rate, time.monotonic() - start)

    def reset_optimizer(self) -> None:
        """Moments and step count to 0 on every rank."""
        self._wait_until_copied()
        self._started.updater.reset()

    def logprobs(
        self, microbatches: tuple[MicroBatch, ...], temperature: float
    ) -> list[tuple[int, Float32]]:
        """(sequence id, [L - 1]) for every real sequence of this replica, on one rank of it; [] on
        the others.
        """
        parts = self._started
        scored = parts.engine.score(microbatches, temperature)
        if not mesh.first_of_shards():
            return []
        return [(index, values.float().cpu().numpy()) for index, values in scored]

    def reference_logprobs(
        self, microbatches: tuple[MicroBatch, ...], temperature: float
    ) -> list[tuple[int, Float32]]:
        """The same under the frozen model.

        Raises:
            PolicyError: this rank was built without one.
        """
        if self._started.frozen is None:
            raise PolicyError(
                "reference_logprobs",
                "this policy was built without a frozen model",
                remedy="give its folder when the policy is made",
            )
        self._sync_parameters()
        self._wait_until_copied()
        with self._started.frozen.in_place():
            return self.logprobs(microbatches, temperature)

    # Weights out

    @property
    def host(self) -> str:
        """Address of this rank's node."""
        return routable_address()

    def open_channel(self) -> Rendezvous:
        """Rank 0: open the store that all ends of the weight exchange meet at."""
        self._exchange_store, rendezvous = host_store(self._deadline_s)
        return rendezvous

    def connect_weights(self, exchange: Exchange) -> None:
        """Join the weight exchange; blocks until all ranks and engine workers have."""
        parts = self._started
        self._sender = open_sender(
            exchange,
            parts.spec,
            self._rank,
            parts.device,
            frozen_tensors(parts.bound),
            self._exchange_store,
        )

    def push_weights(self, version: int) -> PushReport:
        """Send this rank's share of the current weights; blocks until all engines use them."""
        parts = self._started
        if self._sender is None:
            raise WeightExchangeError(
                f"policy rank {self._rank}",
                "has not joined a weight exchange",
                remedy="call connect_weights first",
            )
        start = time.monotonic()
        self._sync_parameters()
        report = self._sender.send(version, LocalParts(parts.bound, parts.spec))
        return replace(report, push_s=time.monotonic() - start)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint. All ranks return when it is whole, or all raise
        CheckpointError.
        """
        parts = self._started
        self._sync_parameters()
        export_folder(parts.bound, parts.source, folder)

    # Training state

    def begin_save(self, folder: Path) -> None:
        """Start to copy and write weights, optimizer and schedule. Collective."""
        parts = self._started
        if self._writing is not None:
            raise CheckpointError(
                str(folder), "another save has not ended", remedy="finish it first"
            )
        self._sync_parameters()
        self._writing = begin_checkpoint(
            folder, parts.wrapped, parts.updater, parts.source.side_files
        )

    def save_done(self) -> bool:
        """Whether this rank has written its share."""
        return self._writing is None or self._writing.share.done()

    def finish_save(self) -> None:
        """Wait for every rank's share and make the checkpoint whole. Collective."""
        writing, self._writing = self._writing, None
        if writing is not None:
            finish_save(writing)

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote under any layout. Collective."""
        parts = self._started
        self._sync_parameters()
        self._wait_until_copied()
        load_checkpoint(folder, parts.wrapped, parts.updater)
        if self._sender is not None:
            self._sender.send_everything_next()

    def _wait_until_copied(self) -> None:
        """What a save copies must stay as it is until then."""
        if self._writing is not None:
            self._writing.wait_copied(self._deadline_s)

    def _sync_parameters(self) -> None:
        """Finish a parameter gather that was left to overlap with the next forward pass."""
        if self._config.overlap_param_gather:
            for chunk in self._started.wrapped:
                chunk.start_param_sync(force_sync=True)
