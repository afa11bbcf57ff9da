"""launch/local.sh with a stand-in for Python: which processes it starts, and what it refuses to start."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def local(tmp_path):
    """The script, run with some words; every process that it starts writes its devices and words to `started`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$XLA_FLAGS $*" >>{tmp_path}/started\n')
    python.chmod(0o755)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHON": str(python), "XLA_FLAGS": ""}
        command = ["bash", str(ROOT / "launch/local.sh"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run, tmp_path / "started"


def test_so_many_processes_with_so_many_devices(local):
    run, started = local
    done = run("-n", "2", "-d", "3", "-r", "0", "--", "train", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    lines = started.read_text().splitlines()
    assert sorted(line.split()[-1] for line in lines) == ["0", "1"]
    assert all("device_count=3 -m dreamer_jax train tiny.yaml " in line and "--processes 2" in line for line in lines)


def test_an_interpreter_that_is_not_there_is_a_mistake():
    """Which no restart would mend."""
    command = ["bash", str(ROOT / "launch/local.sh"), "--", "train", "x"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": "/no/python"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "there is no Python at '/no/python'" in done.stderr


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_reaches_the_processes(tmp_path, presses):
    """Which bash starts with Ctrl-C ignored. The first has them save, as SIGTERM does; the second doesn't wait."""
    python, started, ended = (tmp_path / name for name in ("python", "started", "ended"))
    end_it = f"echo >>{ended}; exit 75" if presses == 1 else ":"
    python.write_text(f"#!/bin/sh\ntrap '{end_it}' TERM\necho >>{started}\nwhile :; do sleep 0.1; done\n")
    python.chmod(0o755)
    command = ["bash", str(ROOT / "launch/local.sh"), "-n", "2", "--", "train", "tiny.yaml"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHON": str(python)}, stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 60
    while not started.exists() or started.stat().st_size < 2:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(60) == 130, process.stderr and process.stderr.read()
    assert ended.exists() == (presses == 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 0 -- train x", "-n and -d need a number, at least 1"),
        ("-n 00 -- train x", "-n and -d need a number, at least 1"),
        ("-n two -- train x", "-n and -d need a number, at least 1"),
        ("-d 0 -- train x", "-n and -d need a number, at least 1"),
        ("-r 08 -- train x", "-r needs a number"),
        ("-r -1 -- train x", "-r needs a number"),
        ("-x -- train x", "unknown option -x"),
        ("-n", "-n needs a number"),
        ("-- eval x", "what is started must be `train`"),
    ],
)
def test_wrong_words_start_nothing_and_get_the_usage(local, words, message):
    run, started = local
    done = run(*words.split())
    assert done.returncode == 2 and done.stderr.startswith(f"local.sh: {message}; usage: "), done.stderr
    assert not started.exists()
