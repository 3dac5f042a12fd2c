"""Dialogues as tokens: what is trained is what the assistant would have had to sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy import ASSISTANT, BOS, EOS, PLAIN_TEMPLATE, USER, ids_of, save_toy_tokenizer

from megatron_grpo.config import ChatTask, PreferenceTask
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.environments.dialogues import load_data
from megatron_grpo.errors import ConfigError, RolloutError

# A newline follows the token that ends a turn, as in many templates.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}</s>\n"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEWLINE = 5
DIALOGUE = [
    Message("user", "2+3?"),
    Message("assistant", "5"),
    Message("user", "+1?"),
    Message("assistant", "6"),
]


def toy(folder: Path, template: str | None = TEMPLATE, **settings) -> ChatTokenizer:
    return ChatTokenizer(save_toy_tokenizer(folder, template=template, **settings))


def test_d4_only_the_assistants_words_and_ends_of_turn_are_trained(tmp_path):
    ids, mask = toy(tmp_path).encode_dialogue(DIALOGUE)
    first = [USER, *ids_of("2+3?"), ASSISTANT]
    second = [NEWLINE, USER, *ids_of("+1?"), ASSISTANT]
    expected = [(i, False) for i in first] + [(*ids_of("5"), True), (EOS, True)]
    expected += [(i, False) for i in second] + [(*ids_of("6"), True), (EOS, True), (NEWLINE, False)]
    assert list(zip(ids.tolist(), mask.tolist(), strict=True)) == expected
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)


def test_n2_a_turn_is_encoded_behind_the_prompt_that_asks_for_it(tmp_path):
    tokenizer = toy(tmp_path, adds_bos=True)
    ids, mask = tokenizer.encode_dialogue(DIALOGUE[:2])
    prompt = tokenizer.encode_prompt(DIALOGUE[:1])
    assert (
        ids[: mask.argmax()].tolist() == prompt.tolist() == [BOS, USER, *ids_of("2+3?"), ASSISTANT]
    )


def test_of_a_preference_only_the_last_turn_is_trained(tmp_path):
    ids, mask = toy(tmp_path).encode_dialogue(DIALOGUE, last_only=True)
    assert ids[mask].tolist() == [*ids_of("6"), EOS]


def test_a_base_model_learns_to_stop_although_no_template_says_so(tmp_path):
    ids, mask = toy(tmp_path, template=None).encode_dialogue(DIALOGUE[:2])
    assert ids.tolist() == [*ids_of("2+3?\n5"), EOS]
    assert ids[mask].tolist() == [*ids_of("\n5"), EOS]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    # The assistant's turn is shown as the user's once it is history.
    tokenizer = toy(tmp_path, template=PLAIN_TEMPLATE)
    with pytest.raises(RolloutError, match=r"writes earlier turns differently .*turn 1"):
        tokenizer.encode_dialogue(DIALOGUE)


@pytest.mark.parametrize("messages", [[], DIALOGUE[:1], DIALOGUE[1:2]])
def test_a_dialogue_without_a_question_and_an_answer_is_refused(tmp_path, messages):
    with pytest.raises(RolloutError, match="needs an assistant turn"):
        toy(tmp_path).encode_dialogue(messages)


def chat_file(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def chat(question: str, answer: str) -> str:
    turns = [("user", question), ("assistant", answer)]
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]})


def test_rows_are_split_and_long_ones_counted(tmp_path):
    lines = [chat(f"{i}?", str(i)) for i in range(6)] + ["", chat("?" * 50, "no")]
    path = chat_file(tmp_path / "c.jsonl", *lines)
    data = load_data(ChatTask(path=path, heldout_rows=2, max_row_tokens=12), toy(tmp_path / "m"))
    assert (len(data.train), len(data.heldout)) == (4, 2)
    assert data.left_out == {"too long": 1}
    names = sorted(group.group_id for group in (*data.train, *data.heldout))
    assert names == [f"c.jsonl:{i}" for i in range(1, 7)]
    [rollout] = data.train[0].rollouts
    assert rollout.prompt_tokens == 4 and rollout.num_trained_tokens == 2
    # Nobody sampled these tokens: no behaviour log-probability is made up.
    assert np.isnan(rollout.behavior_logprobs[rollout.loss_mask]).all()


def test_g3_the_fingerprint_follows_rows_and_split(tmp_path):
    tokenizer = toy(tmp_path / "m")
    rows = [chat(f"{i}?", str(i)) for i in range(6)]
    path = chat_file(tmp_path / "c.jsonl", *rows)
    changed = chat_file(tmp_path / "d.jsonl", *rows[:-1], chat("5?", "6"))
    tasks = [
        ChatTask(path=path, heldout_rows=2),
        ChatTask(path=path, heldout_rows=2),
        ChatTask(path=path, heldout_rows=2, seed=1),
        ChatTask(path=changed, heldout_rows=2),
    ]
    prints = [load_data(task, tokenizer).fingerprint for task in tasks]
    assert prints[0] == prints[1] and len(set(prints)) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"is not JSON: Expecting .* column 2 \(found '{'\); write one object per line"),
        ("[]", r"must be a JSON object \(found '\[\]'\); write it as {"),
        ("null", r"must be a JSON object \(found 'null'\)"),
        ("{}", r"has no messages \(found 'no field'\); a row is {"),
        ('{"message": [], "id": 1}', r"has no messages \(found 'message, id'\); a row is {"),
        ('{"messages": "hi"}', r"messages: .* valid list \(found 'hi'\); a row is {"),
        ('{"messages": [{"role": "bot", "content": ""}]}', r"messages\.0\.role: .*'bot'\); a row"),
        ('{"messages": [{"role": "user"}]}', r"messages\.0\.content: is required; a row is {"),
    ],
)
def test_a_line_that_is_no_row_is_named_in_one_line_with_the_form_of_rows(tmp_path, line, message):
    path = chat_file(tmp_path / "c.jsonl", chat("1", "2"), line)
    with pytest.raises(ConfigError, match=r"^c\.jsonl:2: " + message) as caught:
        load_data(ChatTask(path=path, heldout_rows=1), toy(tmp_path / "m"))
    assert "\n" not in str(caught.value)


def test_a_pair_that_lacks_an_answer_is_named_with_the_form_of_pairs(tmp_path):
    row = json.loads(pair("1?", "2", "3"))
    del row["rejected"]
    path = chat_file(tmp_path / "p.jsonl", json.dumps(row))
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: has no rejected .*; a row is {\"prompt\""):
        load_data(PreferenceTask(path=path, heldout_rows=1), toy(tmp_path / "m"))


def pair(question: str, chosen: str, rejected: str) -> str:
    prompt = [{"role": "user", "content": question}]
    return json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected})


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path):
    tokenizer = toy(tmp_path / "m")
    lines = [chat("1?", "2"), chat("2?", "3"), chat("3?", " \n"), chat("4?", ""), chat(" ", "5")]
    task = ChatTask(path=chat_file(tmp_path / "c.jsonl", *lines), heldout_rows=1)
    data = load_data(task, tokenizer)
    assert (len(data.train), data.left_out) == (1, {"with a turn without words": 3})
    lines = [pair("1?", "2", "3"), pair("2?", "3", "4"), pair("3?", "4", "4"), pair("4?", "", "4")]
    task = PreferenceTask(path=chat_file(tmp_path / "p.jsonl", *lines), heldout_rows=1)
    data = load_data(task, tokenizer)
    expected = {"whose two answers are one": 1, "with a turn without words": 1}
    assert (len(data.train), data.left_out) == (1, expected)


def test_half_a_character_is_named_with_its_row(tmp_path):
    lines = [chat("1?", "2"), chat("2?", "3").replace("3", "\\ud83d\\ude00")]  # a whole one
    path = chat_file(tmp_path / "c.jsonl", *lines)
    assert len(load_data(ChatTask(path=path, heldout_rows=1), toy(tmp_path / "m")).train) == 1
    path = chat_file(tmp_path / "c.jsonl", *lines, chat("3?", "4").replace("4", "\\uD83D"))
    with pytest.raises(ConfigError, match=r"c\.jsonl:3: holds half a character"):
        load_data(ChatTask(path=path, heldout_rows=1), toy(tmp_path / "m"))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(chat(f"{i}?", "2") for i in "12").encode())
    assert len(load_data(ChatTask(path=str(path), heldout_rows=1), toy(tmp_path / "m")).train) == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_fields_that_nothing_reads_are_refused_in_every_kind_of_file_unless_named(tmp_path, name):
    rows = [{**json.loads(chat(f"{i}?", "2")), "tools": "calc"} for i in range(2)]
    if name == "rows.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / name).write_text(lines if name == "rows.jsonl" else json.dumps(rows))
    tokenizer = toy(tmp_path / "m")
    where = rf"rows\.{name[5:]}:1: has fields beside messages, which nothing reads \(found 'tools'"
    with pytest.raises(ConfigError, match=where):
        load_data(ChatTask(path=str(tmp_path / name), heldout_rows=1), tokenizer)
    task = ChatTask(path=str(tmp_path / name), heldout_rows=1, ignore=("tools",))
    assert len(load_data(task, tokenizer).train) == 1


# A turn ends with a token that is not the end of sequence, as <|eot_id|> or <end_of_turn> do.
OTHER_END = TEMPLATE.replace("</s>", "<assistant>")


def test_d4_what_follows_the_templates_own_end_of_turn_is_not_trained(tmp_path):
    ids, mask = toy(tmp_path, template=OTHER_END).encode_dialogue(DIALOGUE)
    assert ids[mask].tolist() == [*ids_of("5"), ASSISTANT, *ids_of("6"), ASSISTANT]
    assert EOS not in ids.tolist()
    assert ids[-1] == NEWLINE and not mask[-1]


def test_n2_a_reply_follows_the_end_of_turn_that_the_policy_sampled(tmp_path):
    for name, template in (("eos", TEMPLATE), ("other", OTHER_END)):
        reply = toy(tmp_path / name, template=template).encode_reply("42", "user")
        assert reply.tolist() == [NEWLINE, USER, *ids_of("42"), ASSISTANT]


def test_a_missing_file_and_too_few_rows_are_refused(tmp_path):
    tokenizer = toy(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"task\.path: does not exist"):
        load_data(ChatTask(path=str(tmp_path / "none.jsonl")), tokenizer)
    with pytest.raises(ConfigError, match=r"task\.path: is not shipped .*chats"):
        load_data(ChatTask(path="shipped:nothing"), tokenizer)
    path = chat_file(tmp_path / "c.jsonl", chat("1", "2"))
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        load_data(ChatTask(path=path, heldout_rows=1), tokenizer)


def test_the_shipped_sets_load_and_their_better_answers_come_first(tmp_path):
    tokenizer = toy(tmp_path)
    chats = load_data(ChatTask(path="shipped:chats"), tokenizer)
    assert (len(chats.train), len(chats.heldout)) == (64, 16)
    pairs = load_data(PreferenceTask(path="shipped:preferences"), tokenizer)
    assert (len(pairs.train), len(pairs.heldout)) == (64, 16)
    for group in pairs.train:
        assert group.rewards.tolist() == [1.0, 0.0]
        one, two = group.rollouts
        assert (
            one.token_ids[: one.prompt_tokens].tolist()
            == two.token_ids[: two.prompt_tokens].tolist()
        )


def test_rows_of_a_question_and_an_answer_are_dialogues_with_the_system_prompt(tmp_path):
    tokenizer = ChatTokenizer(save_toy_tokenizer(tmp_path / "toy", template=TEMPLATE))
    rows = [{"q": f"{i}+1?", "s": {"text": str(i + 1)}, "level": i} for i in range(4)]
    pq.write_table(
        pa.Table.from_pylist([*rows, {"q": "no answer", "s": None}]), tmp_path / "r.parquet"
    )
    task = ChatTask(
        path=str(tmp_path / "r.parquet"),
        prompt="q",
        response="s.text",
        system_prompt="Add.",
        heldout_rows=1,
    )
    data = load_data(task, tokenizer)
    assert data.left_out == {"with a turn without words": 1}
    assert len(data.train) == 3 and len(data.heldout) == 1
    [rollout] = [
        group.rollouts[0] for group in (*data.train, *data.heldout) if "2+1?" in group.prompt.text
    ]
    asked = [USER, *ids_of("Add."), USER, *ids_of("2+1?"), ASSISTANT]
    assert rollout.token_ids.tolist()[: len(asked)] == asked
    assert not rollout.loss_mask[: len(asked)].any()
    assert rollout.token_ids.tolist()[len(asked)] == ids_of("3")[0]


def test_messages_are_read_from_parquet_as_from_json_lines(tmp_path):
    tokenizer = ChatTokenizer(save_toy_tokenizer(tmp_path / "toy", template=TEMPLATE))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes"},
            ],
        }
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"messages": row["messages"]}) for row in rows)
    )
    sets = [
        load_data(ChatTask(path=str(tmp_path / name), heldout_rows=1), tokenizer)
        for name in ("rows.parquet", "rows.jsonl")
    ]
    ids = [[g.rollouts[0].token_ids.tolist() for g in one.train] for one in sets]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "q"}, "response: is missing"),
        ({"response": "q"}, "prompt: is missing"),
        ({"system_prompt": "S"}, "system_prompt: has no place"),
        ({"prompt": "q", "response": "r", "ignore": ["x"]}, "ignore: is for rows with messages"),
    ],
)
def test_half_a_mapping_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ChatTask(path="x", **given)
