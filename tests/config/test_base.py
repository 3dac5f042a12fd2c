"""Text becomes typed values, and every wrong key or value is one line that names it."""

from pathlib import Path

import pytest

from megatron_grpo.config import RunConfig, dump_config, load_config
from megatron_grpo.config.base import all_keys, merge, parse_override, suggest
from megatron_grpo.errors import ConfigError

MINIMAL = """
name: demo
steps: 3
model: {path: ~/model}
task: {type: reasoning_gym, name: chain_sum}
policy: {type: megatron}
generator: {type: vllm}
"""
MATHS = MINIMAL.replace(
    "{type: reasoning_gym, name: chain_sum}",
    "{type: math, train: {a: {path: p}}, heldout_rows: 1}",
)

CHATS = """
name: demo
steps: 3
model: {path: ~/model}
task: {type: chats, path: p}
algorithm: {type: sft}
policy: {type: megatron}
"""


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str = MINIMAL, name: str = "demo.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def sections() -> list[str]:
    """Dotted prefix of every section, "" for the root."""
    nested = {key.rpartition(".")[0] for key in all_keys(RunConfig)}
    lists = {"stages", "task.examples", "task.reward_examples"}  # these have no dotted paths
    return sorted(nested - lists)


@pytest.mark.parametrize("section", sections())
def test_o1_a_misspelt_key_in_any_section_is_refused_with_its_path(write, section):
    where = f"{section}." if section else ""
    text = MATHS if section == "task.grading" else MINIMAL
    message = refusal(write(text), f"{where}zzzunknown=1")
    assert f"demo.yaml: {where}zzzunknown: unknown key" in message


def test_o1_a_close_spelling_is_suggested(write):
    message = refusal(write(), "policy.optimizer.learning_ratee=1e-6")
    assert message == (
        "demo.yaml: policy.optimizer.learning_ratee: unknown key; "
        "did you mean policy.optimizer.learning_rate?"
    )


def test_o1_initials_at_the_top_level_point_to_the_section(write):
    assert "lr: unknown key; did you mean policy.optimizer.learning_rate?" in refusal(
        write(), "lr=1"
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("algorithm.kl_coef", "algorithm.kl_coefficient"),
        ("algorithm.kl", "algorithm.kl_coefficient"),  # nearer than checkpoint.keep_last
        ("rollouts.group", "rollouts.group_size"),
        ("sampling.temp", "sampling.temperature"),
        ("sampling.max_tokens", "sampling.max_new_tokens"),
        ("policy.opt", "policy.optimizer"),
        ("kl_coef", "algorithm.kl_coefficient"),
    ],
)
def test_o1_an_abbreviation_is_suggested_in_full_and_the_same_sections_first(write, written, meant):
    assert f"{written}: unknown key; did you mean {meant}?" in refusal(write(), f"{written}=1")


def test_o1_a_misspelt_key_in_the_file_is_refused_like_one_on_the_command_line(write):
    path = write(MINIMAL.replace("steps: 3", "steps: 3\nrolouts: {group_size: 4}"))
    assert "demo.yaml: rolouts: unknown key; did you mean rollouts?" in refusal(path)


def test_o1_keys_that_the_chosen_class_ignores_are_refused(write):
    reference = MINIMAL.replace("type: megatron", "type: reference, distributed_optimizer: true")
    assert "policy.distributed_optimizer: unknown key" in refusal(write(reference))


def test_o1_the_resolved_config_reloads_to_an_equal_object(write):
    config = load_config(
        write(), ["policy.optimizer.max_grad_norm=null", "sampling.temperature=0.7"]
    )
    assert load_config(write(dump_config(config), "resolved.yaml")) == config


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", '"1e-6"'])
def test_o2_a_rate_is_a_number_however_it_is_written(write, text):
    in_file = MINIMAL.replace(
        "type: megatron", f"type: megatron, optimizer: {{learning_rate: {text}}}"
    )
    assert load_config(write(in_file)).policy.optimizer.learning_rate == 1e-6
    on_line = load_config(write(), [f"policy.optimizer.learning_rate={text.strip(chr(34))}"])
    assert on_line.policy.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["false", "False", "0"])
def test_o2_false_is_false_however_it_is_written(write, text):
    config = load_config(write(), [f"policy.distributed_optimizer={text}"])
    assert config.policy.distributed_optimizer is False


@pytest.mark.parametrize("text", ["null", "None", "~"])
def test_o2_null_clears_an_optional_and_survives_saving(write, text):
    config = load_config(write(), [f"policy.optimizer.max_grad_norm={text}"])
    assert config.policy.optimizer.max_grad_norm is None
    again = load_config(write(dump_config(config), "again.yaml"))
    assert again.policy.optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("cluster", "remove it, or give it a value"),
        ("sampling", "remove it, or give it a value"),
        ("rollouts.group_size", "remove it, or give it a value"),
        ("stages", "remove it, or give it a value, or write [] for none"),
        ("policy", "give it a value"),
        ("model.path", "give it a value"),
        ("steps", "give it a value"),
    ],
)
def test_o2_null_where_there_must_be_something_is_refused_with_what_to_do(write, key, remedy):
    message = f"demo.yaml: {key}: is empty (null); {remedy}"
    assert refusal(write(), f"{key}=null") == message
    if f"\n{key}:" not in MINIMAL and "." not in key:
        assert refusal(write(f"{MINIMAL}{key}:\n")) == message


