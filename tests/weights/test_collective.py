"""A push fills every worker bitwise, or all ends raise within the deadline and say why; real
gloo."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import wait

import pytest
import torch
from tiny import save_tiny
from weights.exchange import CPU, WAIT_S, Ends, spec_of, state_of

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store
from megatron_grpo.weights.sender import CollectiveSender

DENSE = {"family": "qwen2", "num_hidden_layers": 4}
POLICIES = {
    "TP2": PolicyLayout(tensor=2, expert_tensor=2, layers=4),
    "PP2": PolicyLayout(pipeline=2, layers=4),
    "TP2 PP2": PolicyLayout(tensor=2, expert_tensor=2, pipeline=2, layers=4),
    "PP2 VPP2": PolicyLayout(pipeline=2, virtual=2, layers=4),
    "DP2": PolicyLayout(data=2, layers=4),
}
EXPERTS = {
    "EP2": PolicyLayout(expert=2, data=2, layers=4),
    "TP2 ETP2": PolicyLayout(tensor=2, expert_tensor=2, layers=4),
    "TP2 EP2": PolicyLayout(tensor=2, expert=2, layers=4),
}
FLEETS = {
    "TP1": FleetLayout(layers=4),
    "TP2": FleetLayout(tensor=2, layers=4),
    "two of TP1": FleetLayout(engines=2, layers=4),
}
SPREAD = {"TP2 EP": FleetLayout(tensor=2, expert=True, layers=4)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for seed in (0, 1):
        made["dense", seed] = save_tiny(tmp_path_factory.mktemp("dense"), **DENSE, seed=seed)
        made["experts", seed] = save_tiny(
            tmp_path_factory.mktemp("experts"), "qwen3_moe", num_hidden_layers=4, seed=seed
        )
    return made


@pytest.mark.parametrize(
    ("kind", "policy", "fleet"),
    [
        *itertools.product(["dense"], POLICIES, FLEETS),
        *itertools.product(["experts"], EXPERTS, [*FLEETS, *SPREAD]),
    ],
)
def test_b3_workers_hold_their_parts_bitwise_and_no_byte_is_sent_twice(
    folders, kind, policy, fleet
):
    states = [state_of(folders[kind, seed]) for seed in (0, 1)]
    layouts = (POLICIES | EXPERTS)[policy], (FLEETS | SPREAD)[fleet]
    with Ends(spec_of(folders[kind, 0]), *layouts, verify="every") as ends:
        for version, state in enumerate(states):
            reports = ends.push(version, state)
            assert sum(r.sent_bytes for r in reports) == sum(t.nbytes for t in state.values())
            assert sum(r.num_tensors for r in reports) == len(state)
            for worker, held in enumerate(ends.held):
                for name, whole in state.items():
                    part = ends.part(worker, whole, ends.table[name])
                    assert (part is None) is (name not in held)
                    assert part is None or torch.equal(held[name].view(part.shape), part), name


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_b3_buckets_smaller_than_a_row_or_larger_than_the_model_carry_the_same(
    tmp_path, bucket_bytes
):
    folder = save_tiny(tmp_path, "qwen3_moe", num_hidden_layers=1, vocab_size=20)
    state = state_of(folder)
    policy = PolicyLayout(expert=2, data=2, layers=1)
    fleet = FleetLayout(tensor=2, expert=True, layers=1)
    with Ends(spec_of(folder), policy, fleet, bucket_bytes=bucket_bytes) as ends:
        ends.push(0, state)
        for worker, held in enumerate(ends.held):
            for name, whole in state.items():
                part = ends.part(worker, whole, ends.table[name])
                assert part is None or torch.equal(held[name].view(part.shape), part)


def test_weights_are_cast_once_at_the_sender(folders):
    state = state_of(folders["dense", 0])
    with Ends(
        spec_of(folders["dense", 0]), POLICIES["TP2"], FLEETS["TP1"], dtype="bfloat16"
    ) as ends:
        reports = ends.push(0, state)
        assert sum(r.sent_bytes for r in reports) == sum(2 * t.numel() for t in state.values())
        for name, whole in state.items():
            assert torch.equal(ends.held[0][name], whole.bfloat16())


def test_an_exact_tensor_is_not_cast(tmp_path):
    folder = save_tiny(tmp_path, "deepseek_v3")
    state = state_of(folder)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    policy, fleet = PolicyLayout(tensor=2, expert=2, layers=2), FleetLayout(tensor=2, layers=2)
    with Ends(spec_of(folder), policy, fleet, dtype="bfloat16", verify="every") as ends:
        reports = ends.push(0, state)
        sent = sum(2 * t.numel() for t in state.values()) + 2 * state[bias].numel()
        assert sum(r.sent_bytes for r in reports) == sent
        for worker, held in enumerate(ends.held):
            for name, whole in state.items():
                part = ends.part(
                    worker, whole if name == bias else whole.bfloat16(), ends.table[name]
                )
                assert part is not None and held[name].dtype == part.dtype
                assert torch.equal(held[name].view(part.shape), part), name


def test_frozen_tensors_are_sent_with_the_first_push_only_and_again_when_asked(folders):
    old, new = (state_of(folders["dense", seed]) for seed in (0, 1))
    frozen = frozenset(name for name in old if ".layers.0." in name)
    kept = sum(old[name].nbytes for name in frozen)
    everything = sum(t.nbytes for t in old.values())
    with Ends(
        spec_of(folders["dense", 0]), POLICIES["PP2"], FLEETS["TP2"], frozen=frozen, verify="every"
    ) as ends:
        ends.push(0, old)
        reports = ends.push(1, new)
        assert sum(r.sent_bytes for r in reports) == everything - kept
        assert sum(r.num_tensors for r in reports) == len(old) - len(frozen)
        for receiver in ends.receivers:
            assert receiver.unsent == frozen
        for name in old:
            part = ends.part(0, (old if name in frozen else new)[name], ends.table[name])
            assert torch.equal(ends.held[0][name].view(part.shape), part)
        for sender in ends.senders:
            sender.send_everything_next()
        assert sum(r.sent_bytes for r in ends.push(2, new)) == everything


# What goes wrong. Every end must raise, soon, and name the cause.


class Failing:
    """Two policy ranks (pipeline) and two workers; what each end of one push raised."""

    def __init__(self, folder, **settings) -> None:
        self.state = state_of(folder)
        self.ends = Ends(
            spec_of(folder),
            POLICIES["PP2"],
            FLEETS["two of TP1"],
            **({"deadline_s": 4.0} | settings),
        )

    def errors(
        self, *, shards=None, versions=(5, 5, 5, 5), spoil=(None, None), spared: int | None = None
    ) -> list[str]:
        """Of rank 0, rank 1, worker 0, worker 1; None as a version leaves that end out. `spared`
        may have confirmed before another failed.
        """
        ends, started = self.ends, time.monotonic()
        shards = shards or [ends.shard(rank, self.state) for rank in range(2)]
        calls = [
            ends.start(ends.senders[r].send, versions[r], shards[r])
            if versions[r] is not None
            else None
            for r in range(2)
        ]
        calls += [
            ends.start(ends.take, w, versions[2 + w], spoil[w])
            if versions[2 + w] is not None
            else None
            for w in range(2)
        ]
        wait([call for call in calls if call], WAIT_S)
        self.seconds = time.monotonic() - started
        found = []
        for call in calls:
            if call is None or len(found) == spared:
                found.append("")
                continue
            with pytest.raises(WeightExchangeError) as error:
                call.result(0)
            found.append(str(error.value))
        with ends:
            pass
        return found


def test_b3_a_withheld_tensor_fails_on_all_ends_by_name(folders):
    case = Failing(folders["dense", 0])
    shards = [case.ends.shard(rank, case.state) for rank in range(2)]
    del shards[1]["model.layers.3.mlp.up_proj.weight"]
    for text in case.errors(shards=shards):
        assert "model.layers.3.mlp.up_proj.weight on policy rank 1: is missing" in text
    assert case.seconds < 3


def test_i5_a_shard_of_another_shape_fails_on_all_ends_by_name_and_rank(folders):
    case = Failing(folders["dense", 0])
    shards = [case.ends.shard(rank, case.state) for rank in range(2)]
    name = "model.layers.0.self_attn.k_proj.weight"
    shards[0][name] = shards[0][name].t()
    for text in case.errors(shards=shards):
        assert f"{name} on policy rank 0" in text and "(64, 32)" in text
    assert case.seconds < 3


def test_another_version_fails_on_all_ends_and_names_both(folders):
    texts = Failing(folders["dense", 0]).errors(versions=(5, 5, 6, 5))
    assert all("version 5" in text and "version 6" in text for text in texts[:3])


def test_a_worker_that_holds_something_else_fails_the_push_by_tensor_and_worker(folders):
    def spoil(held):
        held["model.norm.weight"][3] += 1e-6

    case = Failing(folders["dense", 0])
    texts = case.errors(spoil=(None, spoil), spared=2)
    for text in (texts[0], texts[1], texts[3]):
        assert "engine 1 worker 0" in text and "model.norm.weight differs" in text
    assert case.seconds < 3


def test_a_worker_that_has_lost_or_found_a_tensor_fails_the_push_by_name(folders):
    def lose(held):
        held["model.stranger"] = held.pop("model.norm.weight")

    for text in Failing(folders["dense", 0]).errors(spoil=(lose, None), spared=3)[:3]:
        assert "model.stranger is held, but was not sent; model.norm.weight is missing" in text


@pytest.mark.parametrize(("verify", "fails"), [("first", False), ("never", False), ("every", True)])
def test_only_the_configured_pushes_are_checked(folders, verify, fails):
    def spoil(held):
        held["model.norm.weight"].zero_()

    case = Failing(folders["dense", 0], verify=verify)
    case.ends.push(0, case.state)
    if fails:
        texts = case.errors(spoil=(spoil, None), spared=3)
        assert all("model.norm.weight differs" in text for text in texts[:3])
        return
    with case.ends as ends:
        takes = [ends.start(ends.take, w, 1, spoil) for w in range(2)]
        sends = [
            ends.start(s.send, 1, ends.shard(r, case.state)) for r, s in enumerate(ends.senders)
        ]
        wait([*takes, *sends], WAIT_S)
        assert all(call.exception(0) is None for call in [*takes, *sends])


@pytest.mark.parametrize(
    ("absent", "who"), [(1, "policy rank 1"), (2, "engine 0 worker 0"), (3, "engine 1 worker 0")]
)
def test_i5_an_end_that_never_comes_is_named_by_the_others_at_the_deadline(folders, absent, who):
    case = Failing(folders["dense", 0], deadline_s=1.5)
    versions = [5, 5, 5, 5]
    versions[absent] = None
    texts = case.errors(versions=versions)
    assert any(f"{who} had not begun version 5" in text for text in texts)
    assert 1.0 < case.seconds < 6


def test_i5_a_worker_that_breaks_off_fails_everybody_with_its_reason(folders):
    case = Failing(folders["dense", 0])

    def loading(worker: int) -> None:
        stream = case.ends.receivers[worker].receive(5)
        next(stream)
        stream.close()

    ends = case.ends
    broken, peer = ends.start(loading, 1), ends.start(ends.take, 0, 5)
    sends = [ends.start(s.send, 5, ends.shard(r, case.state)) for r, s in enumerate(ends.senders)]
    wait([broken, peer, *sends], WAIT_S)
    for send in sends:
        with pytest.raises(WeightExchangeError, match="engine 1 worker 0: its engine stopped"):
            send.result(0)
    with ends:
        pass


def test_an_exchange_that_has_failed_stays_failed(folders):
    case = Failing(folders["dense", 0], deadline_s=1.5)
    case.errors(versions=(5, 5, None, 5))
    with pytest.raises(WeightExchangeError):
        case.ends.senders[0].send(6, case.ends.shard(0, case.state))


def test_a_worker_of_another_model_is_refused_before_any_push(folders, tmp_path):
    other = spec_of(save_tiny(tmp_path, "qwen2", num_hidden_layers=4, intermediate_size=64))
    said = []

    def join(exchange):
        with pytest.raises(WeightExchangeError) as error:
            CollectiveReceiver(join_store(exchange.rendezvous, 5.0), exchange, other, 0, CPU)
        said.append(str(error.value))

    store, rendezvous = host_store(5.0)
    exchange = Exchange(
        rendezvous, PolicyLayout(layers=4), FleetLayout(layers=4), "float32", "gloo", 64, 5.0
    )
    thread = threading.Thread(target=join, args=(exchange,))
    thread.start()
    with pytest.raises(WeightExchangeError, match="engine 0 worker 0: has made another plan"):
        CollectiveSender(store, exchange, spec_of(folders["dense", 0]), 0, CPU)
    thread.join(10)
    assert "policy rank 0: has made another plan" in said[0]


def test_k1_two_hundred_pushes_leave_memory_flat(tmp_path):
    folder = save_tiny(tmp_path, "qwen2", num_hidden_layers=2)
    state = state_of(folder)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    with Ends(spec_of(folder), PolicyLayout(layers=2), FleetLayout(layers=2)) as ends:
        for version in range(200):
            ends.push(version, state)
            if version == 50:
                before, threads = resident(), threading.active_count()
        assert resident() - before < 4 << 20
        assert threading.active_count() <= threads  # those of tests before may end
