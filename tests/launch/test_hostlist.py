"""Every form of node list that SLURM prints."""

import pytest
from grpo_launch.hostlist import expand_hosts
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("gpu7", ["gpu7"]),
        ("a,b,a", ["a", "b", "a"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[5]", ["n5"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("gpu[1-2],login,cpu[03,05]", ["gpu1", "gpu2", "login", "cpu03", "cpu05"]),
        ("x-a-1.cluster[1-2].example", ["x-a-1.cluster1.example", "x-a-1.cluster2.example"]),
        ("gpu[1-3,3]", ["gpu1", "gpu2", "gpu3", "gpu3"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_i4_names_come_in_order_and_keep_their_zeros(text, names):
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n]1[", "n[2-1]", "n[a-b]", "n[[1-2]]", "a,,b", "n[]", "n[1-9999999]", "a b", "n[1,]"],
)
def test_what_slurm_never_prints_is_refused_in_one_line(text):
    with pytest.raises(ConfigError) as caught:
        expand_hosts(text)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="ab01-,[] ", max_size=20))
def test_no_text_does_anything_but_expand_or_be_refused(text):
    try:
        hosts = expand_hosts(text)
    except ConfigError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)
