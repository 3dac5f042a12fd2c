"""The record of what a process did."""

import time

import pytest

from megatron_grpo.spans import SpanRecorder


def test_spans_are_told_in_unix_time_with_their_numbers():
    spans = SpanRecorder()
    before = time.time()
    with spans("decode") as attrs:
        time.sleep(0.02)
        attrs["steps"] = 3
    after = time.time()
    (span,) = spans.read()
    assert (span.name, span.attrs) == ("decode", {"steps": 3})
    # The two clocks drift by far less than a millisecond over a test.
    assert before - 1e-3 <= span.start_s <= span.end_s <= after + 1e-3
    assert span.seconds >= 0.02


def test_a_block_that_raises_is_recorded_too():
    spans = SpanRecorder()
    with pytest.raises(KeyError), spans("broken"):
        raise KeyError
    assert [span.name for span in spans.read()] == ["broken"]


def test_only_the_newest_are_kept_and_reading_takes_nothing_away():
    spans = SpanRecorder(kept=2)
    for name in "abc":
        spans.add(name, 0.0, 1.0)
    assert [span.name for span in spans.read()] == ["b", "c"] == [s.name for s in spans.read()]


def test_times_known_late_are_added_before_reading():
    spans = SpanRecorder()
    spans.before_read(lambda: spans.add("kernel", 1.0, 3.0))
    (span,) = spans.read()
    assert span.seconds == pytest.approx(2.0)


def test_a_span_costs_less_than_fifty_microseconds():
    spans = SpanRecorder()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            with spans("x"):
                pass
        best = min(best, time.perf_counter() - start)
    assert best / 100 < 50e-6
