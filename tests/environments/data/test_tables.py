"""The same rows from every kind of file."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_grpo.environments.data.tables import field, read_rows
from megatron_grpo.errors import ConfigError

ROWS = [
    {"prompt": [{"role": "user", "content": f"{i}+1?"}], "gold": {"truth": str(i + 1)}, "level": i}
    for i in range(5)
]


def write_arrow(folder):
    """As datasets' save_to_disk does: a stream of record batches, and notes beside it."""
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": []}')
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "two parquet files", "save_to_disk"])
def test_every_kind_of_file_holds_the_same_rows(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "save_to_disk":
        path = write_arrow(tmp_path / "saved")
    else:
        path = tmp_path
        pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "train-0.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[2:]), tmp_path / "train-1.parquet")
    assert list(read_rows(str(path), "**/*", "task.train.x.path")) == ROWS


def test_a_pattern_chooses_the_files_of_a_folder(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "train-0.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), tmp_path / "test-0.parquet")
    assert list(read_rows(str(tmp_path), "test-*.parquet", "k")) == ROWS[2:]


def test_a_dotted_path_goes_into_objects_and_lists():
    assert field(ROWS[3], "prompt.0.content", "k", "x") == "3+1?"
    assert field(ROWS[3], "gold.truth", "k", "x") == "4"
    assert field({"a.b": 7}, "a.b", "k", "x") == 7
    assert field({"gold": None}, "gold.truth", "k", "x") is None


@pytest.mark.parametrize("path", ["answer", "gold.value", "prompt.1.content", "level.x"])
def test_a_field_that_is_not_there_is_an_error_that_lists_those_that_are(path):
    with pytest.raises(ConfigError, match="its fields are prompt, gold, level"):
        field(ROWS[0], path, "task.train.x.answer", "x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a"', "rows.jsonl:2: is not JSON"),
        ("rows.jsonl", "[1]", "rows.jsonl:1: must be a JSON object"),
        ("rows.json", '[{"a": "\\udc00"}]', "rows.json:1: holds half a character"),
        ("rows.json", "{}", "holds no list"),
        ("rows.json", "[" * 100_000, "cannot be read: maximum recursion depth"),
        ("rows.parquet", "no parquet", "cannot be read"),
        ("rows.txt", "", "is none of"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(str(tmp_path / name), "**/*", "task.train.x.path"))


@pytest.mark.parametrize(
    ("path", "files"),
    [("~nobody-of-this-name/x", "*"), ("x" * 5000, "*"), (".", "/*"), (".", ""), (".", "**x")],
)
def test_a_path_or_pattern_that_means_nothing_is_refused(path, files):
    with pytest.raises(ConfigError, match=r"task\.path"):
        list(read_rows(path, files, "task.path"))


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="does not exist"):
        list(read_rows("/no/such/folder", "**/*", "task.train.x.path"))
    with pytest.raises(ConfigError, match=r"there are .*gsm8k_sample"):
        list(read_rows("shipped:gsm9k", "**/*", "task.train.x.path"))
