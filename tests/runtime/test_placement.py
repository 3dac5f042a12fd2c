"""Placements: what is granted keeps its rules, what cannot be is refused with numbers."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config import ParallelConfig
from megatron_grpo.errors import ClusterError
from megatron_grpo.runtime.placement import (
    Node,
    Placement,
    assign,
    missing,
    plan_placement,
    ranks_of_block,
)


def plan(parallel: ParallelConfig, engines: int = 0, engine_tensor: int = 1) -> Placement:
    return plan_placement(parallel.world_size, engines, engine_tensor, 1, parallel)


def plan_shared(parallel: ParallelConfig, engines: int, engine_tensor: int) -> Placement:
    return plan_placement(parallel.world_size, engines, engine_tensor, 1, parallel, colocated=True)


def gpu_nodes(*sizes: int, domains: str = "") -> list[Node]:
    names = domains.split() or [""] * len(sizes)
    return [
        Node(f"n{i:03d}", gpus=size, cpus=64, domain=domain)
        for i, (size, domain) in enumerate(zip(sizes, names))
    ]


def refused(placement: Placement, nodes: list[Node]) -> str:
    with pytest.raises(ClusterError) as caught:
        assign(placement, nodes)
    return str(caught.value)


def homes(placement: Placement) -> list[str]:
    return [str(bundle.node) for bundle in placement.bundles]


def test_policy_ranks_come_first_and_an_engine_is_one_bundle():
    placement = plan_placement(2, 2, 4, 1)
    assert [(b.role, b.cpus, b.gpus) for b in placement.bundles] == [
        ("policy rank 0", 1, 1),
        ("policy rank 1", 1, 1),
        ("engine 0", 4, 4),
        ("engine 1", 4, 4),
    ]
    assert placement.engine_bundle(1) == 3


def test_i1_more_gpus_than_there_are_is_refused_with_the_shortfall():
    message = refused(plan_placement(2, 0, 1, 1), gpu_nodes(1))
    assert "hold 1 of them" in message
    assert "add nodes for 1 more (1 GPU)" in message


def test_i1_a_bundle_larger_than_every_node_is_refused_though_the_total_suffices():
    message = refused(plan_placement(0, 1, 6, 1), gpu_nodes(4, 4))
    assert "an engine needs 6 GPU on one node; the nodes have 2 x 4 GPU" in message


def test_i1_bundles_of_six_on_nodes_of_four_and_eight():
    message = refused(plan_placement(0, 2, 6, 1), gpu_nodes(4, 8))
    assert "2 times an engine of 6 GPU on one node; the nodes (1 x 8 GPU, 1 x 4 GPU) hold 1" in (
        message
    )


def test_i1_a_gpu_whose_node_has_no_core_left_does_not_count():
    message = refused(plan_placement(2, 0, 1, 1), [Node("a", gpus=2, cpus=1)])
    assert "hold 1 of them" in message


def test_what_a_waiting_group_lacks_is_told_by_node():
    placement = assign(plan(ParallelConfig(data=4)), gpu_nodes(2, 2))
    free = {"n000": {"CPU": 64.0, "GPU": 2.0}, "n001": {"CPU": 64.0, "GPU": 1.0}}
    assert missing(placement, free) == "n001 has 1 of 2 GPU free"


def test_a_pipeline_stays_inside_a_node_where_it_fits():
    placement = assign(plan(ParallelConfig(tensor=2, pipeline=4, data=2)), gpu_nodes(8, 8))
    # Megatron: rank = tensor + 2 * (data + 2 * stage); replica 0 is ranks 0 1 4 5 8 9 12 13.
    first = {rank for rank, home in enumerate(homes(placement)) if home == "n000"}
    assert first == {0, 1, 4, 5, 8, 9, 12, 13}


def test_a_pipeline_stays_inside_a_domain_where_it_fits():
    nodes = gpu_nodes(8, 8, 8, 8, 8, domains="a b a b b")
    placement = assign(plan(ParallelConfig(tensor=8, pipeline=2, data=2)), nodes)
    # 16 GPUs of one replica: both nodes of a, and two of the three of b.
    domain = {node.name: node.domain for node in nodes}
    for replica in range(2):
        blocks = [ranks_of_block(placement.parallel, 2 * replica + stage) for stage in range(2)]
        assert len({domain[homes(placement)[r]] for block in blocks for r in block}) == 1
    assert len(placement.spares) == 1


def test_engines_take_the_nodes_after_the_policy_and_the_rest_is_spare():
    placement = assign(plan(ParallelConfig(tensor=4, data=2), 2, 4), gpu_nodes(8, 8, 8))
    assert homes(placement) == ["n000"] * 8 + ["n001"] * 2
    assert placement.spares == ("n002",)


def test_roles_of_a_heterogeneous_job_are_kept():
    nodes = [Node("e", gpus=8, cpus=64, role="engine"), Node("p", gpus=8, cpus=64, role="policy")]
    placement = assign(plan(ParallelConfig(data=4), 2, 2), nodes)
    assert homes(placement) == ["p"] * 4 + ["e"] * 2
    assert "2 GPU" in refused(plan(ParallelConfig(data=4), 1, 2), nodes[1:])


def test_sizes_that_do_not_divide_each_other_are_placed_where_a_way_exists():
    # 7 GPUs each: 1 group of 3 and 1 engine of 4 per node is the only way.
    placement = assign(plan(ParallelConfig(tensor=3, data=3), 3, 4), gpu_nodes(7, 7, 7))
    assert Counter(homes(placement)[:9]) == Counter({"n000": 3, "n001": 3, "n002": 3})
    assert sorted(homes(placement)[9:]) == ["n000", "n001", "n002"]


def test_colocated_engines_ask_for_nothing_and_sit_on_the_devices_of_whole_tensor_groups():
    # Ranks of the blocks, replica by replica: (0 1), (4 5), (2 3), (6 7).
    layout = ParallelConfig(tensor=2, pipeline=2, data=2)
    placement = assign(plan_shared(layout, 2, 4), gpu_nodes(4, 4, 4))
    engines = placement.bundles[8:]
    assert [(e.node, e.cpus, e.gpus) for e in engines] == [("n000", 0, 0), ("n001", 0, 0)]
    assert [e.shares for e in engines] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert placement.spares == ("n002",)


def test_colocated_engines_larger_than_what_a_full_node_leaves_move_the_policy_apart():
    # 8 ranks fill a node of 8 and hold one engine of 6; only 6 and 6 hold two, with 12 ranks.
    placement = assign(plan_shared(ParallelConfig(data=12), 2, 6), gpu_nodes(8, 8))
    assert Counter(homes(placement)[:12]) == Counter({"n000": 6, "n001": 6})
    assert [len(e.shares) for e in placement.bundles[12:]] == [6, 6]


def test_i1_colocated_engines_that_find_no_place_are_refused_with_the_numbers():
    layout = ParallelConfig(tensor=2, data=2)
    message = refused(plan_shared(layout, 3, 2), gpu_nodes(8, 8))
    assert "3 colocated engines of 2 need 6 GPU of the policy, which has 4" in message
    assert "use 2 engines, or a policy of 2 ranks more" in message
    message = refused(plan_shared(ParallelConfig(data=8), 1, 8), gpu_nodes(4, 4))
    assert "1 engines of 8 GPU each, of policy ranks on one node, do not come about" in message
    message = refused(plan_shared(ParallelConfig(data=8), 1, 8), gpu_nodes(4))
    assert "8 times a tensor group of the policy of 1 GPU" in message


def test_4096_gpus_are_planned_in_two_seconds():
    nodes = [Node(f"n{i:04d}", 8, 64, domain=f"rack{i // 16}") for i in range(512)]
    layout = ParallelConfig(tensor=8, pipeline=4, context=2, data=32)
    started = time.process_time()
    placement = assign(plan(layout, 256, 8), nodes)
    assert time.process_time() - started < 2.0
    # 256 nodes full of policy ranks, 256 with one engine of 8 workers.
    assert Counter(Counter(homes(placement)).values()) == {8: 256, 1: 256}


@st.composite
def clusters(draw) -> tuple[Placement, list[Node]]:
    sizes = draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=1, max_size=6))
    nodes = [
        Node(f"n{i}", size, draw(st.sampled_from([size, 64])), draw(st.sampled_from(["a", "b"])))
        for i, size in enumerate(sizes)
    ]
    layout = ParallelConfig(
        tensor=draw(st.sampled_from([1, 2, 3, 4])),
        pipeline=draw(st.integers(1, 3)),
        context=draw(st.integers(1, 2)),
        data=draw(st.integers(1, 3)),
    )
    make = plan_shared if draw(st.booleans()) else plan
    return make(layout, draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 3, 4]))), nodes


def possible(placement: Placement, nodes: list[int]) -> bool:
    """Whether any way exists: every split of groups and engines over the nodes, tried in turn."""
    tensor, engine = placement.parallel.tensor, placement.engine_tensor
    groups = placement.parallel.world_size // tensor
    engines = len(placement.bundles) - placement.num_policy_ranks
    reached = {(0, 0)}
    for size in nodes:
        reached = {
            (g + k, min(engines, e + room // engine))
            for g, e in reached
            for k in range(min(groups - g, size // tensor) + 1)
            for room in [k * tensor if placement.colocated else size - k * tensor]
        }
    return (groups, engines) in reached


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_no_gpu_is_given_twice_groups_are_whole_and_nothing_possible_is_refused(case):
    placement, nodes = case
    parallel = placement.parallel
    groups = parallel.world_size // parallel.tensor
    if not possible(placement, [n.gpus for n in nodes]):
        message = refused(placement, nodes)
        assert "\n" not in message
        return
    assigned = assign(placement, nodes)
    assert assign(placement, nodes[::-1]) == assigned
    held = Counter()
    for bundle in assigned.bundles:
        held[bundle.node] += bundle.gpus
    assert all(held[node.name] <= node.gpus for node in nodes)
    blocks = [ranks_of_block(parallel, block) for block in range(groups)]
    assert sorted(rank for block in blocks for rank in block) == list(range(parallel.world_size))
    where = homes(assigned)
    for block in blocks:
        assert len({where[rank] for rank in block}) == 1
    engines = assigned.bundles[placement.num_policy_ranks :]
    if placement.colocated:
        used = [rank for engine in engines for rank in engine.shares]
        assert len(set(used)) == len(used) == placement.engine_tensor * len(engines)
        assert all(where[rank] == engine.node for engine in engines for rank in engine.shares)
    else:
        assert all(engine.gpus == placement.engine_tensor for engine in engines)
    assert set(assigned.spares) == {n.name for n in nodes} - set(where)
