"""What is computed once, and that everything can be put back."""

import doctest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.policy.megatron import prefixes
from megatron_grpo.policy.megatron.prefixes import Family, share_prefixes


def pack(*sequences: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    bounds = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    return torch.tensor([token for s in sequences for token in s]), bounds


HEADER = list(range(10))
PROMPT_A = [*HEADER, 20, 21, 22, 23, 24]
PROMPT_B = [*HEADER, 30, 31]


def test_the_examples_hold():
    assert doctest.testmod(prefixes).failed == 0


def test_groups_share_their_whole_prompt_though_all_share_a_header():
    # A: 3 rollouts save 2 * 15; B: 2 save 1 * 12. One family of five would save only 4 * 10.
    tokens, bounds = pack(
        [*PROMPT_A, 1, 2], [*PROMPT_A, 3], [*PROMPT_A, 4, 5], [*PROMPT_B, 6], [*PROMPT_B, 7, 8]
    )
    sharing = share_prefixes(tokens, bounds)
    assert sharing is not None
    assert sharing.families == (Family(15, (2, 1, 2)), Family(12, (1, 2)))
    assert len(sharing.source_U) == len(tokens) - 2 * 15 - 12


def test_many_small_groups_share_the_header_when_that_saves_more():
    # Nothing but the header is common: four sequences save 3 * 10.
    tokens, bounds = pack(*([*HEADER, 40 + i, 50 + i] for i in range(4)))
    sharing = share_prefixes(tokens, bounds)
    assert sharing is not None
    assert sharing.families == (Family(10, (2, 2, 2, 2)),)


def test_every_member_keeps_a_token_of_its_own_even_between_equal_sequences():
    sharing = share_prefixes(*pack(PROMPT_A, PROMPT_A))
    assert sharing is not None
    assert sharing.families == (Family(14, (1, 1)),)


def test_nothing_is_shared_below_the_shortest_worthwhile_beginning():
    assert share_prefixes(*pack([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9])) is None
    assert share_prefixes(*pack(PROMPT_A)) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 8, 9, 14]), st.lists(st.integers(0, 2), min_size=1, max_size=6)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_expanding_what_is_computed_gives_back_every_token_and_position(sequences):
    tokens, bounds = pack(*([7] * shared + own for shared, own in sequences))
    sharing = share_prefixes(tokens, bounds)
    if sharing is None:
        return
    assert tokens[sharing.source_U][sharing.expand_T].equal(tokens)
    starts = torch.repeat_interleave(bounds[:-1], bounds[1:] - bounds[:-1])
    position_T = torch.arange(len(tokens)) - starts
    assert position_T[sharing.source_U][sharing.expand_T].equal(position_T)
    assert sum(family.num_tokens for family in sharing.families) == len(sharing.source_U)
    assert len(sharing.source_U) < len(tokens)
