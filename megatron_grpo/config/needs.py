"""Keys that say something only beside another key, and what becomes of them without it.

Refused: a value that was idle where it was written. Dropped silently (it is as if it had never been
written): one that a later layer made idle, as `algorithm.kl_coefficient=0` on the command line does
to a file's kl_estimator. Layers are the files of `extends`, the file, the command line; a stage is
one over its run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_grpo.config.algorithm import PRESETS
from megatron_grpo.config.base import Section, Value
from megatron_grpo.errors import ConfigError, ConfigErrors

Layer = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Need:
    """`key` acts only where the value of `other` is one that `met` accepts.

    Attributes:
        words: how to say that, after "needs" and the other key.
    """

    key: str
    other: str
    words: str
    met: Callable[[object], bool]


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


def _is_set(value: object) -> bool:
    return value is not None


def _above(bound: float) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int | float) and value > bound


def _needs(keys: str, other: str, words: str, met: Callable[[object], bool]) -> tuple[Need, ...]:
    section, _, names = keys.partition(".")
    return tuple(Need(f"{section}.{name}", other, words, met) for name in names.split())


NEEDS: tuple[Need, ...] = (
    *_needs(
        "algorithm.kl_estimator kl_in kl_gradient reference_path",
        "algorithm.kl_coefficient",
        "above 0",
        _above(0),
    ),
    *_needs("algorithm.kl_gradient", "algorithm.kl_in", "loss", _one_of("loss")),
    *_needs(
        "algorithm.aggregation_constant",
        "algorithm.aggregation",
        "sequence_sum",
        _one_of("sequence_sum"),
    ),
    *_needs("algorithm.overlong_penalty", "algorithm.overlong_buffer", "set", _is_set),
    *_needs(
        "algorithm.correction_low",
        "algorithm.correction",
        "masked or sequence_mask",
        _one_of("masked", "sequence_mask"),
    ),
    *_needs(
        "algorithm.correction_high",
        "algorithm.correction",
        "truncated, masked or sequence_mask",
        _one_of("truncated", "masked", "sequence_mask"),
    ),
    *_needs("generator.expert", "generator.tensor", "above 1", _above(1)),
    *_needs("generator.gpu_memory_fraction", "cluster.gpus_per_rank", "1", _one_of(1)),
    *_needs("weights.backend bucket_bytes verify", "generator.type", "vllm", _one_of("vllm")),
    *_needs(
        "cluster.gpus_per_rank nsys_ranks",
        "policy.type",
        "megatron",
        _one_of("megatron"),
    ),
    *_needs("cluster.nodes", "cluster.address", "set", _is_set),
)

SectionT = TypeVar("SectionT", bound=Section)


def without_idle_keys(
    config: SectionT, stages: Sequence[Section], layers: Sequence[Layer]
) -> SectionT:
    """`config` with idle keys at their defaults.

    Args:
        stages: what is trained: the config itself, or its stages; a key that acts in one is none.
        layers: what the config was merged from, after a first one that nothing is refused in.

    Raises:
        ConfigErrors: every key that was idle where it was written.
    """
    refused: list[ConfigError] = []
    for need in NEEDS:
        value, idle = _read(config, need.key), _default(config, need.key)
        acts = any(need.met(_read(stage, need.other)) for stage in stages)
        if value == idle or acts or not _applies(need, config):
            continue
        written, decided = _layer_of(need.key, layers), _decided_in(need.other, layers)
        if 0 < written >= decided:
            found = _read(config, need.other)
            refused.append(
                ConfigError(
                    need.key,
                    f"does nothing without {need.other} {need.words} (it is {found})",
                    found=value if isinstance(value, int | float) else str(value),
                    remedy="remove this" if found is None else "set that, or remove this",
                )
            )
        else:
            config = _with(config, need.key, idle)
    if refused:
        raise ConfigErrors(refused)
    return config


def made_idle(stage: Layer, config: Section, layers: Sequence[Layer]) -> list[str]:
    """Keys of a stage that a layer after the one with the stages left without what they need.

    Args:
        layers: what `config`, the run, was merged from.
    """
    written = max((i for i, layer in enumerate(layers) if "stages" in layer), default=0)
    return [
        need.key
        for need in NEEDS
        if _layer_of(need.key, [{}, stage])
        and not _decided_in(need.other, [{}, stage])
        and _decided_in(need.other, layers) > written
        and not need.met(_read(config, need.other))
    ]


def _read(config: Section, key: str) -> object:
    """The value at `section.name`; None where the section is absent or of a kind without it."""
    section, _, name = key.partition(".")
    part = dict(config)[section]
    return dict(part).get(name) if isinstance(part, Section) else None


def _default(config: Section, key: str) -> object:
    """What the key has when nobody writes it; a preset's choice is nobody's."""
    section, _, name = key.partition(".")
    part = dict(config)[section]
    if not isinstance(part, Section) or name not in type(part).model_fields:
        return None
    chosen = PRESETS.get(str(_read(config, f"{section}.preset")), {})
    value = dict(part)[name]
    if section == "algorithm" and name in chosen and value == chosen[name]:
        return value
    return type(part).model_fields[name].get_default()


def _applies(need: Need, config: Section) -> bool:
    """Not where the other key is none of this kind of section: DPO's reference_path, say."""
    section, _, name = need.other.partition(".")
    part = dict(config)[section]
    return not isinstance(part, Section) or name in type(part).model_fields


def _decided_in(key: str, layers: Sequence[Layer]) -> int:
    """The last layer that decides the key's value: writes it, or chooses a preset."""
    if not key.startswith("algorithm."):
        return _layer_of(key, layers)
    return max(_layer_of(key, layers), _layer_of("algorithm.preset", layers))


def _layer_of(key: str, layers: Sequence[Layer]) -> int:
    """The last layer that writes the key; 0 for none."""
    section, _, name = key.partition(".")
    writing = [
        index
        for index, layer in enumerate(layers)
        if isinstance(part := layer.get(section), dict) and name in part
    ]
    return max(writing, default=0)


def _with(config: SectionT, key: str, value: object) -> SectionT:
    section, _, name = key.partition(".")
    part = dict(config)[section].model_copy(update={name: value})
    return config.model_copy(update={section: part})
