"""Whether an engine holds what was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.checksums import checksum


def check_held(
    where: str,
    sent: Mapping[str, Tensor],
    unsent: frozenset[str],
    held: Iterable[tuple[Sequence[str], Tensor]],
    dtype: torch.dtype,
    exact: frozenset[str],
) -> None:
    """Compare, tensor by tensor or fused group by fused group.

    Args:
        where: names the worker in errors.
        sent: checksums of what was sent to it, by tensor.
        unsent: tensors left out of this push; groups of them alone are not looked at.
        held: see CollectiveReceiver.confirm.
        dtype: what was sent in. An engine may hold a wider one, which is cast back first.
        exact: tensors that were sent in float32 instead.

    Raises:
        WeightExchangeError: names what differs, is missing or was never sent.
    """
    wanted = dict(sent)
    problems: list[str] = []
    for names, tensor in held:
        known = [wanted.pop(name) for name in names if name in wanted]
        if not known and unsent.issuperset(names):
            continue
        if len(known) != len(names):
            problems += [f"{name} is held, but was not sent" for name in names]
        else:
            as_sent = tensor.to(torch.float32 if exact.issuperset(names) else dtype)
            if not torch.equal(checksum(as_sent).cpu(), torch.stack(known).sum(0).cpu()):
                problems.append(f"{' + '.join(names)} differs")
    problems += [f"{name} is missing" for name in wanted]
    if problems:
        raise WeightExchangeError(
            where,
            f"does not hold what was sent: {len(problems)} tensors: {'; '.join(problems[:5])}",
            remedy="report it with the model's config.json; the engine must not be used",
        )
