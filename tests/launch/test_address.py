"""The address that others reach, out of what a node says of itself."""

import pytest
from grpo_launch.address import choose_address, interface_of, source_addresses, with_port

from megatron_grpo.errors import ClusterError


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        (["10.0.0.5 fe80::1"], "10.0.0.5"),
        (["127.0.1.1", "192.168.3.4"], "192.168.3.4"),
        (["fe80::1%eth0", "2001:db8::7"], "2001:db8::7"),
        (["2001:db8::7", "10.1.1.1"], "10.1.1.1"),
        (["169.254.3.4 10.2.2.2"], "10.2.2.2"),
    ],
)
def test_i4_a_routable_address_is_chosen(candidates, chosen):
    assert choose_address(candidates) == chosen


@pytest.mark.parametrize("candidates", [[], ["127.0.1.1"], ["fe80::1", "::1"], ["not an address"]])
def test_i4_without_one_the_error_says_what_there_was_and_what_to_do(candidates):
    with pytest.raises(ClusterError, match="GRPO_NODE_ADDRESS"):
        choose_address(candidates)


def test_i4_an_ipv6_address_is_bracketed_before_a_port():
    assert with_port("2001:db8::7", 80) == "[2001:db8::7]:80"


def test_the_kernel_tells_the_source_and_the_interface_has_it():
    assert source_addresses(["127.0.0.1", "no-such-host.invalid"]) == ["127.0.0.1"]
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
