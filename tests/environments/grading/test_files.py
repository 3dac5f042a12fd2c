"""Files of responses to grade: what a field may hold."""

from __future__ import annotations

import pytest

from megatron_grpo.environments.grading.files import read_rows
from megatron_grpo.errors import RewardError


def test_numbers_of_any_size_are_taken_as_they_are_written(tmp_path):
    file, digits = tmp_path / "rows.jsonl", "1" * 400
    file.write_text(f'{{"response": "5", "answer": {digits}}}\n')
    assert list(read_rows(file)) == [("5", digits)]


@pytest.mark.parametrize("value", ["true", "[5]", "1e999"])
def test_what_is_no_number_is_refused_with_its_line(tmp_path, value):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"response": "5", "answer": {value}}}\n')
    with pytest.raises(RewardError, match="line 1: must be text or a number"):
        list(read_rows(file))
