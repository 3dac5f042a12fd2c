"""From prompts to graded groups: one object that drives the generator and the environment.

    start(GroupRequest) --GenerationRequest--> Generator --Completion--> receive() --Transcript-->
    Environment
                              ^                                              |  Reward: the rollout
                              |                                           commit()  ends
                              +------- Observation: the dialogue goes on ----+  last of its
                              +------- aborted: goes on from where it was ---+  group: RolloutGroup

Everything is joined by ids: a rollout belongs to the group whose id it was started with, a
completion to the rollout that asked for it, whatever order things come back in. What the policy
wrote is never encoded again: a continuing dialogue, or a rollout that was interrupted, sends back
the sampled ids (with the observation's ids after them) and gets what is left of its budget.

`receive` changes nothing of a rollout, `commit` all at once: a `snapshot` between them is whole.
One thread at a time but for `interrupt` and `stop`; rollouts.sources owns the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Environment, Generator
from megatron_grpo.rollouts.assembly import (
    after_completion,
    after_observation,
    derived_seed,
    finished,
    in_order,
    new_partial,
    place,
)
from megatron_grpo.spans import SpanRecorder
from megatron_grpo.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Int32,
    Observation,
    PartialRollout,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Transcript,
)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group to be made.

    Attributes:
        group_id: unique among the groups in flight; rollout k gets the id "<group id>/<k>".
        size: number of rollouts.
        max_new_tokens: budget of one rollout, observations of a dialogue included.
    """

    group_id: str
    prompt: Prompt
    size: int
    max_new_tokens: int


