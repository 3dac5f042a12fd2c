"""From prompts to graded groups: one object that drives the generator and the environment.

    start(GroupRequest) --GenerationRequest--> Generator --Completion--> advance() --Transcript-->
    Environment
                              ^                                             |  Reward: the rollout
                              ends +----- Observation: the dialogue goes on -----+  last of its
                              group: RolloutGroup

Everything is joined by ids: a rollout belongs to the group whose id it was started with, a
completion to the rollout that asked for it, whatever order things come back in. What the policy
wrote is never encoded again: a continuing dialogue sends back the sampled ids with the
observation's ids after them.

One thread at a time; rollouts.sources owns the thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Environment, Generator
from megatron_grpo.types import (
    Bool,
    Completion,
    FinishReason,
    Float32,
    GenerationRequest,
    Int32,
    Observation,
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
    """Rollouts of a group that are done, by index."""

    request: GroupRequest
    done: dict[int, Rollout] = field(default_factory=dict)


@dataclass(slots=True)
class _OpenRollout:
    """A rollout in progress: what was sampled and observed so far, in order, after the prompt."""

    group: _OpenGroup
    index: int
    seed: int
    started_s: float
    token_ids: list[Int32] = field(default_factory=list)
    loss_mask: list[Bool] = field(default_factory=list)
    logprobs: list[Float32] = field(default_factory=list)
    versions: list[Int32] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    budget_tokens: int = 0

    @property
    def rollout_id(self) -> str:
        return f"{self.group.request.group_id}/{self.index}"

    def extend(self, token_ids: Int32, mask: bool, logprobs: Float32, versions: Int32) -> None:
        self.token_ids.append(token_ids)
        self.loss_mask.append(np.full(len(token_ids), mask))
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.budget_tokens -= len(token_ids)


class Collector:
    """Turns GroupRequests into RolloutGroups.

    Args:
        environment: grades, and continues dialogues.
        generator: nobody else may collect from it meanwhile.
        decode: token ids to text, for graders and people.
        seed: of the run; a rollout's own seed is a hash of it, the group id, the index and the
            turn.
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
        self._waiting: dict[str, _OpenRollout] = {}  # request id -> rollout
        self._groups: dict[str, _OpenGroup] = {}
        self._activity = "work"
        self._stopping = False

    @property
    def num_groups(self) -> int:
        """Groups in flight."""
        return len(self._groups)

    @property
    def activity(self) -> str:
        """What is being waited for, for error messages; may be read from any thread."""
        return self._activity

    def start(self, requests: Sequence[GroupRequest]) -> None:
        """Submit every rollout of the given groups."""
        opened: list[_OpenRollout] = []
        for request in requests:
            if request.group_id in self._groups:
                raise RolloutError(
                    f"group {request.group_id}",
                    "is already in flight",
                    remedy="group ids are unique",
                )
            group = self._groups[request.group_id] = _OpenGroup(request)
            for index in range(request.size):
                seed = derived_seed(self._seed, request.group_id, index, 0)
                rollout = _OpenRollout(group, index, seed, time.monotonic())
                rollout.budget_tokens = request.max_new_tokens
                opened.append(rollout)
        self._submit(opened)

    def advance(self) -> list[RolloutGroup]:
        """Wait for at least one completion, grade what came, and return the groups that are now
        whole.

        Raises:
            RolloutError: the generator is late, or broke its contract.
            RewardError: the environment's reward did.
        """
        oldest = next(iter(self._waiting))
        self._activity = f"the generator, for {len(self._waiting)} requests, the oldest {oldest}"
        arrived = self._collect()
        if self._stopping:
            return []
        self._activity = f"the environment, to grade {len(arrived)} rollouts"
        replies = self._environment.respond([_transcript(rollout) for rollout in arrived])
        if len(replies) != len(arrived):
            raise RolloutError(
                "environment",
                f"gave {len(replies)} replies to {len(arrived)} transcripts",
                remedy="answer every transcript, in order",
            )
        going_on: list[_OpenRollout] = []
        whole: list[RolloutGroup] = []
        for rollout, reply in zip(arrived, replies, strict=True):
            if isinstance(reply, Observation) and len(reply.token_ids) < rollout.budget_tokens:
                n = len(reply.token_ids)
                unscored = np.zeros(n, np.float32), np.full(n, -1, np.int32)
                rollout.extend(reply.token_ids.astype(np.int32), False, *unscored)
                going_on.append(rollout)
                continue
            if isinstance(reply, Observation):
                reply = Reward(0.0, "out of tokens before the dialogue ended")
            whole += self._finish(rollout, reply)
        self._submit(going_on)
        return whole

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

    def _collect(self) -> list[_OpenRollout]:
        """Completions that came, appended to their rollouts; none of them once stopped."""
        completions = self._generator.collect(self._deadline_s)
        if not self._stopping:
            return [self._receive(completion) for completion in completions]
        for completion in completions:
            self._waiting.pop(completion.request_id, None)
        return []

    def _submit(self, rollouts: Sequence[_OpenRollout]) -> None:
        requests: list[GenerationRequest] = []
        for rollout in rollouts:
            wanted, turn = rollout.group.request, len(rollout.texts)
            request = GenerationRequest(
                request_id=rollout.rollout_id if turn == 0 else f"{rollout.rollout_id}#{turn}",
                prompt_ids=np.concatenate([wanted.prompt.token_ids, *rollout.token_ids]),
                seed=derived_seed(self._seed, wanted.group_id, rollout.index, turn),
                max_new_tokens=rollout.budget_tokens,
            )
            self._waiting[request.request_id] = rollout
            requests.append(request)
        if requests:
            self._generator.submit(requests)

    def _receive(self, completion: Completion) -> _OpenRollout:
        """Append a completion to its rollout."""
        rollout = self._waiting.pop(completion.request_id, None)
        where, count = f"request {completion.request_id}", len(completion.token_ids)
        if rollout is None:
            raise RolloutError(where, "came back but nobody waits for it", remedy=_GENERATOR_FAULT)
        if completion.finish_reason == "abort":
            raise RolloutError(
                where, "was aborted, and nobody asked for it", remedy=_GENERATOR_FAULT
            )
        if not 1 <= count <= rollout.budget_tokens:
            raise RolloutError(
                where,
                f"came back with a number of tokens outside 1 to {rollout.budget_tokens}",
                found=count,
                remedy=_GENERATOR_FAULT,
            )
        rollout.extend(
            completion.token_ids, True, completion.behavior_logprobs, completion.versions
        )
        rollout.texts.append(self._decode(completion.token_ids))
        rollout.finish_reason = completion.finish_reason
        return rollout

    def _finish(self, rollout: _OpenRollout, reward: Reward) -> list[RolloutGroup]:
        """Close a rollout; returns its group if it was the last one of it."""
        group, request = rollout.group, rollout.group.request
        group.done[rollout.index] = _finished(rollout, reward)
        if len(group.done) < request.size:
            return []
        del self._groups[request.group_id]
        members = tuple(group.done[index] for index in range(request.size))
        return [RolloutGroup(request.group_id, request.prompt, members)]