@pytest.mark.parametrize("value", ["[x]", "{x}", "[x] y"])
def test_o2_text_that_begins_like_a_list_is_refused_with_the_quotes_that_keep_it(write, value):
    message = refusal(write(), f"task.system_prompt={value}")
    assert message.endswith(
        "; text that begins with [ or { goes in quotes: "
        "task.system_prompt='\"[...]\"' on a command line"
    )
    for quote in "'\"":
        config = load_config(write(), [f"task.system_prompt={quote}{value}{quote}"])
        assert config.task.system_prompt == value


def test_o2_other_quotes_are_part_of_the_text(write):
    assert load_config(write(), ['task.system_prompt="x"']).task.system_prompt == '"x"'


def test_o2_text_in_an_integer_is_refused_with_its_path(write):
    assert "demo.yaml: rollouts.group_size: input should be a valid integer" in refusal(
        write(), "rollouts.group_size=many"
    )


def test_o2_numbers_that_look_like_text_stay_text_where_text_is_meant(write):
    assert load_config(write(), ["name=2.10"]).name == "2.10"


def test_o2_yaml_reads_times_as_text_not_as_base_sixty(write):
    assert "seed: input should be a valid integer" in refusal(write(MINIMAL + "seed: 12:30\n"))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a1_a_temperature_that_cannot_divide_is_refused(write, value):
    assert "sampling.temperature" in refusal(write(), f"sampling.temperature={value}")


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "20")])
def test_a2_sampling_on_a_smaller_support_than_training_is_refused(write, key, value):
    message = refusal(write(), f"sampling.{key}={value}")
    assert f"sampling.{key}: training needs top_p 1.0 and top_k -1" in message


def test_g1_rollouts_longer_than_the_engine_holds_are_refused_with_both_numbers(write):
    message = refusal(write(), "sampling.max_new_tokens=800")
    assert (
        "(rollouts.max_prompt_tokens 512 + sampling.max_new_tokens 800) has 1312 tokens" in message
    )
    assert "set generator.max_model_tokens to at least 1312" in message


def test_g1_fewer_problems_than_one_step_needs_are_refused_with_both_numbers(write):
    message = refusal(write(), "task.rows=67", "rollouts.groups_per_step=8")
    assert "leaves 3 training problems, fewer than the 8" in message


def test_d2_a_group_of_one_is_refused(write):
    assert "rollouts.group_size: input should be greater than or equal to 2" in refusal(
        write(), "rollouts.group_size=1"
    )


def test_extends_merges_sections_and_the_nearer_file_wins(write):
    write(MINIMAL + "seed: 5\nsampling: {temperature: 0.5, max_new_tokens: 8}\n", "base.yaml")
    config = load_config(write("extends: base.yaml\nsampling: {temperature: 0.9}\n", "top.yaml"))
    assert (config.seed, config.sampling.temperature, config.sampling.max_new_tokens) == (5, 0.9, 8)


def test_extends_in_a_circle_is_refused(write):
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert "a.yaml -> b.yaml" in refusal(write("extends: a.yaml\n", "c.yaml"))


def test_extends_of_nothing_is_none_and_a_number_is_refused(write):
    assert load_config(write("extends:\n" + MINIMAL)).steps
    assert "extends: must be a path or a list of paths" in refusal(write("extends: 5\n"))


def test_a_changed_type_replaces_its_section():
    old = {"policy": {"type": "megatron", "recompute": "full"}}
    assert merge(old, {"policy": {"type": "reference"}}) == {"policy": {"type": "reference"}}


def test_a_missing_file_is_one_line_naming_it(tmp_path):
    assert "absent.yaml: cannot be read" in refusal(tmp_path / "absent.yaml")


@pytest.mark.parametrize("name", [".", "..", "a/b", ""])
def test_a_name_that_is_no_folder_of_its_own_is_refused(write, name):
    assert "name: " in refusal(write(MINIMAL), f"name={name}")


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MINIMAL, "run_dir"),
        (MINIMAL, "model.path"),
        (MINIMAL + "algorithm: {kl_coefficient: 0.1}\n", "algorithm.reference_path"),
        (MATHS, "task.train.a.path"),
        (CHATS, "task.path"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(write, text, key, value):
    assert refusal(write(text), f"{key}={value}") == (
        f"demo.yaml: {key}: is an empty path (found {value!r}); "
        "give one (. is the current directory)"
    )
    assert load_config(write(text), [f"{key}=."])


def test_an_override_without_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"write dotted\.key=value"):
        parse_override("steps")


def test_nothing_is_suggested_for_a_word_like_no_key():
    assert suggest(RunConfig, ["qqqqqqqq"]) == ""