@dataclass(slots=True)
class _OpenGroup:
    """Rollouts of a group by index: done, and not done as far as they are committed."""

    request: GroupRequest
    done: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, PartialRollout] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int | None:
        """Of all tokens that were sampled; None when there is none."""
        members = (*self.done.values(), *self.partial.values())
        versions = [m.oldest_version for m in members if m.oldest_version >= 0]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in flight."""

    group: _OpenGroup
    index: int
    submitted_s: float
    version: int


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What came for one rollout: it is over for now, for a reason, or was interrupted (None)."""

    group: _OpenGroup
    partial: PartialRollout
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Graded:
    """Between `receive` and `commit`: arrivals, and the environment's replies to those that are not
    interrupted."""

    arrivals: tuple[_Arrival, ...]
    replies: Mapping[int, Reward | Observation]


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A snapshot of a group in flight."""

    group_id: str
    done: tuple[Rollout, ...]
    partial: tuple[PartialRollout, ...]


class Collector:
    """Turns GroupRequests into RolloutGroups.

    Args:
        environment: grades, and continues dialogues.
        generator: nobody else may collect from it meanwhile.
        decode: token ids to text, for graders and people.
        seed: of the run; a rollout's own seed is a hash of it, the group id, the index and how many
            requests came before.
        deadline_s: longest wait for any one completion.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Generator,
        decode: Callable[[Int32], str],
        *,
        seed: int,
        deadline_s: float,
    ) -> None:
        self._environment = environment
        self._generator = generator
        self._decode = decode
        self._seed = seed
        self._deadline_s = deadline_s
        self._groups: dict[str, _OpenGroup] = {}
        self._waiting: dict[str, _Waiting] = {}  # request id -> whose
        self._held: list[tuple[_OpenGroup, int]] = []  # to be submitted by `go_on`
        self._interrupted: set[str] = set()
        self._interrupting = threading.Lock()
        self._num_interrupted = 0
        self._activity = "work"
        self._stopping = False
        self.spans = SpanRecorder()

    @property
    def num_groups(self) -> int:
        """Groups in flight, held ones included."""
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Requests at the generator."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Rollouts that wait for `go_on`."""
        return len(self._held)

    @property
    def num_interrupted(self) -> int:
        """Requests that were aborted and go on, or start anew, since the beginning."""
        return self._num_interrupted

    @property
    def activity(self) -> str:
        """What is being waited for, for error messages; may be read from any thread."""
        return self._activity

    def start(self, requests: Sequence[GroupRequest]) -> None:
        """Submit every rollout of the given groups."""
        self._submit([rollout for request in requests for rollout in self._open(request)])

    def restore(self, request: GroupRequest, known: OpenGroup) -> None:
        """Hold a group that was begun before; `go_on` submits what is left of it."""
        self._held += self._open(request)
        group = self._groups[request.group_id]
        group.done = {place(rollout): rollout for rollout in known.done}
        group.partial |= {partial.index: partial for partial in known.partial}
        for index in group.done:
            del group.partial[index]
        self._held = [(g, i) for g, i in self._held if g is not group or i in group.partial]

    def receive(self) -> Graded:
        """Wait for at least one completion and have what came graded.

        Raises:
            RolloutError: the generator is late, or broke its contract.
            RewardError: the environment's reward did.
        """
        oldest = next(iter(self._waiting))
        self._activity = f"the generator, for {len(self._waiting)} requests, the oldest {oldest}"
        arrivals = self._collect()
        whole = [i for i, arrival in enumerate(arrivals) if arrival.finish_reason is not None]
        self._activity = f"the environment, to grade {len(whole)} rollouts"
        with self.spans("grade"):
            replies = self._environment.respond([_transcript(arrivals[i]) for i in whole])
        if len(replies) != len(whole):
            raise RolloutError(
                "environment",
                f"gave {len(replies)} replies to {len(whole)} transcripts",
                remedy="answer every transcript, in order",
            )
        return Graded(tuple(arrivals), dict(zip(whole, replies, strict=True)))

    def commit(self, graded: Graded) -> list[RolloutGroup]:
        """Take over what `receive` returned: the groups that are now whole. What goes on is held
        until `go_on`.
        """
        whole: list[RolloutGroup] = []
        for number, arrival in enumerate(graded.arrivals):
            group, partial, budget = arrival.group, arrival.partial, self._budget(arrival)
            reply = graded.replies.get(number)
            if isinstance(reply, Observation) and len(reply.token_ids) >= budget:
                reply = Reward(0.0, "out of tokens before the dialogue ended")
            if isinstance(reply, Reward):
                whole += self._finish(arrival, reply)
                continue
            if isinstance(reply, Observation):
                partial = after_observation(partial, reply.token_ids)
            group.partial[partial.index] = partial
            self._held.append((group, partial.index))
        return whole

    def go_on(self, oldest_allowed: int) -> list[str]:
        """Submit what is held, except groups with a token older than `oldest_allowed`, which are
        forgotten: their ids.
        """
        busy = {id(waiting.group) for waiting in self._waiting.values()}
        stale = [
            group_id
            for group_id, group in self._groups.items()
            if id(group) not in busy
            and group.oldest_version is not None
            and group.oldest_version < oldest_allowed
        ]
        dropped = [self._groups.pop(group_id) for group_id in stale]
        going_on = [(g, i) for g, i in self._held if not any(g is d for d in dropped)]
        self._held = []
        self._submit(going_on)
        return stale

    def interrupt(self, submitted_before: int | None = None) -> None:
        """Ask the generator to abort what is in flight (requests submitted before that version
        only, if given); it comes out of `receive` with what it has. May be called from any thread.
        """
        with self._interrupting:
            waiting = dict(self._waiting)
            self._interrupted &= waiting.keys()
            ids = [
                request_id
                for request_id, one in waiting.items()
                if request_id not in self._interrupted
                and (submitted_before is None or one.version < submitted_before)
            ]
            self._interrupted.update(ids)
        if ids:
            self._generator.abort(ids)

    def snapshot(self) -> list[OpenGroup]:
        """What is known of every group in flight; what the generator has not returned is not."""
        return [
            OpenGroup(group_id, tuple(group.done.values()), tuple(group.partial.values()))
            for group_id, group in self._groups.items()
        ]

    def stop(self) -> None:
        """Ask the generator to abort everything in flight; may be called from any thread."""
        self._stopping = True
        self._generator.abort(list(self._waiting))

    def drain(self) -> None:
        """After `stop`: wait until the generator has let go of every request.

        Raises:
            RolloutError: it did not within the deadline.
        """
        self.stop()  # again, for what was submitted while the first call was on its way
        while self._waiting:
            self._collect()
        self._groups.clear()
        self._held.clear()

    def _open(self, request: GroupRequest) -> list[tuple[_OpenGroup, int]]:
        if request.group_id in self._groups:
            raise RolloutError(
                f"group {request.group_id}", "is already in flight", remedy="group ids are unique"
            )
        group = _OpenGroup(request)
        group.partial = {index: new_partial(index) for index in range(request.size)}
        self._groups[request.group_id] = group
        return [(group, index) for index in range(request.size)]

    def _collect(self) -> list[_Arrival]:
        """Completions that came, each with its rollout; none of them once stopped."""
        completions = self._generator.collect(self._deadline_s)
        if self._stopping:
            for completion in completions:
                self._waiting.pop(completion.request_id, None)
            return []
        return [self._arrival(completion) for completion in completions]

    def _submit(self, rollouts: Sequence[tuple[_OpenGroup, int]]) -> None:
        requests: list[GenerationRequest] = []
        now, version = time.monotonic(), self._generator.version
        for group, index in rollouts:
            wanted, partial = group.request, group.partial[index]
            name, number = f"{wanted.group_id}/{index}", partial.requests
            request = GenerationRequest(
                request_id=name if number == 0 else f"{name}#{number}",
                prompt_ids=np.concatenate([wanted.prompt.token_ids, partial.token_ids]),
                seed=derived_seed(self._seed, wanted.group_id, index, number),
                max_new_tokens=wanted.max_new_tokens - len(partial.token_ids),
            )
            self._waiting[request.request_id] = _Waiting(group, index, now, version)
            requests.append(request)
        if requests:
            self._generator.submit(requests)

    def _arrival(self, completion: Completion) -> _Arrival:
        """The rollout with the completion appended; nothing is changed but who is waited for."""
        where = f"request {completion.request_id}"
        waiting = self._waiting.pop(completion.request_id, None)
        if waiting is None:
            raise RolloutError(where, "came back but nobody waits for it", remedy=_GENERATOR_FAULT)
        with self._interrupting:
            asked_for = completion.request_id in self._interrupted
        aborted = completion.finish_reason == "abort"
        if aborted and not asked_for:
            raise RolloutError(
                where, "was aborted, and nobody asked for it", remedy=_GENERATOR_FAULT
            )
        before = waiting.group.partial[waiting.index]
        budget = waiting.group.request.max_new_tokens - len(before.token_ids)
        if not (0 if aborted else 1) <= len(completion.token_ids) <= budget:
            raise RolloutError(
                where,
                f"came back with a number of tokens outside 1 to {budget}",
                found=len(completion.token_ids),
                remedy=_GENERATOR_FAULT,
            )
        partial = after_completion(
            before, completion, seconds=time.monotonic() - waiting.submitted_s
        )
        if aborted and len(completion.token_ids) < budget:
            self._num_interrupted += 1
            return _Arrival(waiting.group, partial, None)
        turn = self._decode(partial.token_ids[partial.turn_start :])
        partial = replace(partial, texts=(*partial.texts, turn), turn_start=len(partial.token_ids))
        reason: FinishReason = "length" if aborted else completion.finish_reason
        return _Arrival(waiting.group, partial, reason)

    def _budget(self, arrival: _Arrival) -> int:
        """Tokens the rollout may still have."""
        return arrival.group.request.max_new_tokens - len(arrival.partial.token_ids)

    def _finish(self, arrival: _Arrival, reward: Reward) -> list[RolloutGroup]:
        """Close a rollout; returns its group if it was the last one of it."""
        group, request, index = arrival.group, arrival.group.request, arrival.partial.index
        assert arrival.finish_reason is not None
        seed = derived_seed(self._seed, request.group_id, index, 0)
        group.done[index] = finished(
            arrival.partial, request.group_id, request.prompt, reward, arrival.finish_reason, seed
        )
        del group.partial[index]
        if group.partial:
            return []
        del self._groups[request.group_id]
        return [RolloutGroup(request.group_id, request.prompt, in_order(group.done.values()))]


_GENERATOR_FAULT = "this is a fault of the generator; report it"


def _transcript(arrival: _Arrival) -> Transcript:
    assert arrival.finish_reason is not None
    return Transcript(arrival.group.request.prompt, arrival.partial.texts, arrival.finish_reason)
