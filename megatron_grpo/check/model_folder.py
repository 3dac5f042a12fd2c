"""A Hugging Face folder seen from outside: config, weights and tokenizer agree with each other."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_perf.model_shape import Architecture, read_architecture

from megatron_grpo.check.findings import Finding, Subject
from megatron_grpo.config.stages import REFERENCE_FOLDER
from megatron_grpo.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A header larger than this is no header.
_LARGEST_HEADER_BYTES = 200 << 20
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def check_model_folders(subject: Subject) -> Iterator[Finding]:
    """The trained model's folder, and the frozen reference's where it is another one."""
    config = subject.config
    yield from _check_folder("model.path", config.model.folder)
    reference = config.reference_folder
    made_by_the_run = config.folder / REFERENCE_FOLDER
    if reference is None or reference == config.model.folder or reference.parent == made_by_the_run:
        return
    yield from _check_folder("algorithm.reference_path", reference)
    if (reference / "config.json").is_file() and (config.model.folder / "config.json").is_file():
        policy, frozen = (
            read_architecture(folder).model_dump(exclude={"name"})
            for folder in (config.model.folder, reference)
        )
        compared = policy if config.policy.type == "megatron" else {"vocab": policy["vocab"]}
        for key in (key for key, value in compared.items() if frozen[key] != value):
            yield Finding(
                "problem",
                "algorithm.reference_path",
                f"cannot be scored beside the policy: its {key} is {frozen[key]}, the policy's "
                f"{policy[key]}",
                "give a checkpoint of the same architecture",
            )


def _check_folder(key: str, folder: Path) -> Iterator[Finding]:
    if not (folder / "config.json").is_file():
        yield Finding(
            "problem",
            key,
            f"holds no config.json: {folder}",
            "give a Hugging Face folder, or write one with: "
            "python -m megatron_grpo.conversion.smollm2",
        )
        return
    model = read_architecture(folder)
    if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file():
        yield Finding(
            "unknown", key, "is a Megatron checkpoint; its weights are looked at when they are read"
        )
    else:
        yield from _check_weights(key, folder, model)
    yield from _check_tokenizer(key, folder, model)


def _check_weights(key: str, folder: Path, model: Architecture) -> Iterator[Finding]:
    shapes = {n: s for n, s in read_shapes(folder).items() if _is_trained(n, model)}
    elements = sum(_product(shape) for shape in shapes.values())
    embedding = next(
        (shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), None
    )
    if embedding is not None and list(embedding) != [model.vocab, model.hidden]:
        yield Finding(
            "problem",
            str(folder),
            f"config.json says {model.vocab} x {model.hidden} for the embedding, the weights are "
            f"{' x '.join(map(str, embedding))}",
            "take both from the same checkpoint",
        )
        return
    # Tied heads may be stored a second time.
    allowed = {model.num_parameters, model.num_parameters + model.vocab * model.hidden}
    if elements not in allowed:
        yield Finding(
            "problem",
            str(folder),
            f"the weights have {elements:,} parameters, the architecture in config.json has "
            f"{model.num_parameters:,}",
            "take both from the same checkpoint",
        )
        return
    yield Finding("ok", key, f"{model.name}, {elements / 1e9:.3g} B parameters, all shards there")


def _is_trained(name: str, model: Architecture) -> bool:
    """Not a router's bias, nor of a layer after the model's last (multi-token prediction)."""
    layer = _LAYER.match(name)
    beside = model.kv_rank is not None and layer is not None and int(layer[1]) >= model.num_layers
    return not beside and not name.endswith("e_score_correction_bias")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the headers alone.

    Raises:
        CheckpointError: no weights, a missing or cut off shard, or a header that is none.
    """
    index = folder / INDEX
    if index.is_file():
        names = _index_files(index)
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise CheckpointError(
            str(folder), f"holds neither {SINGLE} nor {INDEX}", remedy="copy the weights there"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= _header(folder / name)
    return shapes


def _index_files(index: Path) -> list[str]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in table.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            str(index), f"is no index of weights: {error}", remedy="copy the folder again"
        ) from error


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Of one safetensors file: 8 bytes of length, JSON, data (the format's own description)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LARGEST_HEADER_BYTES, size):
                raise ValueError("its header is longer than the file")
            fields = json.loads(file.read(length))
        tensors = {k: v for k, v in fields.items() if k != "__metadata__"}
        end = 8 + length + max((v["data_offsets"][1] for v in tensors.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes and should have {end}")
        return {name: tuple(value["shape"]) for name, value in tensors.items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            str(path), "is in the index but not in the folder", remedy="copy the folder again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            str(path), f"is no whole safetensors file: {error}", remedy="copy it again"
        ) from error


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _check_tokenizer(key: str, folder: Path, model: Architecture) -> Iterator[Finding]:
    tokenizer = _object(folder / "tokenizer.json")
    if tokenizer is None:
        yield Finding(
            "problem",
            key,
            f"holds no readable tokenizer.json: {folder}",
            "copy the tokenizer files of the same model there",
        )
        return
    largest = _largest_id(tokenizer)
    if largest >= model.vocab:
        yield Finding(
            "problem",
            str(folder / "tokenizer.json"),
            f"has token {largest}, the model's vocabulary ends at {model.vocab - 1}",
            "use the tokenizer that belongs to the model",
        )
    settings = _object(folder / "tokenizer_config.json") or {}
    if not (settings.get("chat_template") or (folder / "chat_template.jinja").is_file()):
        yield Finding(
            "problem",
            str(folder),
            "has no chat template, so messages cannot be written for this model",
            "add chat_template.jinja, e.g. of the model's instruct variant",
        )
    generation = _object(folder / "generation_config.json") or {}
    config = _object(folder / "config.json") or {}
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    outside = [end for end in ids if not isinstance(end, int) or not 0 <= end < model.vocab]
    if outside:
        yield Finding(
            "problem",
            str(folder / "generation_config.json"),
            f"eos_token_id {outside[0]!r} is no token of the model",
            "set it to the token that ends a turn",
        )
    elif not ids:
        yield Finding(
            "warning",
            str(folder),
            "names no eos_token_id: every completion will run to max_new_tokens",
            "set it in generation_config.json",
        )


def _object(path: Path) -> Mapping[str, object] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _largest_id(tokenizer: Mapping[str, object]) -> int:
    """Of the vocabulary and the added tokens, in tokenizers' own file format."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [-1]
    if isinstance(vocabulary, dict):
        ids += [value for value in vocabulary.values() if isinstance(value, int)]
    elif isinstance(vocabulary, list):  # unigram models: position is the id
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            ids.append(token["id"])
    return max(ids)
