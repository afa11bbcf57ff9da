"""Ctrl-C where Python alone can't bear it: within an import, swallowed by a callback, and during a long call."""

import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, {handler})
from dreamer_jax.cli import interrupts
interrupts.PATIENCE = 0.2
interrupts.prepare()
def press(*seconds):
    def later():
        for each in seconds:
            time.sleep(each)
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=later, daemon=True).start()
"""
SWALLOWED = """
class Callback:
    def __del__(self):
        press(0)
        time.sleep(0.5)
try:
    Callback()
    time.sleep(60)
except KeyboardInterrupt:
    print("came again")
"""
LONG_CALL = """
import hashlib
press(0.1, 0.1)
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""


def outcome(script: str, handler: str = "signal.default_int_handler") -> tuple[int, str, str]:
    """Exit code, output and errors of a process."""
    words = [sys.executable, "-c", START.format(handler=handler) + script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_within_an_import(tmp_path):
    (tmp_path / "extension.py").write_text(
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    raise ImportError('broken')\n"
    )
    found = outcome(f"sys.path.insert(0, {str(tmp_path)!r})\npress(0.2)\nimport extension")
    assert found == (130, "", "dreamer: interrupted\n")


def test_one_that_is_swallowed_comes_again():
    assert outcome(SWALLOWED) == (0, "came again\n", "")


def test_the_second_ends_a_call_that_knows_no_signals():
    assert outcome(LONG_CALL) == (130, "", "dreamer: interrupted\n")


def test_those_that_are_noticed_do_not_add_up():
    """As in a chat, whose answers it stops, time and again."""
    answer = "try:\n    press(0.1)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass\n"
    assert outcome(f"{answer * 4}time.sleep(0.5)\nprint('still here')") == (0, "still here\n", "")


def test_nor_where_they_are_counted_late():
    """The thread that counts has to wait for its turn, and may meet several at once that have been noticed long ago."""
    late = "interrupts.select.select = lambda *_: time.sleep(0.5)\n"
    answer = "try:\n    press(0.1)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass\n"
    assert outcome(f"{late}{answer * 4}time.sleep(1)\nprint('still here')") == (0, "still here\n", "")


def test_everywhere_else_it_is_pythons_own():
    code, said, _ = outcome("press(0.1)\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('caught')")
    assert (code, said) == (0, "caught\n")


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: None"])
def test_who_has_an_idea_of_their_own_keeps_it(handler):
    code, said, _ = outcome("press(0.1)\ntime.sleep(0.4)\nprint(repr(signal.getsignal(signal.SIGINT)))", handler)
    assert code == 0 and ("SIG_IGN" in said or "lambda" in said)
