"""The one base of every config section, and how YAML and command-line text become values.

Text is read by YAML 1.2 rules (1e-6 is a number, 12:30 is text), then validated: numbers given as
text are numbers, "false" and "0" are False, null clears an optional, and nothing else is guessed.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from megatron_grpo.errors import ConfigError, ConfigErrors

# What YAML text can become. Only this module handles it; everyone else sees typed sections.
Value = Union[None, bool, int, float, str, list["Value"], dict[str, "Value"]]  # noqa: UP007

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _not_empty(value: object) -> object:
    """An empty path would be the current directory."""
    if isinstance(value, str) and not value.strip():
        raise ConfigError(
            "", "is an empty path", found=value, remedy="give one (. is the current directory)"
        )
    return value


PathText = Annotated[str, BeforeValidator(_not_empty)]
GivenPath = Annotated[Path, BeforeValidator(_not_empty)]

# Where the value of a text field begins like a list or a mapping; see parse_override.
_QUOTES = ("'[", "'{", '"[', '"{')


class Section(BaseModel):
    """Frozen, closed to unknown keys, defaults checked like given values."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=()
    )


SectionT = TypeVar("SectionT", bound=Section)


def tag_of(default: str) -> Callable[[object], object]:
    """For unions of sections: the `type` of a value, `default` where none is written."""

    def tag(value: object) -> object:
        if isinstance(value, Mapping):
            return value.get("type", default)
        return type(value).model_fields["type"].default if isinstance(value, Section) else default

    return tag


def read_yaml(path: Path) -> dict[str, Value]:
    """Parse one YAML file, following `extends:` (a path relative to the file; a list is applied in
    order).

    Raises:
        ConfigError: unreadable, not a mapping, duplicate keys, or an `extends` circle.
    """
    merged: dict[str, Value] = {}
    for layer in read_layers(path):
        merged = merge(merged, layer)
    return merged


def read_layers(path: Path) -> list[dict[str, Value]]:
    """The same before merging: what each file says itself, bases first."""
    return _read_extended(path, ())


def _read_extended(path: Path, seen: tuple[Path, ...]) -> list[dict[str, Value]]:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(str(path), "extends itself", found=chain, remedy="break the circle")
    try:
        loaded = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}", remedy="check the path") from error
    except YAMLError as error:
        first = " ".join(str(error).split())
        raise ConfigError(str(path), f"is not valid YAML: {first}") from error
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise ConfigError(str(path), "must be a mapping of sections", found=type(loaded).__name__)
    bases = loaded.pop("extends", None) or []
    if not isinstance(bases, str | list):
        raise ConfigError(
            f"{path}: extends", "must be a path or a list of paths", found=type(bases).__name__
        )
    layers: list[dict[str, Value]] = []
    for base in [bases] if isinstance(bases, str) else bases:
        layers += _read_extended(path.parent / str(base), (*seen, path))
    return [*layers, loaded]


