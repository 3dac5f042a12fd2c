"""Hostile and random responses for the grader, from a seed; as a script, many of them at once:

python tests/grading_strings.py 10000
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

BOMBS = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{2^{10^{10}}+1}",
    r"\boxed{9!!!!!!}",
    r"\boxed{(100000000!)}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{" + "(" * 100_000 + "}",
    r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    r"\boxed{\sum_{i=1}^{10^{12}} i^{i}}",
)
CODE = (
    "__import__('os').system('touch {marker}')",
    r"\text{{__import__('os').system('touch {marker}')}}",
    "().__class__.__mro__",
    "open('/etc/passwd').read()",
    "open('{marker}', 'w')",
    "lambda: 0",
    "eval(compile('1', '', 'eval'))",
    "exec(\"import socket; socket.create_connection(('127.0.0.1', 1))\")",
    r"\input{{/etc/passwd}}",
    r"\write18{{touch {marker}}}",
)
_PIECES = (
    *(r"\frac{", r"\sqrt{", r"\boxed{", r"\text{", r"\left(", r"\right)", r"\begin{pmatrix}"),
    *(r"\end{pmatrix}", r"\sum_{i=1}^{n}", r"\int", r"\pm", r"\cup", r"\in", r"\infty", r"\log_2"),
    *(r"\sin", r"\\", "</think>", "<think>", "####", "answer", "is", "None", "nan", "and", "or"),
    *"^_{}()[],;=<>&$%#@!|~`'01239xynie",
    *("10", "1,000", "0.5", "1e9", "pi", "\u0000", "\u200b", "\u202e", "\U0001f600", "\ud83d"),
    *("\u0661", "\u2212", "\u221e", "\u00bd", "\u00b2"),
)


def hostile(seed: int, count: int, marker: Path, *, bombs: bool) -> list[tuple[str, str]]:
    """(response, answer) pairs: a tenth bombs and code, the rest random sequences of LaTeX pieces
    and characters.
    """
    draw = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    for index in range(count):
        if bombs and index % 100 == 7:
            response = draw.choice(BOMBS)
        elif index % 10 == 3:
            response = r"\boxed{" + draw.choice(CODE).format(marker=marker) + "}"
        elif index % 10 == 5:
            response = "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.randrange(200)))
        else:
            body = " ".join(draw.choices(_PIECES, k=draw.randrange(1, 25)))
            response = draw.choice(("", r"\boxed{", "The answer is ", "$")) + body
            response += draw.choice(("", "}", ".", "$"))
        pairs.append((response, draw.choice(("5", r"\frac{1}{2}", "x^2+1", "(1,2)", "odd"))))
    return pairs


def main(count: int) -> None:
    from megatron_grpo.config.grading import GradingConfig
    from megatron_grpo.environments.grading.pool import GraderPool

    marker = Path("/tmp") / f"pwned-{time.time_ns()}"
    pairs = hostile(1, count, marker, bombs=True)
    started, memory = time.perf_counter(), []
    with GraderPool(GradingConfig(workers=2)) as pool:
        verdicts = []
        for begin in range(0, count, 500):
            verdicts += pool.grade(pairs[begin : begin + 500])
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        after = pool.grade([(r"\boxed{\frac{1}{2}}", "0.5")] * 4)
    print(
        json.dumps(
            {
                "graded": len(verdicts),
                "reasons": dict(Counter(v.reason for v in verdicts)),
                "crashes": sorted({v.detail for v in verdicts if v.reason == "crash"})[:10],
                "slowest_s": max(v.seconds for v in verdicts),
                "code_executed": marker.exists(),
                "right_afterwards": sum(v.reward for v in after),
                "memory_first_and_last_kib": [memory[0], memory[-1]],
                "wall_s": round(time.perf_counter() - started, 1),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
