"""Two callers on one generator: each gets its own completions, whoever waits."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from megatron_grpo.errors import RolloutError
from megatron_grpo.generation.shared import SharedGenerator
from megatron_grpo.types import Completion, GenerationRequest


class Scripted:
    """Returns completions in the order `release` names them; `collect` blocks in between."""

    version = 3

    def __init__(self) -> None:
        self.ready = threading.Semaphore(0)
        self.queue: list[str] = []
        self.aborted: list[str] = []

    def submit(self, requests) -> None:
        pass

    def release(self, *request_ids: str) -> None:
        self.queue.extend(request_ids)
        self.ready.release()

    def collect(self, deadline_s: float) -> list[Completion]:
        if not self.ready.acquire(timeout=deadline_s):
            raise RolloutError("request x", "late")
        done, self.queue = self.queue, []
        ones = np.ones(1, np.int32)
        return [Completion(r, ones, np.zeros(1, np.float32), ones, "stop") for r in done]

    def abort(self, request_ids) -> None:
        self.aborted.extend(request_ids)

    def pull_weights(self, version: int) -> Future:
        raise NotImplementedError

    def close(self) -> None:
        pass


def request(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id, np.array([1], np.int32), seed=0, max_new_tokens=1)


def ids(completions) -> list[str]:
    return [completion.request_id for completion in completions]


def test_each_view_gets_only_its_own_completions_whatever_the_order():
    scripted = Scripted()
    shared = SharedGenerator(scripted)
    one, two = shared.view("one"), shared.view("two")
    one.submit([request("a"), request("b")])
    two.submit([request("c")])
    scripted.release("c", "b")
    assert ids(one.collect(5)) == ["b"]
    assert ids(two.collect(5)) == ["c"]
    scripted.release("a")
    assert ids(one.collect(5)) == ["a"]


def test_a_view_that_waits_is_served_by_another_thread_inside_collect():
    scripted = Scripted()
    shared = SharedGenerator(scripted)
    one, two = shared.view("one"), shared.view("two")
    one.submit([request("a")])
    two.submit([request("b")])
    results: dict[str, list[str]] = {}
    threads = [
        threading.Thread(target=lambda v=view, n=name: results.update({n: ids(v.collect(10))}))
        for name, view in (("one", one), ("two", two))
    ]
    for thread in threads:
        thread.start()
    scripted.release("b", "a")
    for thread in threads:
        thread.join(timeout=20)
    assert results == {"one": ["a"], "two": ["b"]}


def test_collecting_with_nothing_in_flight_is_an_error_at_once():
    with pytest.raises(RolloutError, match="nothing is in flight for one"):
        SharedGenerator(Scripted()).view("one").collect(60)


def test_a_view_cannot_abort_the_requests_of_another():
    scripted = Scripted()
    shared = SharedGenerator(scripted)
    one, two = shared.view("one"), shared.view("two")
    one.submit([request("a")])
    two.submit([request("b")])
    one.abort(["a", "b"])
    assert scripted.aborted == ["a"]


def test_two_views_may_not_have_the_same_request_in_flight():
    shared = SharedGenerator(Scripted())
    one, two = shared.view("one"), shared.view("two")
    one.submit([request("a")])
    with pytest.raises(RolloutError, match="request a: is already in flight"):
        two.submit([request("a")])


def test_the_generator_is_busy_while_any_view_has_a_request_in_flight(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    scripted = Scripted()
    shared = SharedGenerator(scripted)
    first, second = shared.view("first"), shared.view("second")
    now[0] = 103.0
    first.submit([request("a")])
    now[0] = 104.0
    second.submit([request("b")])
    assert shared.busy_s() == 1.0
    scripted.release("a")
    first.collect(1.0)
    now[0] = 106.0
    assert shared.busy_s() == 3.0
    scripted.release("b")
    second.collect(1.0)
    now[0] = 110.0
    assert shared.busy_s() == 3.0
