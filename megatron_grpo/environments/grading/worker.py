"""A grading process: `python -m megatron_grpo.environments.grading.worker SETTINGS`.

    nursery (imports math-verify once) --fork--> child: reads requests, writes verdicts
       ^                                            | ends: limit hit, crash, or recycled
       +----------- says how it ended, forks the next one

The nursery never touches what a model wrote. The child may be killed by the kernel at any moment:
by SIGPROF after `cpu_s` seconds of processor time on one item (so the limit does not depend on how
busy the machine is), or for its memory. Requests and replies are JSON lines on standard input and
output; one request at a time.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys

from megatron_grpo.environments.grading import mathematics
from megatron_grpo.environments.grading.grade import judge

# What grading never needs. Python asks before it does any of these.
_FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "shutil.",
    "ctypes.dlopen",
    "urllib.",
    "ftplib.",
    "http.",
    "smtplib.",
)
_WARM_UP = (
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{3}{2\sqrt{3}}"),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2"),
    (r"\boxed{2x - y + 1 = 0}", r"y = 2x + 1"),
    (r"\boxed{3+4i}", r"4i+3"),
    (r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}", "-2"),
    (r"\boxed{\sin^2 x + \cos^2 x + \log_2 8}", "4"),
    (r"\boxed{\binom{5}{2} + 3! + |{-1}|}", "17"),
    (r"\boxed{x \ne 3}", r"x \neq 3"),
)


def serve(settings: dict[str, int], replies: int) -> None:
    """Answer requests from standard input until it ends or enough were answered."""
    _confine(settings)
    for _ in range(settings["recycle"]):
        line = _read_line()
        if not line:
            return
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_ms"] / 1000)
        reply = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, (json.dumps(reply) + "\n").encode())
        if "memory" in reply:
            return


def _answer(request: dict[str, str]) -> dict[str, object]:
    try:
        verdict = judge(request["response"], request["answer"], mathematics.equal)
    except MemoryError:
        return {"memory": True}
    except RecursionError:
        return {"reward": 0.0, "reason": "nested too deeply", "extracted": ""}
    except Exception as error:  # noqa: BLE001 - reported as a crash with its name, never hidden
        return {"reward": 0.0, "reason": "crash", "extracted": "", "detail": repr(error)[:300]}
    return {"reward": verdict.reward, "reason": verdict.reason, "extracted": verdict.extracted}


def _read_line() -> bytes:
    """Unbuffered, so that a child that dies takes no request with it but its own."""
    chunks: list[bytes] = []
    while True:
        chunk = os.read(0, 1 << 16)
        chunks.append(chunk)
        if not chunk or chunk.endswith(b"\n"):
            return b"".join(chunks)


def _confine(settings: dict[str, int]) -> None:
    memory = settings["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"{event} while grading")
        if event == "open" and isinstance(arguments[1], str) and arguments[1] not in ("r", "rb"):
            raise PermissionError("opening a file to write while grading")

    sys.addaudithook(refuse)


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a library prints is no reply
    mathematics.quiet()
    for response, answer in _WARM_UP:
        judge(response, answer, mathematics.equal)
    while True:
        child = os.fork()
        if child == 0:
            try:
                os.write(replies, b'{"ready": true}\n')
                serve(settings, replies)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        if _input_is_closed():
            return
        os.write(replies, (json.dumps({"ended": ended}) + "\n").encode())


def _input_is_closed() -> bool:
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poller.poll(0))


if __name__ == "__main__":
    main()
