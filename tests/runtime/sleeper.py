"""An object for `Host` that misbehaves on request."""

import os
import time

from megatron_grpo.errors import WeightExchangeError


class Sleeper:
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise WeightExchangeError("tensor w", "is gone")

    def die(self) -> None:
        os._exit(3)
