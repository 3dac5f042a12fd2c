"""What is optimised. The words are those of the papers; docs/algorithms.md has formulas and
citations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from megatron_grpo.config.base import (
    Fraction,
    GivenPath,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Value,
    tag_of,
)
from megatron_grpo.errors import ConfigError

Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"]

# What each paper chose. A key that the config gives as well keeps the config's value.
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "grpo": {
            "baseline": "group_mean",
            "scale": "std",
            "aggregation": "sequence_mean",
            "kl_coefficient": 0.04,
            "kl_estimator": "k3",
            "kl_gradient": "plain",
        },
        "dr_grpo": {"baseline": "group_mean", "scale": "none", "aggregation": "fixed_length"},
        "dapo": {
            "baseline": "group_mean",
            "scale": "std",
            "aggregation": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "zero_spread": "drop",
            "overlong_buffer": 0.2,
        },
        "gspo": {
            "baseline": "group_mean",
            "scale": "std",
            "aggregation": "sequence_mean",
            "ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "cispo": {
            "baseline": "group_mean",
            "scale": "std",
            "aggregation": "token_mean",
            "surrogate": "cispo",
            "clip_low": None,
            "clip_high": 4.0,
        },
        "rloo": {
            "baseline": "leave_one_out",
            "scale": "none",
            "aggregation": "sequence_sum",
            "clip_low": None,
            "clip_high": None,
            "kl_coefficient": 0.03,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
        "reinforce_pp": {
            "baseline": "batch",
            "scale": "std",
            "aggregation": "token_mean",
            "kl_coefficient": 0.01,
            "kl_estimator": "k1",
            "kl_in": "reward",
        },
    }
)


def without_choices(section: Mapping[str, Value]) -> dict[str, Value]:
    """An algorithm section less what presets decide: a preset that comes later (a stage, the
    command line) replaces the choices made before it.
    """
    chosen = {"preset"}.union(*PRESETS.values())
    return {key: value for key, value in section.items() if key not in chosen}


class GrpoConfig(Section):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives, as
    choices that do not depend on each other. `preset` sets those of one paper.
    """

    type: Literal["grpo"] = "grpo"
    preset: Preset | None = None
    """Take the choices of a paper, except where the config says otherwise."""

    # Advantage
    baseline: Literal["group_mean", "leave_one_out", "batch"] = "group_mean"
    """Subtracted from a reward: the group's mean, the mean of the others in the group, or the mean
    over all rollouts of the step.
    """
    scale: Literal["std", "batch_std", "none"] = "std"
    """Divide by the sample standard deviation (n - 1) of the rewards the baseline is taken over, by
    that of all the step's advantages, or not at all (Dr. GRPO).
    """
    zero_spread: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards have advantage 0. keep: their tokens count in the denominator. drop:
    they do not, and get no loss of any kind.
    """
    overlong_buffer: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Last part of sampling.max_new_tokens, as a fraction of it, over which a growing penalty is
    taken from the reward (DAPO); null is off.
    """
    overlong_penalty: PositiveFloat = 1.0
    """Penalty of a response that uses the whole budget."""
    mask_truncated: bool = False
    """Give no loss to rollouts that ran out of tokens (and do not count them in the
    denominator).
    """

    # Surrogate
    surrogate: Literal["clip", "cispo"] = "clip"
    """clip: PPO's minimum of free and clipped objective. cispo: the clipped ratio, without
    gradient, weighs the log-probability, so no token loses its gradient.
    """
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """Ratio of a token; or geometric mean over its sequence (GSPO), with the gradient of the mean
    or of the token's own log-probability.
    """
    clip_low: Fraction | None = 0.2
    clip_high: NonNegativeFloat | None = 0.2
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]; null is no bound on that side."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest ratio that counts against a token of negative advantage, above 1 (Ye et al. 2020,
    arXiv:1912.09729); null is off.
    """
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = (
        "token_mean"
    )
    """token_mean: every token of the step counts the same (DAPO). sequence_mean: every rollout does
    (GRPO). sequence_sum: mean over rollouts of the sum over tokens, over aggregation_constant.
    fixed_length: the same with sampling.max_new_tokens as the constant (Dr. GRPO).
    """
    aggregation_constant: PositiveFloat = 1.0
    """What sequence_sum divides by, in tokens."""

    # Correction of what the generator's log-probabilities differ from the trainer's
    correction: Literal["none", "unbounded", "truncated", "masked", "sequence_mask"] = "none"
    """none: the ratio is policy / generator. unbounded (decoupled PPO), truncated (TIS) and masked
    (IcePop): the ratio is taken to the policy that the step began with, and that policy / generator
    becomes a weight: as it is, cut off at correction_high, or zero outside [correction_low,
    correction_high]. sequence_mask: the ratio stays as under none, and rollouts whose geometric
    mean of it is outside get weight 0.
    """
    correction_low: Fraction = 0.5
    correction_high: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0

    updates_per_step: PositiveInt = 1
    """Optimizer steps per step: its groups are cut into so many equal parts, one update each. The
    clip then bounds how far a step moves, not only how stale its rollouts are.
    """

    # Regularisers
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the frozen reference model; 0 is off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken from the reward before advantages are computed."""
    kl_gradient: Literal["exact", "plain"] = "exact"
    """In the loss: exact has the expected gradient of the divergence, whatever the estimator; plain
    differentiates the estimator as written, as the GRPO paper does.
    """
    reference_path: GivenPath | None = None
    """Hugging Face folder of the frozen model; null is the model that training starts from."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, under the same mask and denominator as the rest."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        chosen = PRESETS.get(str(values.get("preset")), {})
        return {**chosen, **values}

    @model_validator(mode="after")
    def _check(self) -> GrpoConfig:
        self._check_advantage()
        self._check_ratio()
        self._check_kl()
        return self

    def _check_advantage(self) -> None:
        if self.updates_per_step > 1 and (self.baseline == "batch" or self.scale == "batch_std"):
            raise ConfigError(
                "updates_per_step",
                "cuts the step into parts, but statistics over all of its rollouts are asked for",
                found=self.updates_per_step,
                remedy="use a baseline and a scale of the group, or one update",
            )
        if self.baseline == "batch":
            if self.scale == "batch_std":
                raise ConfigError(
                    "scale",
                    "std and batch_std are the same under baseline batch",
                    found=self.scale,
                    remedy="write std",
                )
            if self.zero_spread == "drop":
                raise ConfigError(
                    "zero_spread",
                    "a batch baseline learns from groups of equal rewards too",
                    found=self.zero_spread,
                    remedy="use keep, or a baseline of the group",
                )

    def _check_ratio(self) -> None:
        if self.surrogate == "cispo":
            if self.dual_clip is not None:
                raise ConfigError(
                    "dual_clip",
                    "bounds the minimum of the clip surrogate, which cispo does not take",
                    found=self.dual_clip,
                    remedy="set it to null, or lower clip_high",
                )
            if self.ratio_level != "token":
                raise ConfigError(
                    "ratio_level",
                    "cispo weighs each token by its own ratio",
                    found=self.ratio_level,
                    remedy="use token, or surrogate clip",
                )
        if not self.is_decoupled:
            return
        if self.surrogate == "cispo":
            raise ConfigError(
                "correction",
                "cispo's weight is the same policy / generator ratio, and would count twice",
                found=self.correction,
                remedy="use none or sequence_mask",
            )
        if self.ratio_level != "token":
            raise ConfigError(
                "correction",
                "weighs tokens one by one, and a sequence ratio cannot be weighed in parts",
                found=self.correction,
                remedy="use sequence_mask, or ratio_level token",
            )
        if self.updates_per_step > 1:
            return
        for key, value in (
            ("clip_low", self.clip_low),
            ("clip_high", self.clip_high),
            ("dual_clip", self.dual_clip),
        ):
            if value is not None:
                raise ConfigError(
                    key,
                    f"would never act: under correction {self.correction} the ratio is taken to "
                    "this step's own policy, one update per batch, so it is exactly 1",
                    found=value,
                    remedy="set it to null, or updates_per_step above 1",
                )

    def _check_kl(self) -> None:
        if self.kl_coefficient == 0:
            return
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ConfigError(
                "kl_estimator",
                "in the reward only k1 gives the gradient of the divergence: the policy gradient "
                "of k2 or k3 lacks the gradient of the estimator itself",
                found=self.kl_estimator,
                remedy="use k1, or kl_in loss",
            )
        if self.kl_in == "loss" and self.kl_gradient == "plain" and self.kl_estimator == "k1":
            raise ConfigError(
                "kl_gradient",
                "k1 as a plain loss has an expected gradient of exactly 0, so it would do nothing",
                found=self.kl_gradient,
                remedy="use exact, or kl_in reward",
            )

    @property
    def is_decoupled(self) -> bool:
        """Whether the ratio is taken to the policy that the step began with."""
        return self.correction in ("unbounded", "truncated", "masked")

    @property
    def needs_proximal(self) -> bool:
        """Whether that policy must score the step's batches before the first update."""
        return self.is_decoupled and self.updates_per_step > 1

    @property
    def needs_reference(self) -> bool:
        """Whether rollouts must carry log-probabilities of a frozen model."""
        return self.kl_coefficient > 0


