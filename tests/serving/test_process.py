"""Signals to a server that is a process of its own: what was admitted is finished, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="extra `serve`")

from tests.serving.asking import post

SCRIPT = Path(__file__).with_name("served.py")


@contextlib.contextmanager
def process(pace: float, grace: float, *dies_at: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its address."""
    command = [sys.executable, str(SCRIPT), *map(str, (pace, grace, *dies_at))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ""}) as running:
        assert running.stderr is not None
        try:
            line = running.stderr.readline()
            found = re.fullmatch(r"serving fake at (http://127.0.0.1:\d+)\n", line)
            assert found, line + running.stderr.read()
            yield running, found[1]
        finally:
            running.kill()


def ask(url: str, tokens: int, **fields: object) -> tuple[int, str]:
    """(status, text)."""
    body = json.dumps({"prompt": "x", "max_tokens": tokens} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, url: str, tokens: int, **fields: object):
        super().__init__()
        self.args, self.fields, self.answer = (url, tokens), fields, (0, "")
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = ask(*self.args, **self.fields)
        except (ConnectionError, IncompleteRead, RemoteDisconnected, urllib.error.URLError) as error:
            self.failure = error


def busy(url: str, rows: int) -> None:
    """Wait until so many requests are computed."""
    for _ in range(200):
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            if f"dreamer_rows_busy {rows}\n" in response.read().decode():
                return
        time.sleep(0.02)
    raise AssertionError("the requests never came")


def free(url: str) -> bool:
    """Whether the port can be taken by somebody else."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(url.rpartition(":")[2])))
    return True


def test_sigterm_finishes_what_was_admitted_and_takes_nothing_more():
    with process(0.02, 20) as (running, url):
        whole, streamed = Asking(url, 60), Asking(url, 60, stream=True)
        busy(url, 2)
        running.send_signal(signal.SIGTERM)
        for _ in range(100):
            status, text = ask(url, 1)
            if status == 503:
                break
            time.sleep(0.01)
        assert status == 503 and "stopping" in text
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", timeout=10)
        whole.join()
        streamed.join()
        assert running.wait(10) == 0
        assert running.stderr is not None
        said = running.stderr.read()
    assert whole.answer[0] == 200 and len(json.loads(whole.answer[1])["choices"][0]["text"]) == 60
    assert streamed.answer[1].endswith("data: [DONE]\n\n") and streamed.answer[1].count('"depth"') == 60
    assert "stopping: what was admitted is finished within 20 s" in said and said.endswith("stopped\n")
    assert "Traceback" not in said and free(url)


@pytest.mark.slow
def test_what_takes_longer_than_the_grace_is_cut_off():
    with process(0.05, 0.5) as (running, url):
        whole, streamed = Asking(url, 5000), Asking(url, 5000, stream=True)
        busy(url, 2)
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0
        whole.join()
        streamed.join()
    assert whole.answer[0] == 503 and "couldn't be finished" in whole.answer[1]
    assert streamed.failure is not None, streamed.answer


def ask_on(running, url):
    """One short request after another, also those that are cut off, until the process has ended."""
    while running.poll() is None:
        with contextlib.suppress(OSError, HTTPException):
            post(url, b'{"prompt": "a", "max_tokens": 1}')


@pytest.mark.slow_but("Ctrl-C")
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)], ids=["Ctrl-C", "twice"])
def test_at_once(signals):
    with process(0.05, 60) as (running, url):
        whole, streamed = Asking(url, 5000), Asking(url, 5000, stream=True)
        busy(url, 2)
        others = [threading.Thread(target=ask_on, args=(running, url), daemon=True) for _ in range(3)]
        for each in others:
            each.start()
        for each in signals:
            running.send_signal(each)
            time.sleep(0.3)
        assert running.wait(5) == 130
        assert running.stderr is not None
        said = running.stderr.read()
        whole.join()
        streamed.join()
    assert isinstance(whole.failure, RemoteDisconnected | ConnectionResetError), whole.answer
    assert said.endswith("dreamer: interrupted\n") and "Traceback" not in said and "in a request" not in said
    assert streamed.failure is not None and free(url)


@pytest.mark.slow
def test_kill_leaves_no_port_behind():
    with process(0.05, 60) as (running, url):
        streamed = Asking(url, 5000, stream=True)
        busy(url, 1)
        running.kill()
        running.wait(5)
        streamed.join()
    assert streamed.failure is not None and free(url)


def test_a_server_ends_with_its_engine():
    """Who waits is told, streams break off, pictures end, and the process says in a line that it failed."""
    with process(0.02, 20, 40) as (running, url):
        pictures = urllib.request.urlopen(f"{url}/v1/engine", timeout=20)
        whole, streamed = Asking(url, 5000), Asking(url, 5000, stream=True)
        assert running.wait(4) == 2
        whole.join()
        streamed.join()
        pictures.read()
        assert running.stderr is not None
        said = running.stderr.read()
    assert whole.answer[0] == 500 and "couldn't be finished" in whole.answer[1]
    assert streamed.failure is not None
    assert said.splitlines()[-1].startswith("dreamer: error: the engine has failed; ") and "Traceback" not in said
    assert free(url)
