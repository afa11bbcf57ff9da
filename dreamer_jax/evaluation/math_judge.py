"""Whether two mathematical answers are the same, decided by math-verify in a process that is killed when it hangs."""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dreamer_jax.errors import UserError, how_to_install
from dreamer_jax.evaluation.scoring import last_boxed

START_SECONDS = 120.0
"""What loading SymPy may take on a busy machine."""

LONGEST = 4000
"""Characters of an answer that are looked at, its last ones: the matcher that finds formulas in a text is quadratic."""


def require_math_verify() -> None:
    """Raises UserError unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(f"the task math needs the package math-verify; {how_to_install('eval')}")


class MathJudge:
    """Judges answers to MATH; a context manager that owns one process, started when it is first needed.

    Works in any thread and any process. One judgement at a time.

    Args:
        seconds: longest time for one pair; after that the answer is wrong and the process is replaced.

    Raises:
        UserError: math-verify isn't installed.
    """

    def __init__(self, seconds: float = 10.0):
        require_math_verify()
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self.timeouts = 0
        """Pairs that took too long."""

    def __enter__(self) -> MathJudge:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def boxed_is(self, text: str, gold: str) -> bool:
        r"""Whether the last `\boxed` of a text holds the gold answer. A text without one is wrong.

        Args:
            text: what the model wrote.
            gold: the content of the gold solution's last box.
        """
        box = last_boxed(text)
        return box is not None and (_plain(box) == _plain(gold) or self._same(_boxed(gold), _boxed(box)))

    def text_has(self, text: str, gold: str) -> bool:
        """Whether math-verify finds the gold answer in a text, boxed or not, by its own rules of where to look."""
        box = last_boxed(text)
        return (box is not None and _plain(box) == _plain(gold)) or self._same(_boxed(gold), text)

    def _same(self, gold: str, answer: str) -> bool:
        if not answer.strip():
            return False
        process = self._process or self._start()
        request = json.dumps({"gold": gold, "answer": answer[-LONGEST:]})
        try:
            assert process.stdin is not None
            process.stdin.write(request + "\n")
            process.stdin.flush()
            reply = self._reply(self._seconds)
        except OSError:  # it died, say for memory
            reply = {}
        if reply is None:
            self.timeouts += 1
        if not reply:
            self.close()
            return False
        return bool(reply["right"])

    def _start(self) -> subprocess.Popen[str]:
        self._lines = queue.Queue()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
        )
        threading.Thread(target=_read, args=(process.stdout, self._lines), daemon=True).start()
        reply = self._reply(START_SECONDS)
        if not reply or "ready" not in reply:
            self.close()
            raise UserError(f"math-verify can't be started ({reply or 'no answer'}); {how_to_install('eval')}")
        return process

    def _reply(self, seconds: float) -> dict[str, Any] | None:
        """The next line; {} if the process ended, None if it is late."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else {}


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _boxed(content: str) -> str:
    return f"\\boxed{{{content}}}"


def _plain(text: str) -> str:
    return " ".join(text.split())
