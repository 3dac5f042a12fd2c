"""Response lengths of a run's stored rollouts, for the simulator."""

from __future__ import annotations

from pathlib import Path

from grpo_perf.step_work import lengths_of
from megatron_grpo.errors import ConfigError
from megatron_grpo.rollouts.zarr_store import ZarrStore


def recorded_lengths(run: Path) -> list[int]:
    """Of every rollout the run trained on, in tokens.

    Raises:
        ConfigError: the folder holds no rollouts.
    """
    folder = run / "rollouts"
    store = ZarrStore(folder) if folder.is_dir() else None
    values = [n for step in store.steps() for n in lengths_of(store.read(step))] if store else []
    if not values:
        raise ConfigError(
            f"lengths {run}", "holds no stored rollouts", remedy="give a run's folder, as runs/NAME"
        )
    return values
