"""`replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.commands.options import Overrides, wide_console


def replay(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run's folder, e.g. runs/quickstart")
    ],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="the step to execute again")] = 1,
) -> None:
    """Execute the training part of a step of RUN again, from what the run recorded.

    Starts from the newest checkpoint before the step (or from the model folder) and trains on the
    recorded rollouts; no engine is needed. Prints loss, gradient norm and every other number of the
    policy beside the recorded ones. In the run's own layout they are equal to the last bit on a
    CPU; in another one, or on plain Hugging Face, to rounding:

    [bold]megatron-grpo replay runs/quickstart --step 7 policy.type=reference[/bold]

    Exits with 1 when they differ by more than that.
    """
    from megatron_grpo.train.replay import run_replay

    if not run_replay(run, step, overrides or [], wide_console()).agrees:
        raise typer.Exit(1)
