"""A weight channel inside one process: the sender puts, receivers take, all agree or all fail.

    sender:    snapshot, offer, wait until every receiver has answered
    receiver:  wait for an offer, hand it out, answer "whole" or why not

Both waits have a deadline, and each names whom it waited for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class _Offer:
    """One push. `problem` is what is wrong with it, "" if nothing."""

    version: int
    tensors: tuple[tuple[str, Tensor], ...]
    problem: str


class InProcessChannel:
    """Both ends of the channel: `sender`, and one of `receivers` for each generator.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> specs = (TensorSpec("w", (2,), "float32"),)
    >>> channel = InProcessChannel(specs, deadline_s=5.0)
    >>> with ThreadPoolExecutor() as pool:
    ...     pull = pool.submit(lambda: dict(channel.receivers[0].receive(3)))
    ...     report = channel.sender.send(3, iter([("w", torch.ones(2))]))
    >>> report.num_tensors, pull.result()
    (1, {'w': tensor([1., 1.])})
    """

    def __init__(
        self, manifest: Sequence[TensorSpec], *, deadline_s: float, num_receivers: int = 1
    ) -> None:
        """`manifest` is everything a push consists of; see `hugging_face_manifest`."""
        self.manifest = tuple(manifest)
        self.deadline_s = deadline_s
        self.sender = InProcessSender(self)
        self.receivers = tuple(InProcessReceiver(self, index) for index in range(num_receivers))
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._answers: dict[int, str] = {}  # receiver -> "" (took it whole) or what went wrong

    def offer(self, version: int, tensors: tuple[tuple[str, Tensor], ...], problem: str) -> None:
        """Show a push to every receiver and wait for all of them; see InProcessSender.send.

        A push with a problem waits for nobody; it stays on show, so that late receivers fail too.
        """
        with self._changed:
            self._offer, self._answers = _Offer(version, tensors, problem), {}
            self._changed.notify_all()
            if problem:
                return
            everyone = set(range(len(self.receivers)))
            done = self._changed.wait_for(lambda: set(self._answers) == everyone, self.deadline_s)
            answers, self._offer = dict(self._answers), None
        if not done:
            raise WeightExchangeError(
                f"push of version {version}",
                f"receivers {sorted(everyone - set(answers))} did not take it within "
                f"{self.deadline_s:g} s",
                remedy="start their pull first, or raise weights.deadline_s",
            )
        failed = {index: answer for index, answer in answers.items() if answer}
        if failed:
            index, answer = min(failed.items())
            raise WeightExchangeError(f"push of version {version}, receiver {index}", answer)

    def wait_for_offer(self, index: int, version: int) -> _Offer:
        """The push that receiver `index` has not answered yet."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._offer is not None and index not in self._answers, self.deadline_s
            )
            if not arrived or self._offer is None:
                raise WeightExchangeError(
                    f"pull of version {version}, receiver {index}",
                    f"the policy pushed nothing within {self.deadline_s:g} s",
                    remedy="push after the pull has started, or raise weights.deadline_s",
                )
            return self._offer

    def answer(self, index: int, offer: _Offer, problem: str) -> None:
        """Raises WeightExchangeError if the sender has run out of time: then both sides failed."""
        with self._changed:
            current = self._offer is offer
            if current:
                self._answers[index] = problem
                self._changed.notify_all()
        if not current and not problem:
            raise WeightExchangeError(
                f"pull of version {offer.version}, receiver {index}",
                f"took longer than the sender waits ({self.deadline_s:g} s)",
                remedy="raise weights.deadline_s",
            )


class InProcessSender:
    """See protocols.WeightSender."""

    def __init__(self, channel: InProcessChannel) -> None:
        self._channel = channel

    def send(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> PushReport:
        """Copies every tensor, so that training may go on while receivers still read.

        Raises:
            WeightExchangeError: the tensors are not those of the manifest, each once; a receiver
                failed, wants another version, or did not come within the deadline.
        """
        start = time.monotonic()
        problem = "the policy failed before its last tensor"
        try:
            snapshot = tuple((name, tensor.detach().clone()) for name, tensor in tensors)
            problem = compare(self._channel.manifest, snapshot)
        finally:
            if problem:
                self._channel.offer(version, (), problem)
        if problem:
            raise WeightExchangeError(f"push of version {version}", problem)
        self._channel.offer(version, snapshot, "")
        sent_bytes = sum(tensor.nbytes for _, tensor in snapshot)
        return PushReport(version, len(snapshot), sent_bytes, time.monotonic() - start)

    def close(self) -> None:
        """Nothing is held between pushes."""


class InProcessReceiver:
    """See protocols.WeightReceiver. One thread at a time."""

    def __init__(self, channel: InProcessChannel, index: int) -> None:
        self._channel = channel
        self._index = index

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors that other receivers may read too: copy them, do not write to them.

        The push counts as taken when the iterator is exhausted; stopping early fails both sides.
        """
        offer = self._channel.wait_for_offer(self._index, version)
        problem = offer.problem
        if not problem and offer.version != version:
            problem = f"version {version} was expected, version {offer.version} was pushed"
        if problem:
            self._channel.answer(self._index, offer, problem)
            raise WeightExchangeError(f"pull of version {version}, receiver {self._index}", problem)
        whole = False
        try:
            yield from offer.tensors
            whole = True
        finally:
            problem = "" if whole else "stopped reading before the last tensor"
            self._channel.answer(self._index, offer, problem)

    def close(self) -> None:
        """Nothing is held between pulls."""


def compare(manifest: Sequence[TensorSpec], tensors: Sequence[tuple[str, Tensor]]) -> str:
    """What keeps the tensors from being exactly those of the manifest; "" if nothing does.

    >>> compare((TensorSpec("a", (1,), "float32"), TensorSpec("b", (1,), "float32")), [])
    'tensors are missing: a, b'
    """
    expected = {spec.name: spec for spec in manifest}
    counts = Counter(name for name, _ in tensors)
    missing = sorted(set(expected) - set(counts))
    if missing:
        return f"tensors are missing: {', '.join(missing)}"
    strange = sorted(set(counts) - set(expected))
    if strange:
        return f"tensors nobody expects: {', '.join(strange)}"
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        return f"tensors sent more than once: {', '.join(twice)}"
    for name, tensor in tensors:
        spec = expected[name]
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.torch_dtype):
            found = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            return f"{name} is {found}, but {spec.shape} {spec.dtype} was promised"
    return ""


def hugging_face_manifest(folder: Path, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    """Names and shapes of a Hugging Face model's parameters, tied ones once; loads no weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return tuple(
        TensorSpec(name, tuple(parameter.shape), dtype)
        for name, parameter in model.named_parameters()
    )
