"""The part of ours that runs inside every vLLM worker: it receives weights and loads them in place.

vLLM imports this module in each worker, before the model is loaded, because the engine names
`WorkerExtension` as its extension class; importing it registers the transfer backend. One push is

    start_weight_update    parameters go to the meta device
    update_weights         CollectiveReceiver -> the model's own loaders, layer by layer
    finish_weight_update   kernels' packed copies are renewed; incomplete layers are an error
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.generation.vllm_cpu_reload import ExpertKernels, repack_tied_head
from megatron_grpo.generation.vllm_holdings import Holdings
from megatron_grpo.weights.channels import open_receiver
from megatron_grpo.weights.disk import DiskReceiver
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.receiver import CollectiveReceiver

BACKEND = "megatron_grpo"
EXTENSION = "megatron_grpo.generation.vllm_worker.WorkerExtension"


class _Loader(Protocol):
    """What every vLLM model is, though nn.Module does not say so."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]: ...


@dataclass
class InitInfo(WeightTransferInitInfo):
    exchange: str  # Exchange.to_json
    first_worker: int
    folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int


@dataclass
class _Joined:
    receiver: CollectiveReceiver | DiskReceiver
    holdings: Holdings
    version: int = -1


class CollectiveTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's interface for weight updates, over our receiver."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    joined: _Joined | None = None
    expert_kernels: ExpertKernels | None = None

    @property
    def _tied(self) -> bool:
        return self.model_config.hf_text_config.tie_word_embeddings

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # of an exchange it was part of before
        exchange = Exchange.from_json(init_info.exchange)
        spec = read_model_spec(Path(init_info.folder) / "config.json")
        receiver = open_receiver(
            exchange,
            spec,
            init_info.first_worker + self.parallel_config.rank,
            self.device,
        )
        holdings = Holdings(self.model, receiver.names, tied=self._tied)
        self.joined = _Joined(receiver, holdings)

    @property
    def _ends(self) -> _Joined:
        if self.joined is None:
            raise WeightExchangeError(
                "engine worker", "has joined no weight exchange", remedy="call connect_weights"
            )
        return self.joined

    def start_weight_update(self) -> None:
        layerwise.initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            self.expert_kernels = ExpertKernels(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        joined = self._ends
        stream = joined.receiver.receive(update_info.version)
        joined.version = update_info.version
        try:
            cast(_Loader, self.model).load_weights(stream)
            untaken = next(stream, None)
            if untaken is not None:
                raise WeightExchangeError(
                    f"tensor {untaken[0]}",
                    "was sent but the engine's model stopped loading before it",
                )
            _check_complete(self.model, self._tied, joined)
        except BaseException as error:  # told to policy and other engines, who would otherwise wait
            joined.receiver.fail(str(error))
            raise

    def finish_weight_update(self) -> None:
        joined = self._ends
        try:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
            if self.expert_kernels is not None:
                self.expert_kernels.put_back()
            if self.device.type == "cpu" and self._tied:
                repack_tied_head(self.model)
        except BaseException as error:
            joined.receiver.fail(str(error))
            raise
        joined.receiver.confirm(joined.version, joined.holdings.read())

    def shutdown(self) -> None:
        if self.joined is not None:
            self.joined.receiver.close()
            self.joined = None


def _check_complete(model: nn.Module, tied: bool, joined: _Joined) -> None:
    """Every layer has got all its elements, or none because none has changed; otherwise finishing
    would fill the rest with garbage.

    A layer that got all of them is reset by vLLM and no longer `can_load`.
    """
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        parameters, _ = info.restore_metadata  # buffers are computed, not sent
        wanted = sum(get_tensor_load_numel(parameter) for parameter in parameters.values())
        if isinstance(layer, VocabParallelEmbedding):
            if tied and isinstance(layer, ParallelLMHead):
                continue
            # vLLM pads the vocabulary; no checkpoint has the padding.
            wanted = layer.shard_indices.num_org_elements * layer.embedding_dim
        names = joined.holdings.names_of(name)
        if info.load_numel == 0 and names and joined.receiver.unsent.issuperset(names):
            continue
        if info.load_numel < wanted:
            raise WeightExchangeError(
                f"layer {name}",
                f"{wanted - info.load_numel} of {wanted} elements did not arrive",
                remedy="the policy must send every tensor of the checkpoint",
            )


class WorkerExtension:
    """Mixed into vLLM's worker class; naming it is what makes every worker import this module."""


WeightTransferEngineFactory.register_engine(BACKEND, CollectiveTransfer)

# vLLM warns, at every push, of layers that got nothing because they have nothing to get (rotary
# tables, tied heads). `_check_complete` tells those from real ones, and raises.
logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
