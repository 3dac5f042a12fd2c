"""The most memory this process held since it was last asked to start counting.

Linux keeps the high-water mark of the resident set and lets a process lower it to the present.
"""

from __future__ import annotations

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


def reset_peak_memory() -> None:
    """Count from here. Where the system does not allow it, the peak is since the process began."""
    if os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text(_RESET_PEAK)


def peak_memory_bytes() -> float:
    """Largest resident set since `reset_peak_memory`, or since the process began; 0 if unknown."""
    if not _STATUS.exists():
        return 0.0
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024.0 * int(fields["VmHWM"].split()[0])
