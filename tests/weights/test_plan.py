"""A plan fills every engine worker exactly once, from ranks that hold what they send, evenly."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from itertools import pairwise

import networkx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from weights.plan_cases import large_table, small_table

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.layouts import FleetLayout, PlannedTensor, PolicyLayout
from megatron_grpo.weights.plan import Plan, make_plan

POWERS = st.sampled_from([1, 2, 4])


@st.composite
def policies(draw, experts: int) -> PolicyLayout:
    tensor, context, data = draw(POWERS), draw(st.sampled_from([1, 2])), draw(POWERS)
    expert = draw(POWERS) if experts else 1
    expert_tensor = draw(POWERS) if experts else tensor
    assume((tensor * context * data) % (expert * expert_tensor) == 0)
    stages = [(1, 1, ()), (2, 1, ()), (4, 1, ()), (2, 2, ()), (2, 1, (3, 1)), (3, 1, (1, 1, 2))]
    pipeline, virtual, sizes = draw(st.sampled_from(stages))
    return PolicyLayout(tensor, pipeline, virtual, context, expert, expert_tensor, data, 4, sizes)


@st.composite
def fleets(draw, experts: int) -> FleetLayout:
    data = draw(st.sampled_from([1, 2])) if experts else 1
    spread = bool(experts) and draw(st.booleans())
    return FleetLayout(
        draw(st.sampled_from([1, 2, 3])),
        draw(POWERS),
        draw(st.sampled_from([1, 2, 3])),
        data,
        spread,
        4,
    )


@st.composite
def plans(draw, scale: int = 1) -> Plan:
    experts = draw(st.sampled_from([0, 4, 8]))
    table = small_table(experts=experts, tied=draw(st.booleans()), scale=scale)
    return make_plan(table, draw(policies(experts)), draw(fleets(experts)), 2)


def held(plan: Plan, tensor: PlannedTensor, rank: int) -> tuple[int, int] | None:
    """What a policy rank has of a tensor, from Megatron's rank order written out."""
    policy, experts = plan.policy, max(t.expert or 0 for t in plan.tensors) + 1
    stage, within = divmod(rank, policy.tensor * policy.context * policy.data)
    if tensor.place == "layer":
        sizes = policy.stage_sizes or [policy.layers // policy.pipeline] * policy.pipeline
        rounds = [n for n, size in enumerate(sizes) for _ in range(size // policy.virtual)]
        here = (rounds * policy.virtual)[tensor.layer] == stage
    else:
        first, last = stage == 0, stage == policy.pipeline - 1
        here = last if tensor.place == "last" else first or (tensor.tied and last)
    if not here:
        return None
    tp, tp_rank = policy.tensor, within % policy.tensor
    if tensor.expert is not None:
        tp, tp_rank = policy.expert_tensor, within % policy.expert_tensor
        expert_rank = within // policy.expert_tensor % policy.expert
        if tensor.expert * policy.expert // experts != expert_rank:
            return None
    if tensor.axis is None:
        return 0, tensor.extent
    rows = tensor.extent
    if tensor.vocabulary:
        rows = math.ceil(rows / (128 * tp)) * 128 * tp
    return tp_rank * rows // tp, (tp_rank + 1) * rows // tp


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_element_a_worker_needs_comes_once_from_a_rank_that_holds_it(plan):
    got = defaultdict(lambda: np.zeros(0, int))
    for transfer in plan.transfers:
        tensor = plan.tensors[transfer.tensor]
        start, stop = held(plan, tensor, transfer.source) or (0, 0)
        assert start <= transfer.start < transfer.stop <= stop, (tensor.name, transfer)
        for worker in plan.dests[transfer.dest]:
            key = worker, transfer.tensor
            if key not in got:
                got[key] = np.zeros(tensor.extent, int)
            got[key][transfer.start : transfer.stop] += 1
    experts = max(t.expert or 0 for t in plan.tensors) + 1
    for index, tensor in enumerate(plan.tensors):
        needed = plan.fleet.needs(tensor, experts)
        assert {w for w, i in got if i == index} == {w for w, _, _ in needed}
        for worker, start, stop in needed:
            assert (got[worker, index][start:stop] == 1).all()
            assert got[worker, index].sum() == stop - start


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_push_sends_the_model_once_however_many_engines_and_workers_take_it(plan):
    """Each byte goes to all who need it in one broadcast: no fewer bytes can do."""
    model = sum(math.prod(t.shape) for t in plan.tensors) * 2
    assert sum(plan.sent_bytes().values()) == model
    assert sum(plan.link_bytes().values()) == model


@settings(max_examples=60, deadline=None)
@given(plans(scale=4))
def test_no_sender_has_a_fifth_more_than_the_best_possible_division(plan):
    """A maximum is possible if and only if all bytes flow from pools of equal owners through ranks
    of that capacity; a sixth less than the plan's must not be.
    """
    pools = defaultdict(int)
    ranks = range(plan.policy.num_ranks)
    for tensor in plan.tensors:
        ranges = {rank: held(plan, tensor, rank) for rank in ranks}
        cuts = sorted({min(c, tensor.extent) for r in ranges.values() if r for c in r})
        for start, stop in pairwise(cuts):
            owners = tuple(k for k, r in ranges.items() if r and r[0] <= start and stop <= r[1])
            pools[owners] += (stop - start) * tensor.index_elements * 2
    row = max(t.index_elements for t in plan.tensors) * 2
    maximum = max(plan.sent_bytes().values())
    graph = networkx.DiGraph()
    for owners, num_bytes in pools.items():
        graph.add_edge("from", owners, capacity=num_bytes)
        for rank in owners:
            graph.add_edge(owners, rank)
    for rank in ranks:
        graph.add_edge(rank, "to", capacity=int((maximum - row) / 1.2) - 1)
    if maximum > row:
        assert networkx.maximum_flow_value(graph, "from", "to") < sum(pools.values())


def test_the_slices_of_a_split_policy_for_a_split_engine_are_those_counted_by_hand():
    """8 rows over 2 ranks of the policy and 4 workers: worker w takes rows 2w and 2w+1; two key
    heads of 4 rows are held by two workers each; 130 rows of vocabulary are 192 in the engine,
    48 a worker, and 128 a rank in the policy.
    """
    table = [
        PlannedTensor("up", (8, 3), 0),
        PlannedTensor("k", (8, 3), 0, heads=2),
        PlannedTensor("embed", (130, 1), 0, "embedding", vocabulary=True),
        PlannedTensor("norm", (3,), None, "last"),
    ]
    plan = make_plan(table, PolicyLayout(tensor=2, layers=1), FleetLayout(2, 4, layers=1), 2)
    rows = defaultdict(list)
    for tensor, start, stop, source, dest in plan.transfers:
        rows[table[tensor].name].append((start, stop, source, plan.dests[dest]))
    assert sorted(rows["up"]) == [(2 * w, 2 * w + 2, w // 2, (w,)) for w in range(4)]
    assert sorted(rows["k"]) == [(0, 4, 0, (0, 1)), (4, 8, 1, (2, 3))]
    assert sorted(rows["embed"]) == [
        (0, 48, 0, (0,)),
        (48, 96, 0, (1,)),
        (96, 128, 0, (2,)),
        (128, 130, 1, (2,)),
    ]
    assert [(start, stop, dest) for start, stop, _, dest in rows["norm"]] == [(0, 3, (0, 1, 2, 3))]
    assert plan.fleet.members((1, 3)) == [1, 3, 5, 7]


def test_a_rank_on_the_host_of_a_taker_is_preferred():
    table = small_table(layers=1)
    policy, fleet = PolicyLayout(data=2, layers=1), FleetLayout(tensor=2, layers=1)
    hosts = (("a", "b"), ("b", "a"))
    plan = make_plan(table, policy, fleet, 2, hosts)
    far = near = 0
    for transfer in plan.transfers:
        takers = plan.dests[transfer.dest]
        if len(takers) == 1:
            same = hosts[0][transfer.source] == hosts[1][takers[0]]
            near, far = near + same, far + (not same)
    assert near > 10 and far <= 1
    sent = plan.sent_bytes()
    assert max(sent.values()) <= 1.1 * min(sent.values())


def test_a_thousand_ranks_of_a_huge_mixture_are_planned_in_seconds():
    table = large_table()
    policy = PolicyLayout(
        tensor=8, pipeline=16, expert=64, expert_tensor=1, data=8, layers=64
    )  # 61 layers as if there were 64: the last stage has one
    fleet = FleetLayout(engines=32, tensor=8, data=4, expert=True, layers=61)
    started = time.process_time()
    plan = make_plan(table, policy, fleet, 2)
    plan.digest()
    assert time.process_time() - started < 20
    assert (policy.num_ranks, fleet.num_workers) == (1024, 1024)
    sent = plan.sent_bytes()
    assert sum(sent.values()) == 2 * sum(math.prod(t.shape) for t in table)
    assert max(sent.values()) <= 1.2 * sum(sent.values()) / 1024


def test_a_name_that_is_planned_twice_is_refused():
    table = [PlannedTensor("a", (2,)), PlannedTensor("a", (2,))]
    with pytest.raises(WeightExchangeError, match="tensor a"):
        make_plan(table, PolicyLayout(), FleetLayout(), 4)


def test_equal_plans_have_equal_digests_and_any_difference_shows():
    table = small_table()
    first = make_plan(table, PolicyLayout(layers=4), FleetLayout(layers=4), 2)
    assert first.digest() == make_plan(table, first.policy, first.fleet, 2).digest()
    others = [
        make_plan(table, PolicyLayout(data=2, layers=4), first.fleet, 2),
        make_plan(table, first.policy, FleetLayout(2, layers=4), 2),
        make_plan(table, first.policy, first.fleet, 4),
        make_plan(table[:-1], first.policy, first.fleet, 2),
    ]
    assert len({plan.digest() for plan in [first, *others]}) == 5
