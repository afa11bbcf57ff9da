"""Skipped steps in a row; stop requests from signals and from a metadata server; the watchdog."""

from __future__ import annotations

import http.server
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar
from unittest.mock import Mock

import jax
import pytest
from jax.experimental import multihost_utils

from dreamer_jax.config import Config
from dreamer_jax.errors import RESTART_EXIT_CODE
from dreamer_jax.training import preemption
from dreamer_jax.training.console import Console
from dreamer_jax.training.preemption import StopRequest
from dreamer_jax.training.stability import LAG, SkipCounter, Unstable


def test_skipped_steps_are_counted_late_but_exactly():
    counter = SkipCounter(limit=3)
    flags = [0, 1, 1, 0, 1]
    for step, skipped in enumerate(flags, 1):
        counter.add(step, skipped)
    assert counter.total == sum(flags[:-LAG])
    counter.catch_up()
    assert (counter.total, counter.streak) == (3, 1)


def test_too_many_in_a_row():
    counter = SkipCounter(limit=3, total=5, streak=1)
    with pytest.raises(Unstable) as caught:
        for step in range(10, 20):
            counter.add(step, 1)
    assert caught.value.step == 11, "the streak goes on over a restart"
    assert counter.total == 7


def test_signals_ask_once_and_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(print) as request:
        assert not request.reached()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.reached() and request.exit_code == RESTART_EXIT_CODE
    with StopRequest(print) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.reached() and request.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before


class Metadata(http.server.BaseHTTPRequestHandler):
    """A metadata server; `values` are what it announces."""

    values: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        value = self.values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
        self.send_response(404 if value is None else 200)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "METADATA_SECONDS", 0.05)
    Metadata.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
    yield Metadata.values
    server.shutdown()
    server.server_close()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
        ("preempted", "TRUE"),
        ("upcoming-maintenance", '{"maintenanceStatus": "ONGOING"}'),
    ],
)
def test_maintenance_notices_stop_a_run(key, value, metadata):
    said: list[str] = []
    with StopRequest(said.append) as request:
        assert not eventually(request.reached, 0.3)
        metadata[key] = value
        assert eventually(request.reached)
        assert "about to go away" in said[0]


def test_a_notice_that_was_there_before_stops_nothing(metadata):
    """Else a run that is started again on the same machine would stop after every step."""
    metadata["upcoming-maintenance"] = '{"maintenanceStatus": "ONGOING"}'
    with StopRequest(print) as request:
        assert not eventually(request.reached, 0.3)


@pytest.mark.parametrize(("silence", "code"), [pytest.param(0.2, 0, marks=pytest.mark.slow), (20, RESTART_EXIT_CODE)])
def test_a_process_that_was_stopped_goes_on(silence, code):
    """After Ctrl-Z and `fg` the time in between doesn't count, however long; a standstill after it does."""
    words = [sys.executable, "-c", WATCHED.replace("{silence}", str(silence))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "alive\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        out, error = process.communicate(timeout=15)
    assert process.returncode == code
    assert (out, "nothing was finished" in error) == (("", True) if code else ("end\n", False))


WATCHED = """
import time
from dreamer_jax.training.heartbeat import Heartbeat
with Heartbeat(0.4) as heartbeat:
    for _ in range(6):
        time.sleep(0.1)
        heartbeat.beat()
    with heartbeat.suspended():
        time.sleep(0.8)
    print("alive", flush=True)
    time.sleep({silence})
print("end")
"""


@pytest.mark.parametrize(("silence", "code"), [(0.1, 0), (20, RESTART_EXIT_CODE)])
def test_a_standstill_ends_the_process(silence, code):
    began = time.monotonic()
    words = [sys.executable, "-c", WATCHED.replace("{silence}", str(silence))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "alive" in done.stdout and done.returncode == code
    assert ("nothing was finished" in done.stderr and "most recent call first" in done.stderr) == bool(code)
    assert time.monotonic() - began < 15


def test_several_processes_are_asked_through_jax(monkeypatch, capfd):
    """Also by Ctrl-C at one of them. What jax says of one step holds for those after it: the run may go back there."""
    says, sent = iter([False, True, False]), []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda _: next(says))
    with StopRequest(print) as request:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda _, number: sent.append(number))
            signal.raise_signal(signal.SIGINT)
        assert sent == [signal.SIGTERM] and "Ctrl-C again" in capfd.readouterr().err
        assert [request.reached() for _ in range(3)] == [False, True, True]
        assert request.exit_code == 130


def test_a_reader_that_is_gone_is_no_regular_end(monkeypatch):
    """rich makes of it a SystemExit, which `dreamer` would take for a run that is complete."""
    closed = io.StringIO()
    monkeypatch.setattr(closed, "write", Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(BrokenPipeError):
        Console(Config()).say("step 1")


GOES_ON = """
import sys, time
from dreamer_jax.cli.main import main
from dreamer_jax.data import Data
asked = Data.training_batches
def planning(self, *arguments):
    time.sleep(3)
    yield from asked(self, *arguments)
Data.training_batches = planning
sys.exit(main(["train", "quickstart", "--training.steps=1", "--safety.stuck_seconds=2", "--data.heldout_records=0",
               "--evaluation.harder=0", "--training.batch_size=2", "--run.dir", sys.argv[1]]))
"""


@pytest.mark.slow
def test_to_plan_all_rounds_again_is_no_standstill(tmp_path):
    """What a run that goes on may take before its first step."""
    words = [sys.executable, "-c", GOES_ON, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
