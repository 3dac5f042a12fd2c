"""What `megatron-grpo profile` does, below the command line."""

from __future__ import annotations

from rich.console import Console

from grpo_perf.hardware import hardware_named
from grpo_perf.profile_output import show_report, write_json
from grpo_perf.profile_prediction import predict_measured
from grpo_perf.profile_report import Report, make_report
from grpo_perf.profile_run import ProfileOptions, measure_run
from grpo_perf.timeline import make_timeline
from grpo_perf.timeline_html import write_timeline
from grpo_perf.timeline_png import draw_timeline
from megatron_grpo.config import RunConfig
from megatron_grpo.errors import ConfigError


def run_profile_command(
    config: RunConfig, options: ProfileOptions, hardware: str | None, console: Console
) -> Report:
    """Run, print the tables, leave profile.json, timeline.png and timeline.html in the folder of
    the profile.

    Args:
        hardware: whose vendor's peak the MFU is of; on CPUs "cpu" when None.

    Raises:
        ConfigError: no hardware named for a run on GPUs.
    """
    if hardware is None and config.cluster.gpus_per_rank:
        raise ConfigError(
            "--hardware", "is required on GPUs", remedy="name yours, so that the MFU has a peak"
        )
    device = hardware_named(hardware or "cpu")
    measured = measure_run(config, options, console)
    report = make_report(measured, device)
    predicted = predict_measured(measured)
    timeline = make_timeline(measured)
    folder = measured.folder
    speeds = {"ranks": measured.rank_speeds, "engines": measured.engine_speeds}
    write_json(report, predicted, speeds, folder / "profile.json")
    draw_timeline(timeline, folder / "timeline.png")
    write_timeline(timeline, folder / "timeline.html")
    show_report(report, predicted, console)
    files = ["profile.json", "timeline.png", "timeline.html", *(p.name for p in measured.traces)]
    console.print(f"in [bold]{folder}[/bold]: {', '.join(files)}")
    return report
