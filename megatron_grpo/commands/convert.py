"""`convert`: checkpoints between Hugging Face and Megatron, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_grpo.commands.options import wide_console

if TYPE_CHECKING:
    import torch

    from megatron_grpo.conversion.megatron_folder import MegatronFolder

convert = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Convert checkpoints between Hugging Face and Megatron-Core, and check the result.",
)
Verify = Annotated[
    bool,
    typer.Option("--verify", help="run both models on a text in float32 and compare their logits"),
]


@convert.command("to-megatron")
def to_megatron(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json, safetensors")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="a folder that does not exist")],
    tensor: Annotated[int, typer.Option(min=1, help="tensor-parallel size")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="pipeline-parallel size")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="expert-parallel size")] = 1,
    verify: Verify = False,
) -> None:
    """Write OUT, a Megatron distributed checkpoint with HF_DIR's tokenizer and configs in it.

    Its files are cut for the given layout, and any other loads them too. A policy starts from
    it: [bold]model.path=OUT[/bold]. An interrupted conversion continues when the same command is
    given again; OUT appears only when it is whole.
    """
    from megatron_grpo.conversion.boxes import Layout
    from megatron_grpo.conversion.convert import to_megatron as write
    from megatron_grpo.conversion.hf_folder import HfFolder
    from megatron_grpo.conversion.megatron_folder import MegatronFolder

    source, target = source.expanduser(), target.expanduser()
    folder = HfFolder(source)
    write(folder, target, Layout(tensor, pipeline, expert), Console(stderr=True))
    typer.echo(f"wrote {target}")
    if verify:
        _verify(folder.path, MegatronFolder(target), None)


@convert.command("to-hf")
def to_hf(
    source: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="from to-megatron, or saved by a training run"),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="a folder that does not exist")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; the checkpoint's own by default")
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(min=1, help="most bytes of one safetensors file")
    ] = 5_000_000_000,
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder of config and tokenizer, if CKPT has none"),
    ] = None,
    verify: Verify = False,
) -> None:
    """Write OUT, a Hugging Face folder: safetensors, config, tokenizer, chat template.

    OUT appears only when it is whole; an interrupted conversion continues when the same command is
    given again.
    """
    import torch

    from megatron_grpo.conversion.convert import to_hugging_face
    from megatron_grpo.conversion.megatron_folder import MegatronFolder
    from megatron_grpo.errors import ConfigError

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise ConfigError("--dtype", "is unknown", found=dtype, remedy="use fp32, bf16 or fp16")
    kind = None if dtype is None else kinds[dtype]
    source, target = source.expanduser(), target.expanduser()
    folder = MegatronFolder(source, None if like is None else like.expanduser())
    to_hugging_face(folder, target, Console(stderr=True), kind, shard_bytes)
    typer.echo(f"wrote {target}")
    if verify:
        _verify(target, folder, kind)


_TEXT = """The lighthouse keeper counted the ships every evening: 7 from the north, 12 from the \
south, and once, in the winter of 1887, none at all. "A quiet sea," he wrote in his diary, "is not \
an empty one." def total(ships): return sum(ships.values())  # {'north': 7, 'south': 12} -> 19. \
Am nächsten Morgen lag Eis auf den Stufen, and by noon the bay had frozen over."""


def _verify(hugging_face: Path, megatron: MegatronFolder, dtype: torch.dtype | None) -> None:
    """Print how far the two models are apart on a text.

    Raises:
        CheckpointError: further than rounding explains.
    """
    import warnings

    import torch

    from megatron_grpo.conversion.hf_folder import HfFolder
    from megatron_grpo.conversion.lazy_model import hugging_face_logits
    from megatron_grpo.errors import CheckpointError

    with warnings.catch_warnings():  # Megatron tells at length what is not installed
        warnings.simplefilter("ignore")
        from megatron_grpo.policy.megatron.lazy_logits import megatron_logits
    warnings.filterwarnings("ignore", module=r"megatron\.core")

    ids, what = _token_ids(hugging_face, megatron.spec.vocab)
    want = hugging_face_logits(HfFolder(hugging_face), ids)
    got = megatron_logits(megatron, ids, dtype)
    difference, largest = float((got - want).abs().max()), float(want.abs().max())
    perplexities = []
    for logits in (want, got):
        logprobs = torch.log_softmax(logits[:-1], -1)
        chosen = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])
        perplexities.append(float((-chosen.mean()).exp()))
    allowed = 1e-3 + 1e-5 * largest
    typer.echo(
        f"{what}: logits of {len(ids)} tokens differ by at most {difference:.2e} "
        f"(largest logit {largest:.1f}, allowed {allowed:.1e}); perplexity "
        f"{perplexities[0]:.4f} Hugging Face, {perplexities[1]:.4f} Megatron"
    )
    if not difference <= allowed:
        raise CheckpointError(
            str(megatron.path),
            f"computes other logits than {hugging_face}",
            found=difference,
            remedy="do not use it; report the model's config.json",
        )


def _token_ids(folder: Path, vocab: int) -> tuple[list[int], str]:
    """A text in the model's own tokens; random ones where there is no tokenizer.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    import json

    import torch
    from transformers import AutoTokenizer

    from megatron_grpo.errors import CheckpointError

    if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        try:
            for file in folder.glob("tokenizer*.json"):
                json.loads(file.read_text(encoding="utf-8"))
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                str(folder),
                f"has a tokenizer that cannot be read: {str(error).strip().splitlines()[0]}",
                remedy="copy its files again; the weights were written",
            ) from error
        return list(tokenizer(_TEXT)["input_ids"]), "on a text"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (96,), generator=generator).tolist()
    return ids, "on random tokens, for want of a tokenizer"


@convert.command("list")
def list_families() -> None:
    """The model families, and for each what is supported and was verified."""
    from rich.table import Table

    from megatron_grpo.conversion.support import EVERYWHERE, SUPPORT

    table = Table("family", "models", "verified against Hugging Face under", "refused by name")
    for family, support in SUPPORT.items():
        table.add_row(
            family, support.models, ", ".join(support.layouts), ", ".join(support.refused)
        )
    console = wide_console()
    console.print(table)
    for line in EVERYWHERE:
        console.print(line)
