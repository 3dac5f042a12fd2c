"""Step times: terms by hand, the fit and its constants, published rows it has not seen."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from grpo_perf.cost_model import (
    ModelCounts,
    decode_step_terms,
    experts_touched,
    predict_step,
    push_terms,
)
from grpo_perf.efficiencies import Efficiencies, read_efficiency_file, stored_efficiencies
from grpo_perf.fit import examples_from, fit, leave_one_out, minimise, published_table
from grpo_perf.hardware import HARDWARE, Hardware, hardware_named
from grpo_perf.model_shape import model_named
from grpo_perf.table import parse_row, predict_table, read_table, workload_of
from grpo_perf.workload import Workload

from megatron_grpo.config import ParallelConfig
from megatron_grpo.errors import ConfigError

IDEAL = Efficiencies(
    matmul=1,
    decode_bandwidth=1,
    decode_issue=1,
    training_issue=1,
    network=1,
    push_issue=1,
    host_link=1,
    busy=1,
)
LLAMA = model_named("Llama-3.1-8B-Instruct")
COUNTS = ModelCounts.of(LLAMA)


def work(**changes: object) -> Workload:
    base = Workload(
        model=LLAMA,
        hardware=hardware_named("h100"),
        precision="bf16",
        parallel=ParallelConfig(data=8),
        engines=8,
        engine_tensor=1,
        engine_pipeline=1,
        colocated=True,
        staleness=0,
        sequences=64,
        train_sequences=64,
        mean_tokens=1000,
        max_tokens=2000,
        microbatch_tokens=2000,
        recompute="none",
        score_passes=1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_decode_step_reads_the_weights_and_the_cache_once() -> None:
    terms = decode_step_terms(
        LLAMA,
        COUNTS,
        hardware_named("h100"),
        IDEAL,
        tensor=1,
        precision="bf16",
        sequences=4,
        context_tokens=500,
    )
    assert terms["weights"] == pytest.approx(8.030261248e9 * 2 / 3.35e12)
    assert terms["kv_cache"] == pytest.approx(4 * 500 * 32 * 2 * 8 * 128 * 2 / 3.35e12)
    assert terms["issue"] == pytest.approx(32 * 12 * 2e-6)
    assert terms["all_reduce"] == 0


def test_two_tensor_ranks_read_half_and_all_reduce_twice_a_layer() -> None:
    terms = decode_step_terms(
        LLAMA,
        COUNTS,
        hardware_named("h100"),
        IDEAL,
        tensor=2,
        precision="bf16",
        sequences=4,
        context_tokens=500,
    )
    assert terms["weights"] == pytest.approx(8.030261248e9 / 3.35e12)
    message = 2 * 0.5 * 4 * 4096 * 2
    assert terms["all_reduce"] == pytest.approx(64 * (8e-6 + message / 450e9))


def test_a_batch_touches_experts_as_even_routing_says() -> None:
    qwen = model_named("Qwen3-30B-A3B")
    assert experts_touched(qwen, 1) == pytest.approx(8 / 128)
    assert experts_touched(qwen, 2) == pytest.approx(1 - (120 / 128) ** 2)
    assert experts_touched(LLAMA, 5) == 0


def test_synchronous_batches_thin_out_and_overlapping_ones_stay_full() -> None:
    alone = work()
    assert (alone.live_sequences, alone.decode_steps) == (4, 2000)
    assert work(prompt_tokens=500).decode_steps == 1500
    ahead = work(staleness=1, colocated=False)
    assert (ahead.live_sequences, ahead.decode_steps) == (8, 1000)
    # The longest must end within staleness + 1 steps.
    assert work(staleness=1, colocated=False, max_tokens=3000).decode_steps == 1500


def test_training_takes_its_operations_over_the_peak_and_its_bubble() -> None:
    step = predict_step(work(), IDEAL)
    train = next(phase for phase in step.phases if phase.name == "train")
    tokens, pairs = 64_000, 64_000 * 500
    embedding = 128256 * 4096
    norms = 65 * 4096
    matrices = 8.030261248e9 - embedding - norms
    operations = 3 * (2 * matrices * tokens + 4 * 32 * 128 * 32 * pairs)
    assert train.terms["products"] == pytest.approx(operations / (8 * 989.4e12))
    assert train.terms["pipeline_bubble"] == 0
    piped = predict_step(work(parallel=ParallelConfig(pipeline=2, data=4)), IDEAL)
    terms = next(phase for phase in piped.phases if phase.name == "train").terms
    rest = sum(seconds for name, seconds in terms.items() if name != "pipeline_bubble")
    assert terms["pipeline_bubble"] == pytest.approx(rest / 8)  # 16 sequences, two a micro-batch


def test_a_push_takes_every_weight_in_once_and_calls_for_every_tensor() -> None:
    terms = push_terms(work(), COUNTS, IDEAL)
    assert terms["bytes"] == pytest.approx(8.030261248e9 * 2 / 450e9)
    # Per layer: two norms, q, k, v, output, gate, up, down; embedding, head, last norm.
    assert COUNTS.tensors == 32 * 9 + 3
    assert terms["issue"] == pytest.approx(291 * 20 * 5e-6)
    split = work(engine_tensor=4, engines=2, sharded_push=True)
    assert push_terms(split, COUNTS, IDEAL)["bytes"] == pytest.approx(terms["bytes"] / 4)


def test_overlapped_sides_take_as_long_as_the_slower_and_it_is_the_bottleneck() -> None:
    both = predict_step(work(staleness=1, colocated=False), IDEAL)
    assert both.overlapped
    assert both.step_s == pytest.approx(max(both.generation_s, both.policy_s))
    assert (both.bottleneck[0] == "generate") == (both.generation_s > both.policy_s)
    alone = predict_step(work(), IDEAL)
    assert alone.step_s == pytest.approx(sum(phase.seconds for phase in alone.phases))
    assert alone.tokens_per_s_per_gpu == pytest.approx(64_000 / 8 / alone.step_s)
    assert both.gpus == 16


def test_halving_an_efficiency_doubles_its_terms() -> None:
    slow = predict_step(work(), IDEAL.model_copy(update={"decode_bandwidth": 0.5}))
    fast = predict_step(work(), IDEAL)
    assert slow.phases[0].terms["weights"] == 2 * fast.phases[0].terms["weights"]
    assert slow.phases[0].terms["issue"] == fast.phases[0].terms["issue"]


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_every_number_of_the_hardware_table_names_its_source(name: str) -> None:
    row = HARDWARE[name]
    numbers = set(Hardware.model_fields) - {"name", "sources"}
    if row.fp8_flops_per_s is None:
        numbers.discard("fp8_flops_per_s")
    assert numbers <= {key for key, text in row.sources.items() if len(text) > 5}


def test_hardware_without_a_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="A100 has no matrix rate"):
        hardware_named("a100").flops_per_s("fp8")
    with pytest.raises(ConfigError, match="use one of a100"):
        hardware_named("v100")


def test_the_search_finds_the_minimum_of_a_narrow_valley() -> None:
    def loss(p: list[float]) -> float:
        return (p[0] - 0.3) ** 2 + 100 * (p[1] - p[0]) ** 2

    assert minimise(loss, [-2.0, 1.0]) == pytest.approx([0.3, 0.3], abs=0.01)


def published() -> list:
    _, rows = read_table(published_table())
    return [parse_row(row, "published") for row in rows]


def test_stored_efficiencies_are_what_the_fit_gives_and_physical() -> None:
    file = read_efficiency_file()
    again = fit(examples_from(published()), file.records).model_dump()
    for name, record in file.records.items():
        assert record.value == pytest.approx(again[name], rel=0.02)
        assert 0 < record.value <= 1
        assert record.origin and record.basis


def test_rows_left_out_of_the_fit_are_predicted_within_fifteen_percent() -> None:
    examples = examples_from(published())
    errors = leave_one_out(examples, read_efficiency_file().records)
    assert len(errors) == 9
    assert statistics.median(map(abs, errors)) <= 0.15


def test_a_prediction_does_not_look_at_the_measured_time() -> None:
    row = published()[0]
    blind = row.model_copy(update={"step_time_s": None, "tokens_per_s_per_gpu": None})
    eff = stored_efficiencies()
    assert (
        predict_step(workload_of(blind), eff).step_s == predict_step(workload_of(row), eff).step_s
    )


def test_a_table_comes_back_in_its_columns_with_both_predictions(tmp_path: Path) -> None:
    columns = list(csv.DictReader(published_table().open()).fieldnames or [])
    row = {
        "id": "x", "hardware": "GB200", "precision": "FP8", "algorithm": "grpo",
        "model": "Qwen3-30B-A3B", "policy_lag_steps": "1", "max_sequence_tokens": "4096",
        "mean_sequence_tokens": "3000", "gpus": "16", "generation_batch_sequences": "1024",
        "train_batch_sequences": "512", "generation_tp": "1", "generation_pp": "1",
        "train_tp": "1", "train_cp": "1", "train_ep": "8", "train_pp": "1",
    }  # fmt: skip
    source = tmp_path / "rows.csv"
    with source.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*columns[:-2], "note"])
        writer.writeheader()
        writer.writerow(row | {"note": "kept, as it is"})
    (got,) = csv.DictReader(io.StringIO(predict_table(source, stored_efficiencies())))
    assert list(got) == [*columns[:-2], "note", "tokens_per_s_per_gpu", "step_time_s"]
    assert got["note"] == "kept, as it is" and got["id"] == "x"
    rate, seconds = float(got["tokens_per_s_per_gpu"]), float(got["step_time_s"])
    assert rate * seconds * 16 == pytest.approx(1024 * 3000, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "GPT-9"}, "is no shipped architecture"),
        ({"gpus": "9"}, "does not divide 9 policy GPUs"),
        ({"train_ep": "5"}, "does not divide"),
        ({"generation_tp": "64"}, "does not fit into 32"),
        ({"mean_sequence_tokens": "many"}, "mean_sequence_tokens"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_name(change: dict[str, str], message: str) -> None:
    _, rows = read_table(published_table())
    row = next(r for r in rows if r["id"] == "h07") | {"train_pp": "2"} | change
    with pytest.raises(ConfigError, match=message):
        workload_of(parse_row(row, "table"))


def test_a_table_without_needed_columns_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "bad.csv"
    source.write_text("id,model\n1,Qwen3-30B-A3B\n")
    with pytest.raises(ConfigError, match="lacks columns"):
        read_table(source)
