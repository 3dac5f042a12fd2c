"""What travels between the parts on the left of `make_batch`: frozen, numpy only.

Identity is always an id, never a comparison of contents: two rows with the same prompt text are two
prompts with two `prompt_id`s, and every rollout names the group it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.errors import RolloutError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem as the policy sees it.

    >>> Prompt("arithmetic/17", np.array([1, 2, 3], np.int32), "What is 2 + 3?",
    answer="5").num_tokens 3

    Attributes:
        prompt_id: unique over all sources of a run, e.g. "source/row".
        token_ids: [P], chat template already applied, P >= 1. Engines get ids, never text.
        text: what the ids were made from, for people.
        answer: the gold answer as text.
        metadata: a JSON object with whatever the environment needs to grade; "{}" when nothing.
    """

    prompt_id: str
    token_ids: Int32
    text: str
    answer: str = ""
    metadata: str = "{}"

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or len(self.token_ids) == 0:
            raise RolloutError(
                self.prompt_id,
                "a prompt needs at least one token in one dimension",
                found=self.token_ids.shape,
                remedy="drop the row or give it text",
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion asked of a generator; the G members of a group are G requests.

    >>> GenerationRequest("g0/1", np.array([1, 2], np.int32), seed=7, max_new_tokens=16).seed
    7

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: [P] token ids the engine continues.
        seed: of this completion alone; the result does not depend on what else is in the batch.
        max_new_tokens: budget in tokens, >= 1.
        greedy: take the most likely token instead of sampling. For evaluation only: the
            log-probabilities of such a completion are at no particular temperature.
    """

    request_id: str
    prompt_ids: Int32
    seed: int
    max_new_tokens: int
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator returns for one request; all arrays are [N], N >= 1 generated tokens.

    Attributes:
        token_ids: sampled ids, the stop token included if one was sampled.
        behavior_logprobs: log-probability of each sampled id under the sampling temperature over
            the full
            vocabulary: the quantity the trainer computes for the same token.
        versions: weight version that produced each token.
        finish_reason: "stop" at a stop token, "length" at the budget, "abort" when cancelled.
    """

    request_id: str
    token_ids: Int32
    behavior_logprobs: Float32
    versions: Int32
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if not (len(self.behavior_logprobs) == len(self.versions) == n):
            raise RolloutError(
                f"request {self.request_id}",
                "tokens, log-probabilities and versions differ in length",
                found=(n, len(self.behavior_logprobs), len(self.versions)),
                remedy="this is a fault of the generator; report it",
            )


@dataclass(frozen=True, slots=True)
class Reward:
    """A finite number and why. A failed grading is a 0 with a reason, not an exception."""

    value: float
    reason: str = ""
    extracted: str = ""

    def __post_init__(self) -> None:
        if not np.isfinite(self.value):
            raise RolloutError(
                "reward", "must be finite", found=self.value, remedy="fix the reward"
            )


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment answers in a dialogue that goes on: tokens that get no loss.

    Attributes:
        token_ids: [M] appended after the completion, e.g. a tool's reply with the template's
            markers.
    """

    token_ids: Int32


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rollout so far, as an environment sees it: completions and observations alternate.

    Attributes:
        prompt: where it started.
        completion_texts: decoded completions, for grading only; they are never encoded again.
        finish_reason: of the last completion.
    """

    prompt: Prompt
    completion_texts: tuple[str, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample: prompt, then completions and observations, as the ids that were really
    sampled.

    All arrays are [L], L = prompt + everything after it, and position i speaks of token i.

    >>> rollout = Rollout("g0/0", "g0", np.array([1, 2, 3], np.int32), np.array([False, False,
    True]), ...     np.array([0, 0, -0.5], np.float32), np.array([-1, -1, 4], np.int32), 2,
    Reward(1.0), "stop", seed=7)
    >>> rollout.num_trained_tokens, rollout.oldest_version
    (1, 4)

    Attributes:
        token_ids: ids.
        loss_mask: True where the policy sampled the token; False on prompt and observations.
        behavior_logprobs: see Completion; 0 where loss_mask is False.
        versions: weight version per token; -1 where loss_mask is False.
        prompt_tokens: number of leading prompt tokens.
        reward: grade of the whole rollout.
        finish_reason: of the last completion.
        seed: sampling seed of the first completion.
        generate_s: seconds from submission to the last token.
        reference_logprobs: the frozen model's, like behavior_logprobs; None if it was not asked.
    """

    rollout_id: str
    group_id: str
    token_ids: Int32
    loss_mask: Bool
    behavior_logprobs: Float32
    versions: Int32
    prompt_tokens: int
    reward: Reward
    finish_reason: FinishReason
    seed: int
    text: str = ""
    generate_s: float = 0.0
    reference_logprobs: Float32 | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        scored = n if self.reference_logprobs is None else len(self.reference_logprobs)
        if not (
            len(self.loss_mask) == len(self.behavior_logprobs) == len(self.versions) == scored == n
        ):
            raise RolloutError(
                f"rollout {self.rollout_id}",
                "per-token arrays differ in length",
                found=(n, len(self.loss_mask), len(self.behavior_logprobs), len(self.versions)),
                remedy="this is a fault of the collector; report it",
            )
        if self.prompt_tokens < 1 or bool(self.loss_mask[: self.prompt_tokens].any()):
            raise RolloutError(
                f"rollout {self.rollout_id}",
                "needs a prompt of at least one token, none of which is trained",
                found=self.prompt_tokens,
                remedy="this is a fault of the collector; report it",
            )
        if bool((self.versions[self.loss_mask] < 0).any()):
            raise RolloutError(
                f"rollout {self.rollout_id}",
                "has sampled tokens without a weight version",
                remedy="tokens of unknown weights are refused as training data",
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Smallest weight version of a sampled token, -1 when nothing was sampled."""
        versions = self.versions[self.loss_mask]
        return int(versions.min()) if len(versions) else -1


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A rollout that is not finished: what came after its prompt so far. Arrays are [M], M >= 0.

    Attributes:
        index: place in its group.
        texts: of the turns that are over.
        turn_start: where in the arrays the turn that goes on begins.
        requests: generation requests that were answered; the next one's seed comes from it.
        generate_s: seconds spent on it.
    """

    index: int
    token_ids: Int32
    loss_mask: Bool
    behavior_logprobs: Float32
    versions: Int32
    texts: tuple[str, ...] = ()
    turn_start: int = 0
    requests: int = 0
    generate_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """Smallest weight version of a sampled token, -1 when nothing was sampled."""
        versions = self.versions[self.loss_mask]
        return int(versions.min()) if len(versions) else -1


@dataclass(frozen=True, slots=True)
class StartedGroup:
    """What there is of a group that no step has taken; whole once all its rollouts are done.

    Attributes:
        position: of its prompt in the run's sequence of prompts.
        attempt: how often it was begun anew.
        done: finished rollouts, in any order.
        partial: the others, as far as anything is known of them.
    """

    position: int
    attempt: int
    done: tuple[Rollout, ...] = ()
    partial: tuple[PartialRollout, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The G rollouts of one prompt; made in one place (the collector), complete from birth."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    metadata: str = field(default="{}")

    def __post_init__(self) -> None:
        strays = [r.rollout_id for r in self.rollouts if r.group_id != self.group_id]
        if strays or not self.rollouts:
            raise RolloutError(
                f"group {self.group_id}",
                "holds rollouts of another group, or none",
                found=strays,
                remedy="join rollouts by group id",
            )

    @property
    def rewards(self) -> Float32:
        """[G] reward values."""
        return np.array([r.reward.value for r in self.rollouts], np.float32)
