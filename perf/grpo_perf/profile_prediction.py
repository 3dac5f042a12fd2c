"""The machine model's seconds for a measured run, to be shown beside it."""

from __future__ import annotations

from grpo_perf.benchmark_sizes import benchmark_sizes
from grpo_perf.machine_model import MachineWork, predict_phases, prefill_tokens
from grpo_perf.microbenchmark import Speeds
from grpo_perf.profile_phases import working
from grpo_perf.profile_report import BYTES_OF, policy_of
from grpo_perf.profile_run import Measured
from grpo_perf.step_work import PackedCount, generation_work, training_work


def predict_measured(measured: Measured) -> dict[str, float]:
    """Seconds per step by phase; empty on GPUs, whose speed `plan` predicts."""
    if measured.config.cluster.gpus_per_rank:
        return {}
    engine = _slowest(measured.engine_speeds) if measured.engine_speeds else None
    return predict_phases(
        measured.model,
        policy_of(measured.config).parallel,
        _work(measured),
        _slowest(measured.rank_speeds),
        engine,
    )


def _slowest(speeds: list[Speeds]) -> Speeds:
    """All wait for the one with the slowest products."""
    return min(speeds, key=lambda one: one.flops_per_s)


def _work(measured: Measured) -> MachineWork:
    """The mean step."""
    steps = measured.steps
    sizes = benchmark_sizes(measured.config, measured.model, gpu=False)
    virtual = policy_of(measured.config).parallel.virtual_pipeline > 1
    counts = [
        training_work(batch, shares_prefixes=measured.shape.keep_groups, equal_length=virtual)
        for _, batch in measured.work
    ]
    computed = sum((count.computed for count in counts), PackedCount())
    groups = [group for groups, _ in measured.work for group in groups]
    generated = generation_work(groups)
    window = measured.window_s
    engine_steps = sum(
        span.attrs["steps"]
        for spans in measured.engines.values()
        for span in working(spans)
        if span.name == "generate" and window[0] <= span.end_s <= window[1]
    )
    prompts = sum(prefill_tokens(g.prompt.num_tokens, len(g.rollouts)) for g in groups)
    sampled = max(1, generated.sampled_tokens)
    return MachineWork(
        training=PackedCount(
            computed.tokens // steps, computed.pairs // steps, computed.head_tokens // steps
        ),
        microbatches=max(len(batch.replicas[0]) for _, batch in measured.work),
        scored=0 if measured.config.reference_folder is None else 1,
        decode_tokens=generated.sampled_tokens / steps,
        prefill_tokens=prompts / steps,
        context_tokens=generated.cache_tokens / sampled,
        engines=max(1, len(measured.engines)),
        engine_steps=engine_steps / steps,
        keys_per_token=sizes.keys_per_token,
        item_bytes=BYTES_OF[measured.dtype],
    )
