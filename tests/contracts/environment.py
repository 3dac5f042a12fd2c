"""What every protocols.Environment must do. Subclass it, name the class Test..., give
`environment`.

`same_again` makes another environment from the same settings, `changed` one whose data differ.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.protocols import Environment
from megatron_grpo.types import Observation, Prompt, Reward, Transcript


def all_prompts(environment: Environment) -> list[Prompt]:
    return [
        environment.prompt(split, row)
        for split in ("train", "heldout")
        for row in range(environment.num_prompts(split))
    ]


class EnvironmentContract:
    @pytest.fixture
    def environment(self) -> Environment:
        raise NotImplementedError("give the environment under test")

    @pytest.fixture
    def same_again(self) -> Environment:
        raise NotImplementedError("give one made from the same settings")

    @pytest.fixture
    def changed(self) -> Environment:
        raise NotImplementedError("give one with other data")

    def test_both_splits_have_prompts_of_int32_ids(self, environment):
        assert environment.num_prompts("train") > 0
        assert environment.num_prompts("heldout") > 0
        for prompt in all_prompts(environment):
            assert prompt.token_ids.dtype == np.int32 and prompt.num_tokens >= 1

    def test_g2_prompt_ids_are_unique_over_both_splits(self, environment):
        ids = [prompt.prompt_id for prompt in all_prompts(environment)]
        assert len(set(ids)) == len(ids)

    def test_no_heldout_text_is_trained_on(self, environment):
        train = {
            environment.prompt("train", row).text for row in range(environment.num_prompts("train"))
        }
        for row in range(environment.num_prompts("heldout")):
            assert environment.prompt("heldout", row).text not in train

    def test_the_same_settings_give_the_same_prompts(self, environment, same_again):
        for one, other in zip(all_prompts(environment), all_prompts(same_again), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.prompt_id, one.text) == (other.prompt_id, other.text)
            assert (one.answer, one.metadata) == (other.answer, other.metadata)

    def test_h2_the_fingerprint_follows_the_data(self, environment, same_again, changed):
        assert environment.fingerprint() == same_again.fingerprint()
        assert environment.fingerprint() != changed.fingerprint()

    def test_every_transcript_gets_its_own_answer_in_order(self, environment):
        prompts = [environment.prompt("train", row) for row in range(2)]
        texts = ["", "None", "no idea \ud83d\ude00", prompts[0].answer, "9" * 5000]
        transcripts = [
            Transcript(prompt, (text,), reason)
            for prompt in prompts
            for text in texts
            for reason in ("stop", "length")
        ]
        together = environment.respond(transcripts)
        assert len(together) == len(transcripts)
        for transcript, reply in zip(transcripts, together, strict=True):
            assert isinstance(reply, Reward | Observation)
            [alone] = environment.respond([transcript])
            assert alone == reply or isinstance(reply, Observation)
        assert environment.respond([]) == []
