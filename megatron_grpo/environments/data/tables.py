"""Rows of JSON lines, JSON, parquet and Hugging Face data set files, one at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from itertools import islice
from json import JSONDecodeError
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from megatron_grpo.errors import ConfigError

Row = Mapping[str, object]

_SHIPPED, _HUB = "shipped:", "hub:"
_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
# More is not a data set but somebody's disk.
_MOST_ENTRIES = 20_000


def read_rows(path: str, files: str, key: str) -> Iterator[Row]:
    """Every row of a source, in the order of its files' names.

    Args:
        path: see config.data.ProblemData.path.
        files: pattern of the files of a folder.
        key: config key to name in errors.

    Raises:
        ConfigError: nothing there, or not readable as what its name says.
    """
    for _, row in numbered_rows(path, files, key):
        yield row


def numbered_rows(path: str, files: str, key: str) -> Iterator[tuple[str, Row]]:
    """The same with the place of each row, FILE:NUMBER, where NUMBER is a line's or counts from 1.

    Raises:
        ConfigError: as above, or a row that is none, or whose text is none.
    """
    try:
        found = find_files(path, files, key)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # pathlib's
        raise ConfigError(
            key, f"cannot be looked up: {error}", found=path, remedy="correct it, or files"
        ) from error
    names = Counter(file.name for file in found)
    for file in found:
        name = file.name if names[file.name] == 1 else str(file)
        try:
            for number, row in _read(file, name):
                yield f"{name}:{number}", row
        except ConfigError:
            raise
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(
                key, f"{file.name} cannot be read: {first}", found=str(file), remedy="repair it"
            ) from error


def find_files(path: str, pattern: str, key: str) -> list[Path]:
    """The files of a source, sorted by name."""
    if path.startswith(_SHIPPED):
        return [_shipped(path.removeprefix(_SHIPPED), key)]
    root = _from_hub(path, pattern, key) if path.startswith(_HUB) else Path(path).expanduser()
    if root.is_file():
        return [root]
    entries = list(islice(root.glob(pattern), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        raise ConfigError(
            key,
            f"holds more than {_MOST_ENTRIES} files and folders",
            found=path,
            remedy="name the folder of the data itself, or narrow its files pattern",
        )
    found = sorted(p for p in entries if p.suffix in _SUFFIXES and p.is_file())
    if (root / "state.json").is_file():  # written by save_to_disk: its tables, not its notes
        found = [p for p in found if p.suffix == ".arrow"]
    if not found:
        raise ConfigError(
            key,
            f"holds no {', '.join(_SUFFIXES)} file" if root.is_dir() else "does not exist",
            found=path,
            remedy="correct the path, or the files pattern",
        )
    return found


def _shipped(name: str, key: str) -> Path:
    folder = Path(str(resources.files("megatron_grpo") / "data"))
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.jsonl")))
        raise ConfigError(key, "is not shipped", found=name, remedy=f"there are {names}")
    return file


def _from_hub(path: str, pattern: str, key: str) -> Path:
    name = path.removeprefix(_HUB)
    patterns = None if pattern == "**/*" else [pattern]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(
            key,
            "is not in the local cache and the hub did not give it",
            found=name,
            remedy="give a local path, or fetch it where there is a network: "
            f"hf download --repo-type dataset {name}",
        ) from error


def _read(file: Path, name: str) -> Iterator[tuple[int, Row]]:
    match file.suffix:
        case ".jsonl":
            yield from _json_lines(file, name)
        case ".json":
            text = file.read_text(encoding="utf-8-sig")
            content = json.loads(text)
            if not isinstance(content, list):
                raise ValueError("holds no list of rows")
            for number, row in enumerate(content, 1):
                yield number, _object(row, text, f"{name}:{number}")
        case ".parquet":
            with pq.ParquetFile(file) as table:
                yield from _numbered(table.iter_batches(1024))
        case ".arrow":
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                yield from _numbered(stream)
        case _:
            raise ValueError(f"is none of {', '.join(_SUFFIXES)}")


def _numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Row]]:
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _json_lines(file: Path, name: str) -> Iterator[tuple[int, Row]]:
    with file.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a mark
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{name}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _no_json(where, line, error) from error
                yield number, _object(row, line, where)


def _no_json(where: str, line: str, error: Exception) -> ConfigError:
    # json's own message counts lines, and a line's end as one.
    place = f"{error.msg}, column {error.pos + 1}" if isinstance(error, JSONDecodeError) else error
    return ConfigError(
        where,
        f"is not JSON: {place}",
        found=line.strip()[:40],
        remedy="write one object per line; a file that is a single list of rows ends in .json",
    )


def _object(row: object, text: str, where: str) -> Row:
    """
    Args:
        text: the JSON that the row was read from.
    """
    if not isinstance(row, dict):
        raise ConfigError(
            where,
            "must be a JSON object",
            found=json.dumps(row)[:40],
            remedy='write it as {"field": value, ...}, or leave it out',
        )
    if "\\ud" in text.lower() and not _is_text(row):
        raise ConfigError(
            where,
            "holds half a character (a surrogate, \\ud800 to \\udfff, without its partner)",
            remedy="repair the row, or leave it out",
        )
    return row


def _is_text(row: object) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def field(row: Row, path: str, key: str, source: str) -> object:
    """The value at a dotted path, None where a row leaves it out or has null.

    >>> field({"prompt": [{"content": "2+3?"}]}, "prompt.0.content", "task", "dapo")
    '2+3?'

    Raises:
        ConfigError: the row has other fields.
    """
    if path in row:  # a column may have a dot in its name
        return row[path]
    value: object = row
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif value is None:
            return None
        else:
            raise ConfigError(
                key,
                f"a row of {source} has no field {part}",
                found=path,
                remedy=f"its fields are {', '.join(map(str, row))}",
            )
    return value
