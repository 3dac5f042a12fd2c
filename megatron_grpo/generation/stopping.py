"""Which tokens end a completion: read from the checkpoint, the same for every generator."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_grpo.errors import CheckpointError


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of a Hugging Face folder, in the order given.

    generation_config.json decides if it has them (chat models list their end-of-turn there), else
    config.json. Nothing else of generation_config.json is used.

    Raises:
        CheckpointError: neither file names one, or what they name is no token id.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = _eos(path) if path.is_file() else None
        if found is None:
            continue
        named = found if isinstance(found, list) else [found]
        ids = tuple(i for i in named if type(i) is int and i >= 0)
        if not ids or len(ids) != len(named):
            raise CheckpointError(
                str(path),
                "eos_token_id must be a token id or a list of them",
                found=found,
                remedy="correct the file",
            )
        return ids
    raise CheckpointError(
        str(folder),
        "neither generation_config.json nor config.json has an eos_token_id",
        remedy="add it: without one no completion would ever stop by itself",
    )


def _eos(path: Path) -> object:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"cannot be read: {error}", remedy="repair it") from error
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "must hold a JSON object", found=type(content).__name__)
    return content.get("eos_token_id")
