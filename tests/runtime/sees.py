"""What an actor sees of the machine; started in actors by test_ray_cluster."""

import os
import socket
import time
from contextlib import suppress


class Sees:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def lookup_s(self) -> float:
        """How long it takes to learn that an address has no name, whatever the name server."""
        started = time.monotonic()
        with suppress(socket.gaierror):
            socket.getnameinfo(("192.0.2.77", 1), 0)
        return time.monotonic() - started
