"""Whether what the policy promises to send is the whole model, asked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.specs import SenderSpec


def check_manifest(senders: Sequence[SenderSpec], folder: Path, dtype: str) -> None:
    """The senders' manifests together are exactly the model in `folder`, in the engine's dtype.

    A tied head has no tensor of its own and must not be sent.

    Raises:
        CheckpointError: the folder itself is not whole.
        WeightExchangeError: names the first tensors that are missing, unknown, or of another shape
            or dtype.
    """
    sent = {spec.name: spec for sender in senders for spec in sender.manifest}
    headers = HfFolder(folder).headers
    _refuse("would not be sent", set(headers) - set(sent))
    _refuse("are not the model's", set(sent) - set(headers))
    _refuse_values("shape", {n: (s.shape, headers[n].shape) for n, s in sent.items()})
    _refuse_values("dtype", {n: (s.dtype, dtype) for n, s in sent.items()})


def _refuse(problem: str, names: set[str]) -> None:
    if names:
        raise WeightExchangeError(
            "weight manifest",
            f"{len(names)} tensors {problem}",
            found=", ".join(sorted(names)[:5]),
            remedy="the policy must send all of the checkpoint that the engine has loaded",
        )


def _refuse_values(what: str, pairs: Mapping[str, tuple[object, object]]) -> None:
    for name, (sent, wanted) in pairs.items():
        if sent != wanted:
            raise WeightExchangeError(
                f"tensor {name}",
                f"the engine needs {what} {wanted}",
                found=sent,
                remedy="cast to the engine's dtype and send the checkpoint's shapes",
            )