_GENERATOR_FAULT = "this is a fault of the generator; report it"


def _transcript(rollout: _OpenRollout) -> Transcript:
    return Transcript(rollout.group.request.prompt, tuple(rollout.texts), rollout.finish_reason)


def _finished(rollout: _OpenRollout, reward: Reward) -> Rollout:
    prompt = rollout.group.request.prompt
    n = prompt.num_tokens
    return Rollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group.request.group_id,
        token_ids=np.concatenate([prompt.token_ids, *rollout.token_ids]),
        loss_mask=np.concatenate([np.zeros(n, np.bool_), *rollout.loss_mask]),
        behavior_logprobs=np.concatenate([np.zeros(n, np.float32), *rollout.logprobs]),
        versions=np.concatenate([np.full(n, -1, np.int32), *rollout.versions]),
        prompt_tokens=n,
        reward=reward,
        finish_reason=rollout.finish_reason,
        seed=rollout.seed,
        text="\n".join(rollout.texts),
        generate_s=time.monotonic() - rollout.started_s,
    )


def derived_seed(run_seed: int, group_id: str, index: int, turn: int) -> int:
    """A seed in [0, 2**31) that depends on nothing else: not on the process, the batch or the
    Python version.

    >>> derived_seed(1, "g0", 0, 0) == derived_seed(1, "g0", 0, 0) != derived_seed(1, "g0", 1, 0)
    True
    """
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{index}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
