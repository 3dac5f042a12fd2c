"""Dialogues of several turns: ids as they were sampled, replies without loss, one reward."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rollouts.fakes import FakeGenerator, completion
from toy import ASSISTANT, EOS, USER, ids_of, save_toy_tokenizer

from megatron_grpo.config.data import DialogueTask
from megatron_grpo.environments.calculator import Calculator, calculate
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.interactive import DialogueEnvironment, Question, load_reply
from megatron_grpo.errors import RewardError
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.types import Observation, Reward, Transcript

DOCS = Path(__file__).parents[2] / "docs/environments.md"
THINKING_TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'].split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def guess_module(tmp_path_factory):
    """The module that docs/environments.md shows, imported by its path."""
    [program] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(program.splitlines()) <= 20
    folder = tmp_path_factory.mktemp("user")
    (folder / "guess.py").write_text(program)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save_toy_tokenizer(tmp_path_factory.mktemp("toy"), template=THINKING_TEMPLATE)
    return ChatTokenizer(folder)


def build(tokenizer, environment: str, **changes) -> DialogueEnvironment:
    settings = {
        "environment": environment,
        "train": {"sums": {"path": "shipped:arithmetic_sample", "problem": "question"}},
        "heldout_rows": 4,
        **changes,
    }
    return DialogueEnvironment(DialogueTask.model_validate(settings), tokenizer, 200, 1)


def play(environment, tokenizer, turns: list[list[int]], budget=200):
    """The rollout of a policy that samples these ids, turn after turn, and what it was sent."""
    left = iter(turns)

    def answer(request):
        ids = next(left)
        reason = "stop" if ids[-1] == EOS else "length"
        return completion(request, ids, finish_reason=reason)

    generator = FakeGenerator(answer)
    collector = Collector(environment, generator, tokenizer.decode, seed=1, deadline_s=5.0)
    prompt = environment.prompt("train", 0)
    collector.start([GroupRequest("g", prompt, 1, budget)])
    groups = []
    while collector.num_groups:
        groups += collector.commit(collector.receive())
        collector.go_on(oldest_allowed=-1)
    return groups[0].rollouts[0], generator.submitted


def test_the_example_of_the_docs_plays_and_its_reward_falls_with_the_turns(guess_module, tokenizer):
    environment = build(tokenizer, "guess:guess")
    answer = int(environment.prompt("train", 0).answer)
    turns = [[*ids_of(str(n)), EOS] for n in (answer - 1, answer + 1, answer)]
    rollout, _ = play(environment, tokenizer, turns)
    assert rollout.reward.value == pytest.approx(1 / 3)
    replies = bytes(rollout.token_ids.astype(np.uint8))
    assert bytes(ids_of("higher")) in replies and bytes(ids_of("lower")) in replies
    wrong, _ = play(environment, tokenizer, [[*ids_of("no"), EOS]])
    assert wrong.reward.value == 0.0


def test_n2_sampled_ids_stay_and_replies_get_no_loss_under_a_template_that_strips_thinking(
    guess_module, tokenizer, monkeypatch
):
    environment = build(tokenizer, "guess:guess")
    prompt = environment.prompt("train", 0)
    answer = int(prompt.answer)
    first = [*ids_of(str(answer - 1)), EOS]
    second = [*ids_of(str(answer)), EOS]
    encoded: list[str] = []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text: encoded.append(text) or encode(text))
    rollout, requests = play(environment, tokenizer, [first, second])
    # The stop token ends the first turn; the template writes a mark, the reply, and asks again.
    reply = [USER, *ids_of("higher"), EOS, ASSISTANT]
    assert rollout.token_ids.tolist() == [*prompt.token_ids, *first, *reply, *second]
    assert requests[1].prompt_ids.tolist() == [*prompt.token_ids, *first, *reply]
    p = prompt.num_tokens
    mask = [False] * p + [True] * len(first) + [False] * len(reply) + [True] * len(second)
    assert rollout.loss_mask.tolist() == mask
    scored = np.array([-i / 10 for i in [*first, *second]], np.float32)
    assert rollout.behavior_logprobs[rollout.loss_mask].tolist() == scored.tolist()
    assert not rollout.behavior_logprobs[~rollout.loss_mask].any()
    # Only the reply was encoded, and nothing the policy wrote.
    assert encoded == ["</s><user>higher</s><assistant>"]


def test_n2_odd_bytes_in_a_sampled_turn_change_nothing(tokenizer):
    environment = build(tokenizer, "megatron_grpo.environments.calculator:Calculator")
    odd = [0, 1, *ids_of("<calc>2*3</calc>"), 129, EOS]
    rollout, _ = play(environment, tokenizer, [odd, [*ids_of("6"), EOS]])
    p = rollout.prompt_tokens
    assert rollout.token_ids[p : p + len(odd)].tolist() == odd


def test_a_dialogue_that_does_not_end_is_zero_with_the_reason(guess_module, tokenizer):
    environment = build(tokenizer, "guess:guess", max_turns=2)
    turns = [[*ids_of("-7"), EOS]] * 2
    rollout, _ = play(environment, tokenizer, turns)
    assert rollout.reward == Reward(0.0, "out of turns before the dialogue ended")
    rollout, _ = play(environment, tokenizer, [ids_of("-7")])
    assert rollout.reward == Reward(0.0, "out of tokens before the dialogue ended")


def test_a_call_is_answered_and_the_next_turn_is_graded():
    question = Question("x/0", "What is 12*34?", "408")
    assert Calculator()(question, ["<calc>12*34</calc>"]) == "408"
    assert Calculator()(question, ["<calc>12*34</calc>", "It is 408."]) == 1.0
    assert Calculator(bonus=0.5)(question, ["<calc>12*34</calc>", "408"]) == 1.5
    assert Calculator(bonus=0.5)(question, ["408"]) == 1.0
    assert Calculator()(question, ["409"]) == 0.0


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("-(1.5)/3", "-0.5"),
        ("1/3", "0.3333333333"),
        ("1/0", "error: division by zero"),
        ("9**9**9", "error: only + - * / and numbers"),
        ("__import__('os').system('true')", "error: only + - * / and numbers"),
        ("(" * 90, "error: only + - * / and numbers"),
        ("True+1", "error: only + - * / and numbers"),
        ("1e400", "error: only + - * / and numbers"),
    ],
)
def test_f5_the_calculator_does_arithmetic_and_executes_nothing(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("nothing", {}, "is not an import path"),
        ("no_such_module:f", {}, "importing no_such_module failed"),
        ("math:nothing", {}, "has no function or class nothing"),
        ("math:sin", {"x": 1}, "takes no task.arguments"),
        ("megatron_grpo.environments.calculator:Calculator", {"y": 1}, "unexpected keyword"),
        ("os.path:getsize", {}, "too many positional"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(path, arguments, message):
    with pytest.raises(RewardError, match=message):
        load_reply(path, arguments)


def test_f4_a_function_that_returns_nothing_ends_the_run_with_its_name(tokenizer, monkeypatch):
    environment = build(tokenizer, "megatron_grpo.environments.calculator:Calculator")
    monkeypatch.setattr(environment, "_reply", lambda question, turns: None)
    transcript = Transcript(environment.prompt("train", 0), ("5",), "stop")
    with pytest.raises(RewardError, match=r"neither text nor a finite number.*'None'"):
        environment.respond([transcript])
    monkeypatch.setattr(environment, "_reply", lambda question, turns: "go on")
    assert isinstance(environment.respond([transcript])[0], Observation)
