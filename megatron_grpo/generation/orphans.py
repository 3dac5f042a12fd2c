"""vLLM's own processes end with the process that started them.

vLLM calls `end_with_parent` in each of its processes, as a plugin (see pyproject.toml). An engine
of several workers has a core and workers of its own. They end when told to, and their parent,
killed outright, tells nobody: the core then waited for minutes, holding memory, or a GPU.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess


def end_with_parent() -> None:
    """Nothing in a process that multiprocessing did not start."""
    parent = parent_process()
    if parent is not None:
        name = "ends with its parent"
        threading.Thread(target=_end_after, args=(parent,), name=name, daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)  # nothing to say to anybody: whoever would hear it is gone
