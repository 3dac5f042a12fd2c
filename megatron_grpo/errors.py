"""Every error this project raises on purpose, named after the boundary that was crossed.

Each message says where, the value found, and the remedy, in one line:

>>> print(ConfigError("parallel.tensor", "does not divide 9 attention heads", found=2, remedy="use
1, 3 or 9")) parallel.tensor: does not divide 9 attention heads (found 2); use 1, 3 or 9
"""

from __future__ import annotations

from collections.abc import Sequence


class GrpoError(Exception):
    """Base of all errors below.

    Args:
        where: the config key, file, rank, request or tensor concerned.
        problem: what is wrong, as a clause.
        found: the offending value; left out of the message when it is None.
        remedy: what the reader should do next.
    """

    exit_code = 1

    def __init__(self, where: str, problem: str, *, found: object = None, remedy: str = "") -> None:
        self.where = where
        self.problem = problem
        self.found = found
        self.remedy = remedy
        message = f"{where}: {problem}" if where else problem
        if found is not None:
            message += f" (found {found!r})"
        if remedy:
            message += f"; {remedy}"
        super().__init__(message)

    def seen_at(self, component: str) -> GrpoError:
        """The same error with the process it came from in front."""
        where = f"{component}, {self.where}" if self.where else component
        return type(self)(where, self.problem, found=self.found, remedy=self.remedy)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross Ray actors; the default reduction would lose the keyword arguments.
        return _rebuild, (type(self), self.where, self.problem, self.found, self.remedy)


def _rebuild(
    cls: type[GrpoError], where: str, problem: str, found: object, remedy: str
) -> GrpoError:
    return cls(where, problem, found=found, remedy=remedy)


class ConfigError(GrpoError, ValueError):
    """A config, a command line or a combination of the two that cannot be run.

    A ValueError as well, so that pydantic collects it with the other problems of a config.
    """

    exit_code = 2


class ConfigErrors(ConfigError):
    """Several config errors found at once; shown one per line."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        Exception.__init__(self, "\n".join(str(error) for error in errors))

    def seen_at(self, component: str) -> GrpoError:
        return ConfigErrors([ConfigError(component, str(error)) for error in self.errors])

    def __reduce__(self) -> tuple[object, ...]:
        return ConfigErrors, (self.errors,)


class CheckpointError(GrpoError):
    """A checkpoint, ours or Hugging Face's, that is incomplete, inconsistent or unwritable."""


class RunStopped(GrpoError):
    """A run that was asked to stop and can be resumed: the status tells a scheduler so (EX_TEMPFAIL
    of sysexits.h).
    """

    exit_code = 75


class WeightExchangeError(GrpoError):
    """Weights that did not arrive whole, in time, or under the promised version."""


class RolloutError(GrpoError):
    """A generator or a collector that broke its contract, or ran past its deadline."""


class PolicyError(GrpoError):
    """A training step whose numbers cannot be used; no weight was changed by it."""


class RewardError(GrpoError):
    """A reward function that cannot be loaded or returned something that is not a finite number."""


class ClusterError(GrpoError):
    """Processes, nodes or resources that are missing, dead or late."""