class SftConfig(Section):
    """Supervised fine-tuning: likelihood of the assistant's turns."""

    type: Literal["sft"] = "sft"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token of the step counts the same, or every dialogue does."""

    @property
    def needs_reference(self) -> bool:
        return False


class DpoConfig(Section):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) on pairs."""

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO. ipo: squared distance of the margin to 1 / (2 beta) (Azar et al. 2023,
    arXiv:2310.12036).
    """
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = 0.0
    """Assumed fraction of pairs whose labels are swapped (conservative DPO)."""
    length_normalized: bool = False
    """Log-ratios per token instead of per response."""
    sft_coefficient: NonNegativeFloat = 0.0
    """Weight of the chosen response's negative log-likelihood per token."""
    reference_path: GivenPath | None = None
    """Hugging Face folder of the frozen model; null is the model that training starts from."""

    @model_validator(mode="after")
    def _check(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise ConfigError(
                "label_smoothing",
                "belongs to the sigmoid loss; ipo is bounded without it",
                found=self.label_smoothing,
                remedy="set it to 0, or loss to sigmoid",
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether rollouts must carry log-probabilities of a frozen model."""
        return True


AlgorithmConfig = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[SftConfig, Tag("sft")]
    | Annotated[DpoConfig, Tag("dpo")],
    Discriminator(tag_of("grpo")),
]
