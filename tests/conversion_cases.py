"""What ranks do with converted checkpoints; see megatron_cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import Float16Module
from megatron_cases import Arrays, Case, running, weights

from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.policy.megatron.lazy_logits import megatron_logits


def megatron_loads_case(
    rank: int, world: int, case: Case, folder: Path, checkpoint: Path
) -> Arrays:
    """Megatron's own loader, with the state that Megatron's own model asks for."""
    with running(rank, world, case, folder) as policy:
        models = [chunk.module for chunk in policy._started.wrapped]
        assert not any(isinstance(model, Float16Module) for model in models)
        wanted = {
            f"model{n}": model.sharded_state_dict(metadata={"singleton_local_shards": False})
            for n, model in enumerate(models)
        }
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
        for n, model in enumerate(models):
            model.load_state_dict(loaded[f"model{n}"])
        return weights(policy)


def save_and_export_case(rank: int, world: int, case: Case, folder: Path, target: Path) -> None:
    """One step, then the same weights as a training checkpoint and as a Hugging Face folder."""
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        policy.begin_save(target / "training")
        policy.finish_save()
        policy.export(target / "exported")


def logits_case(rank: int, world: int, folder: Path, ids: list[int]) -> np.ndarray:
    torch.set_num_threads(1)
    return megatron_logits(MegatronFolder(folder), ids).numpy()