def merge(base: Mapping[str, Value], over: Mapping[str, Value]) -> dict[str, Value]:
    """Mappings merge key by key, everything else is replaced. A changed `type:` replaces its whole
    section, whose other keys belong to the old type; not so an optimizer's, which share theirs.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    >>> merge({"p": {"type": "megatron", "z": 1}}, {"p": {"type": "reference"}})
    {'p': {'type': 'reference'}}
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            changed = "type" in value and value["type"] != old.get("type", value["type"])
            changed = changed and key != "optimizer"
            merged[key] = dict(value) if changed else merge(old, value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> tuple[list[str], Value]:
    """Split one `dotted.key=value` of the command line.

    The value stays text unless it is null, a list or a mapping: the typed field decides what text
    means, so `2.10` for a text field stays "2.10" and for a number becomes 2.1. Text that begins
    like a list or a mapping goes in quotes.

    >>> parse_override("policy.parallel.tensor=2")
    (['policy', 'parallel', 'tensor'], '2')
    >>> parse_override("a.b=null")
    (['a', 'b'], None)
    >>> parse_override('a.b="[x] y"')
    (['a', 'b'], '[x] y')
    """
    key, equals, raw = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"argument {text!r}", "is not an override", remedy="write dotted.key=value"
        )
    stripped = raw.strip()
    if stripped in ("null", "Null", "NULL", "None", "~"):  # `none` is a choice of some keys
        return path, None
    if stripped[:1] in ("[", "{") or stripped.startswith(_QUOTES):
        try:
            return path, YAML(typ="safe", pure=True).load(stripped)
        except YAMLError as error:
            raise ConfigError(
                key, "value is not valid YAML", found=raw, remedy=_in_quotes(key)
            ) from error
    return path, raw


def _in_quotes(key: str) -> str:
    return f"text that begins with [ or {{ goes in quotes: {key}='\"[...]\"' on a command line"


def parse_scalar(value: Value) -> Value:
    """Text as YAML reads it, for fields that take any kind of value; everything else as it is.

    >>> parse_scalar("3"), parse_scalar("true"), parse_scalar("plus"), parse_scalar(2)
    (3, True, 'plus', 2)
    """
    return YAML(typ="safe", pure=True).load(value) if isinstance(value, str) and value else value


def apply_overrides(values: Mapping[str, Value], overrides: list[str]) -> dict[str, Value]:
    """Return `values` with every `dotted.key=value` set, in order; later ones win."""
    result = dict(values)
    for text in overrides:
        path, value = parse_override(text)
        nested: dict[str, Value] = {path[-1]: value}
        for key in reversed(path[:-1]):
            nested = {key: nested}
        result = merge(result, nested)
    return result


def validate(
    cls: type[SectionT],
    values: Mapping[str, Value],
    source: str,
    layers: Sequence[Mapping[str, Value]] | None = None,
) -> SectionT:
    """Build `cls`, turning every problem into one line with file, key, value and remedy.

    Args:
        layers: what `values` was merged from, later ones over earlier ones; see config.needs.
    """
    context = None if layers is None else {"layers": layers}
    try:
        return cls.model_validate(dict(values), context=context)
    except ValidationError as error:
        raise ConfigErrors(
            [
                one
                for item in error.errors()
                for one in _explained(cls, dict(item), source, typed=layers is not None)
            ]
        ) from None


def _explained(
    root: type[Section], item: Mapping[str, object], source: str, *, typed: bool
) -> Sequence[ConfigError]:
    inner = typing.cast(Mapping[str, object], item.get("ctx") or {}).get("error")
    if not isinstance(inner, ConfigErrors):
        return [_explain(root, item, source, typed=typed)]
    # A config made of this one (a stage) has said already where in itself its problems are.
    return [
        ConfigError(f"{source}: {one.where}", one.problem, found=one.found, remedy=one.remedy)
        for one in inner.errors
    ]


def _explain(
    root: type[Section], item: Mapping[str, object], source: str, *, typed: bool
) -> ConfigError:
    """`typed`: a person may have typed it, as an override say; not a row of a data set."""
    location = [str(part) for part in typing.cast(tuple[object, ...], item["loc"])]
    # A discriminated union puts the chosen tag into the location; it is no key of the file.
    keys = [
        part for i, part in enumerate(location) if i == 0 or not _is_tag(root, location[:i], part)
    ]
    where = f"{source}: {'.'.join(keys)}" if keys else source
    context = typing.cast(Mapping[str, object], item.get("ctx") or {})
    inner = context.get("error")
    if isinstance(inner, ConfigError):
        prefix = f"{where}." if keys else f"{where}: "
        return ConfigError(
            f"{prefix}{inner.where}" if inner.where else where,
            inner.problem,
            found=inner.found,
            remedy=inner.remedy,
        )
    if item["type"] == "extra_forbidden":
        return ConfigError(where, "unknown key", remedy=_instead(root, keys))
    if item["type"] == "missing":
        return ConfigError(where, "is required", remedy="add it to the config")
    return _explain_value(root, item, where, keys, typed=typed)


def _instead(root: type[Section], keys: list[str]) -> str:
    """What to do about an unknown key."""
    owners = {tag for tag, cls in _variants(root, keys[:-1]) if keys[-1] in cls.model_fields}
    if owners:
        kind = f"{'.'.join(keys[:-1])}.type {' or '.join(sorted(owners))}"
        return f"it belongs to {kind}; remove it, or choose that type"
    hint = suggest(root, keys)
    return f"did you mean {hint}?" if hint else "remove it, or see --help for the keys"


def _explain_value(
    root: type[Section], item: Mapping[str, object], where: str, keys: list[str], *, typed: bool
) -> ConfigError:
    kind, value = item["type"], item.get("input")
    if value is None:
        empty = ", or write [] for none" if kind in ("list_type", "tuple_type") else ""
        remedy = "give it a value" if _is_required(root, keys) else "remove it, or give it a value"
        return ConfigError(where, "is empty (null)", remedy=remedy + empty)
    if kind in ("string_type", "path_type") and isinstance(value, list | dict):
        return ConfigError(
            where,
            f"must be text, not a {'list' if isinstance(value, list) else 'mapping'}",
            found=value,
            remedy=_in_quotes(".".join(keys)) if typed else "",
        )
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    found = value if isinstance(value, str | int | float | bool) else None
    return ConfigError(where, message, found=found)


def _is_required(root: type[Section], keys: list[str]) -> bool:
    fields = [c.model_fields.get(keys[-1]) for c in _sections_at(root, keys[:-1])]
    return any(field is not None and field.is_required() for field in fields)


def _is_tag(root: type[Section], path: list[str], part: str) -> bool:
    return any(part == tag for tag, _ in _variants(root, path))


def _variants(root: type[Section], path: list[str]) -> list[tuple[str, type[Section]]]:
    """(type tag, class) of every section that `path` may lead to."""
    current = _sections_at(root, path)
    return [(str(c.model_fields["type"].default), c) for c in current if "type" in c.model_fields]


def _sections_at(root: type[Section], path: list[str]) -> list[type[Section]]:
    """Every section that `path` may lead to; parts that are no key (tags, places in a list) lead
    nowhere else."""
    current: list[type[Section]] = [root]
    for key in path:
        following = [m for c in current if key in c.model_fields for m in _sections_of(c, key)]
        if following:
            current = following
    return current


def _sections_of(cls: type[Section], key: str) -> list[type[Section]]:
    return list(_sections_in(cls.model_fields[key].annotation))


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif typing.get_origin(annotation) in (Union, types.UnionType, list, tuple, Annotated):
        for argument in typing.get_args(annotation):
            yield from _sections_in(argument)


def all_keys(root: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key a section accepts, over all variants of its unions."""
    for name, info in root.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections_in(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def suggest(root: type[Section], path: list[str]) -> str:
    """The accepted key closest to `path` by its last part: the same elsewhere, initials (lr ->
    learning_rate), abbreviated (kl_coef -> kl_coefficient) or misspelt; the nearer section first.

    Returns "" when nothing is close.
    """
    wrong = path[-1]
    known = sorted(set(all_keys(root)) - {".".join(path)}, key=lambda key: (key.count("."), key))
    here = ".".join(path[:-1])
    known.sort(key=lambda key: key.rpartition(".")[0] != here)
    beside = [key for key in known if key.rpartition(".")[0] == here]
    names = [_last(key) for key in known]
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.7)
    found = [
        *(key for key in known if _last(key) == wrong),
        *(key for key in beside if _initials(_last(key)) == wrong),
        *_abbreviated(wrong, beside),
        *(key for key in known if _initials(_last(key)) == wrong),
        *(known[names.index(name)] for name in close),
        *_abbreviated(wrong, known),
    ]
    return found[0] if found else ""


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(name: str) -> str:
    """Of several words; one letter alone would say too little."""
    words = name.split("_")
    return "".join(word[0] for word in words) if len(words) > 1 else ""


def _abbreviated(short: str, keys: list[str]) -> list[str]:
    """Those of `keys` whose words `short` begins, in order and from the first; with fewest words
    first.

    >>> _abbreviated("max_tok", ["a.max_new_tokens", "a.new_max_tokens", "b.max_tokens"])
    ['b.max_tokens', 'a.max_new_tokens']
    """
    parts = short.split("_")
    found: list[str] = []
    for key in keys:
        words = _last(key).split("_")
        left = iter(words)
        begun = all(any(word.startswith(part) for word in left) for part in parts)
        if len(parts[0]) > 1 and words[0].startswith(parts[0]) and begun:
            found.append(key)
    return sorted(found, key=lambda key: _last(key).count("_"))
