"""`check` finds what would stop a run, and never stops itself."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import save_tiny
from toy import save_toy_tokenizer
from typer.testing import CliRunner

from megatron_grpo.check.findings import Machines, Report, as_json
from megatron_grpo.check.run import check_config
from megatron_grpo.cli import app
from megatron_grpo.errors import ConfigError, GrpoError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """2 layers, hidden 64, 4 heads, 2 key-value heads, feed-forward 128, vocabulary 130."""
    return save_toy_tokenizer(save_tiny(tmp_path_factory.mktemp("m") / "model", "qwen3"))


def values(model: Path) -> dict:
    return {
        "name": "x",
        "steps": 3,
        "model": {"path": str(model)},
        "task": {
            "type": "reasoning_gym",
            "name": "chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2},
            "rows": 60,
            "heldout_rows": 4,
            "reward_examples": [{"response": "it is 7", "answer": "7", "reward": 1.0}],
        },
        "sampling": {"max_new_tokens": 16},
        "rollouts": {"groups_per_step": 4, "group_size": 2, "max_prompt_tokens": 48},
        "policy": {"type": "megatron", "parallel": {"tensor": 2, "data": 2}},
        "generator": {"type": "vllm", "tensor": 2, "max_model_tokens": 64},
        "cluster": {"gpus_per_rank": 1},
    }


def check(tmp_path: Path, config: dict, **options) -> Report:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"run_dir": str(tmp_path / "run"), **config}))
    return check_config(path, **{"machines": Machines(1), "gpu": "h100", **options})


def problems(report: Report) -> dict[str, str]:
    return {f.where: f"{f.text}; {f.remedy}" for f in report.findings if f.level == "problem"}


def test_a_run_that_can_start_has_no_problems(tmp_path, model):
    report = check(tmp_path, values(model))
    assert problems(report) == {}
    assert report.exit_code == 0
    assert {f.rule for f in report.findings} >= {"model folder", "placement", "memory", "task"}


@pytest.mark.parametrize(
    ("key", "value", "where", "said"),
    [
        ("policy.parallel.tensor", 3, "parallel.tensor", "4 attention heads"),
        ("policy.parallel.tensor", 4, "parallel.tensor", "2 key-value heads"),
        ("policy.parallel.pipeline", 4, "parallel.pipeline * virtual_pipeline", "2 layers"),
        ("generator.tensor", 3, "generator.tensor", "4 attention heads"),
        ("policy.parallel.data", 16, "policy.parallel.data", "share 8 sequences"),
        ("policy.parallel.data", 8, "placement", "hold 4 of them; add nodes for 4 more (8 GPU)"),
        ("policy.parallel.data", 10**9, "placement", "no cluster holds so many"),
        ("generator.engines", 10**9, "placement", "no cluster holds so many"),
        ("generator.tensor", 16, "generator.tensor", "4 attention heads"),
        ("cluster.gpus_per_rank", 0, "cluster.gpus_per_rank", "none of the 8 GPUs"),
        ("generator.kv_cache_bytes", 100, "generator.kv_cache_bytes", "holds not one sequence"),
        ("task.name", "chain_sun", "task.name", "did you mean chain_sum"),
        ("task.parameters.min_terms", 9, "task.parameters", "refuses them"),
        ("task.reward", "nowhere:f", "reward nowhere:f", "importing nowhere failed"),
        ("model.path", "/nowhere", "model.path", "holds no config.json"),
        ("run_dir", "/etc/hosts/x", "run_dir", "/etc/hosts is no folder"),
        ("policy.parallell", {}, "config.yaml: policy.parallell", "did you mean policy.parallel"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(tmp_path, model, key, value, where, said):
    config = values(model)
    *path, last = key.split(".")
    section = config
    for part in path:
        section = section[part]
    section[last] = value
    found = problems(check(tmp_path, config))
    assert where in found, found
    assert said in found[where]


def test_nodes_for_engines_alone_are_counted_apart(tmp_path, model):
    # 4 ranks and 1 engine of 2; with nodes of their own for engines, the policy has only its own.
    apart = Machines(1, 4, engine_nodes=1, engine_gpus_per_node=2)
    assert problems(check(tmp_path, values(model), machines=apart)) == {}
    small = Machines(1, 4, engine_nodes=1, engine_gpus_per_node=1)
    assert (
        "an engine needs 2 GPU on one node"
        in problems(check(tmp_path, values(model), machines=small))["placement"]
    )
    swapped = Machines(1, 2, engine_nodes=1, engine_gpus_per_node=8)
    assert (
        "hold 1 of them" in problems(check(tmp_path, values(model), machines=swapped))["placement"]
    )


def test_cores_are_counted_where_the_job_asks_for_so_many(tmp_path, model):
    config = {**values(model), "cluster": {"gpus_per_rank": 0}}
    # 4 ranks of two tensor groups and 1 engine of 2 workers: 6 slots.
    assert problems(check(tmp_path, config, machines=Machines(3, 0, 2))) == {}
    few = problems(check(tmp_path, config, machines=Machines(2, 0, 2)))["placement"]
    assert "needs 6 CPU in all; the nodes have 2 x 2 CPU; add 2 CPU" in few
    config["generator"]["colocated"] = True
    assert problems(check(tmp_path, config, machines=Machines(2, 0, 2))) == {}


def test_engines_and_policy_that_share_gpus_need_room_for_both(tmp_path, model):
    config = values(model)
    config["generator"] |= {"colocated": True, "gpu_memory_fraction": 0.9}
    # A tiny policy; 0.9 and 0.08 of reserve leave 1.6 GB of 80.
    assert problems(check(tmp_path, config, machines=Machines(1, 4))) == {}
    config["generator"]["gpu_memory_fraction"] = 0.93
    where = "memory of a GPU that policy and engine share"
    assert where in problems(check(tmp_path, config, machines=Machines(1, 4)))
    config["weights"] = {"backend": "nccl"}
    found = problems(check(tmp_path, config))
    assert "cannot join a policy rank and an engine" in " ".join(found.values())


def test_memory_is_held_against_the_gpu_by_hand(tmp_path, model):
    config = values(model)
    config["policy"]["microbatch_tokens"] = 1 << 25
    # Kept per token and layer: 4 x 64 inputs, (128 + 128 + 128) / 2 of attention, 3 x 128 / 2 of
    # the feed-forward: 640 numbers. 33.5 M tokens x 2 layers x 2 bytes x 640 = 86 GB, of 80.
    assert "memory of a policy rank" in problems(check(tmp_path, config, gpu="a100"))
    unknown = [
        f.where for f in check(tmp_path, values(model), gpu="").findings if f.level == "unknown"
    ]
    assert "memory" in unknown


def test_a_reward_that_disagrees_with_the_configs_example_is_a_problem(tmp_path, model):
    config = values(model)
    config["task"]["reward_examples"] = [{"response": "8", "answer": "7", "reward": 1.0}]
    text = problems(check(tmp_path, config))["task.reward_examples"]
    assert "gives 0 for response '8' and answer '7'; the example says 1" in text


def test_a_reward_that_the_right_answer_does_not_earn_is_a_warning(tmp_path, model):
    config = values(model)
    config["task"] |= {"reward": "check.rewards:never", "reward_examples": []}
    warnings = [f for f in check(tmp_path, config).findings if f.level == "warning"]
    assert any("gives nothing for the right answers" in f.text for f in warnings)


def broken(model: Path, tmp_path: Path, change) -> dict[str, str]:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    change(folder)
    return problems(check(tmp_path, values(folder)))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors"),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-1]
            ),
            "is no whole safetensors file",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "holds no readable tokenizer.json"),
        (lambda f: edit_json(f / "config.json", vocab_size=90), "config.json says 90 x 64"),
        (
            lambda f: edit_json(f / "config.json", num_hidden_layers=4),
            "parameters, the architecture",
        ),
        (
            lambda f: edit_json(f / "tokenizer.json", added_tokens=[{"id": 130, "content": "x"}]),
            "has token 130, the model's vocabulary ends at 129",
        ),
        (lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        (
            lambda f: edit_json(f / "generation_config.json", eos_token_id=500),
            "eos_token_id 500 is no token",
        ),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
            ),
            "is in the index but not in the folder",
        ),
    ],
)
def test_a_model_folder_that_does_not_agree_with_itself_is_found(tmp_path, model, change, said):
    found = broken(model, tmp_path, change)
    assert any(said in text for text in found.values()), found


ANSWERED = (
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ANSWERED + "[1]\n", "rows.jsonl:2 must be a JSON object"),
        ('{"message": []}\n', "has no messages"),
        ("nonsense\n", "rows.jsonl:1 is not JSON"),
        ('{"messages": [], "tools": 1}\n', "which nothing reads (found 'tools')"),
        (ANSWERED, "leaves nothing to train on of 1 rows"),
        (ANSWERED + ANSWERED.replace('"a"', '" "'), "leaves nothing to train on of 1 rows"),
        (ANSWERED + '{"messages": []}\n', "rows.jsonl:2 needs an assistant turn"),
        (ANSWERED.replace("assistant", "user"), "rows.jsonl:1 needs an assistant turn"),
        (ANSWERED.replace("assistant", "gpt"), "rows.jsonl:1: messages.1.role input should be"),
    ],
)
def test_rows_that_cannot_be_read_are_found_by_line(tmp_path, model, rows, said):
    (tmp_path / "rows.jsonl").write_text(rows)
    config = {
        "name": "x",
        "steps": 1,
        "model": {"path": str(model)},
        "task": {"type": "chats", "path": str(tmp_path / "rows.jsonl"), "heldout_rows": 1},
        "algorithm": {"type": "sft"},
        "policy": {"type": "reference"},
    }
    found = problems(check(tmp_path, config))
    assert any(said in f"{where} {text}" for where, text in found.items()), found


def test_muon_on_megatron_without_its_package_is_found_before_the_run(tmp_path, model):
    optimizer = {"type": "muon", "learning_rate": 1e-3}
    policy = {"type": "megatron", "distributed_optimizer": False, "optimizer": optimizer}
    found = problems(check(tmp_path, {**values(model), "policy": policy}))
    if find_spec("emerging_optimizers") is None:
        assert "muon needs the emerging_optimizers package" in found["policy.optimizer.type"]
    else:
        assert "policy.optimizer.type" not in found


def test_json_and_exit_statuses_are_for_scripts(tmp_path, model):
    path = tmp_path / "config.yaml"
    good = {"run_dir": str(tmp_path / "run"), **values(model)}
    path.write_text(json.dumps(good))
    runner = CliRunner()
    done = runner.invoke(app, ["check", str(path), "--json", "--nodes", "1"])
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True)
    path.write_text(json.dumps(good | {"steps": 0}))
    done = runner.invoke(app, ["check", str(path), "--json"])
    assert done.exit_code == 1
    [finding] = json.loads(done.stdout)["findings"]
    assert (finding["level"], finding["where"]) == ("problem", "config.yaml: steps")
    done = runner.invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2


def test_neither_torch_nor_ray_nor_transformers_is_imported(tmp_path, model):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"run_dir": str(tmp_path / "run"), **values(model)}))
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from megatron_grpo.check.findings import Machines\n"
        "from megatron_grpo.check.run import check_config\n"
        f"check_config(Path({str(path)!r}), machines=Machines(1), gpu='h100')\n"
        "heavy = ('torch', 'ray', 'transformers', 'vllm', 'megatron')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


SPOILERS = (
    None,
    True,
    0,
    -1,
    1,
    2,
    3,
    7,
    10**9,
    1.5,
    "",
    "x",
    "~",
    "../..",
    "nan",
    [],
    [1],
    {},
    {"type": "nobody"},
    "megatron_grpo.environments.rewards:last_number",
    "megatron_grpo:nothing",
    "os:kill",
)


def mutated(dice: random.Random, base: dict) -> dict:
    """One to three random changes: a value replaced, a key lost, misspelt or added."""
    config = copy.deepcopy(base)
    for _ in range(dice.randint(1, 3)):
        section = config
        while True:
            key = dice.choice(sorted(section))
            if isinstance(section[key], dict) and section[key] and dice.random() < 0.7:
                section = section[key]
                continue
            break
        kind = dice.random()
        if kind < 0.7:
            section[key] = dice.choice(SPOILERS)
        elif kind < 0.8:
            del section[key]
        elif kind < 0.9:
            section[key + "s"] = section.pop(key)
        else:
            section["extra"] = dice.choice(SPOILERS)
        if not config:
            break
    return config


def test_500_mutated_configs_are_answered_in_one_of_three_ways_within_two_seconds(tmp_path, model):
    dice = random.Random(9)
    sampled = {"run_dir": str(tmp_path / "run"), **values(model)}
    data = {key: sampled[key] for key in ("name", "steps", "model", "policy", "run_dir", "cluster")}
    data |= {
        "algorithm": {"type": "sft"},
        "task": {"type": "chats", "path": "shipped:chats", "max_row_tokens": 64},
        "rollouts": {"groups_per_step": 4},
    }
    check(tmp_path, sampled)  # imports count once
    answers = {"ok": 0, "problems": 0, "error": 0}
    path = tmp_path / "fuzzed.yaml"
    for number in range(500):
        text = json.dumps(mutated(dice, dice.choice([sampled, data])))
        if number % 25 == 0:  # and some that are no YAML at all
            text = text[: dice.randrange(len(text))]
        path.write_text(text)
        started = time.process_time()
        try:
            machines = dice.choice([None, Machines(1), Machines(2), Machines(2, 0, 1)])
            report = check_config(path, machines=machines, gpu=dice.choice(["", "h100"]))
        except GrpoError as error:
            assert "\n" not in str(error), text
            answers["error"] += 1
        else:
            as_json(report)
            answers["problems" if report.exit_code else "ok"] += 1
        assert time.process_time() - started < 2.0, text
    assert min(answers.values()) > 5, answers


def test_a_frozen_model_of_a_later_stage_is_looked_at_before_the_first(model, tmp_path):
    other = save_toy_tokenizer(save_tiny(tmp_path / "other", "qwen3", num_hidden_layers=3))
    stages = [
        {"name": "a", "steps": 1},
        {"name": "b", "steps": 1, "algorithm": {"kl_coefficient": 0.1}, "renew_reference": True},
        {"name": "c", "steps": 1, "algorithm": {"kl_coefficient": 0.1}},
    ]
    for path, text in ((other, "its num_layers is 3, the policy's 2"), ("/no", "no config.json")):
        stages[2]["algorithm"]["reference_path"] = str(path)
        found = problems(check(tmp_path, {**values(model), "stages": stages}))
        assert text in found["stage c: algorithm.reference_path"]
        assert len(found) == 1
