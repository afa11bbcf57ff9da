"""The process in which math-verify works: a JSON request a line on stdin, a JSON answer a line on stdout.

SymPy can take forever and all memory over a hostile expression, and math-verify's own timeouts are alarms that only
work in a main thread and can't interrupt C code. A process of its own can simply be killed, see math_judge.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space the process may take."""


def main() -> int:
    """Answer requests `{"gold": text, "answer": text}` with `{"right": bool}` until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not an answer
    _limit_memory()
    try:
        import math_verify
    except ImportError as error:
        print(json.dumps({"missing": error.name or str(error)}), file=answers, flush=True)
        return 1
    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"right": same(math_verify, request["gold"], request["answer"])}), file=answers, flush=True)
    return 0


def same(math_verify: Any, gold: str, answer: str) -> bool:
    """Whether the mathematics in two texts is equal, as math-verify judges; what it can't digest is not."""
    # The process that asks keeps the time.
    try:
        parsed = [math_verify.parse(text, parsing_timeout=None) for text in (gold, answer)]
        return bool(math_verify.verify(parsed[0], parsed[1], timeout_seconds=None))
    except (Exception, RecursionError, MemoryError):
        return False


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
