"""Placements that can never be granted are refused at once, with numbers."""

import pytest

from megatron_grpo.errors import ClusterError
from megatron_grpo.runtime.placement import check_placement, plan_placement


def refused(placement, nodes) -> str:
    with pytest.raises(ClusterError) as caught:
        check_placement(placement, nodes)
    return str(caught.value)


def test_policy_ranks_come_first_and_an_engine_is_one_bundle():
    placement = plan_placement(2, 2, 4, 1)
    assert [(b.role, b.cpus, b.gpus) for b in placement.bundles] == [
        ("policy rank 0", 1, 1),
        ("policy rank 1", 1, 1),
        ("engine 0", 4, 4),
        ("engine 1", 4, 4),
    ]
    assert placement.engine_bundle(1) == 3


def test_i1_more_gpus_than_any_cluster_total_is_refused_with_the_shortfall():
    message = refused(plan_placement(2, 0, 1, 1), [{"CPU": 2.0, "GPU": 1.0}])
    assert "needs 2 GPU in all; the nodes have 1" in message
    assert "add 1 GPU" in message


def test_i1_a_bundle_larger_than_every_node_is_refused_though_the_total_suffices():
    message = refused(plan_placement(0, 1, 6, 1), [{"CPU": 64.0, "GPU": 4.0}] * 2)
    assert message.startswith("engine 0: needs 6 GPU on one node; the nodes have 4, 4")


def test_i1_bundles_of_six_on_nodes_of_four_and_eight_do_not_fit_beside_each_other():
    nodes = [{"CPU": 64.0, "GPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}]
    message = refused(plan_placement(0, 2, 6, 1), nodes)
    assert "engine 1: does not fit beside the others: no node has 6 CPU and 6 GPU left" in message


def test_a_placement_that_fits_passes():
    check_placement(
        plan_placement(4, 1, 4, 1), [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}]
    )
