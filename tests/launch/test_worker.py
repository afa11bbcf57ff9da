"""worker.sh itself, in a home folder of its own, with a stand-in for `dreamer`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DREAMER = """#!/usr/bin/env bash
echo "in $PWD: $*"
echo run >>../runs
case $2 in
    quick) exit 0 ;;
    wrong) echo "no such file" >&2; exit 2 ;;
    long) trap 'echo saved; exit 75' TERM; for _ in $(seq 300); do sleep 0.1; done ;;
    deaf) trap '' TERM; sleep 30 ;;
esac
"""


class Worker:
    """One machine of a TPU."""

    def __init__(self, home: Path):
        self.home = home

    def __call__(self, *words: str, **options) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "worker.sh", *words],
            cwd=self.home,
            env=os.environ | {"HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    def status(self) -> dict[str, str]:
        done = self("status")
        assert done.returncode == 0, done.stderr
        pattern = r"dreamer-worker (?P<host>\S+) attempt=(?P<attempt>\d+) state=(?P<state>\w+) code=(?P<code>\d*) "
        match = re.fullmatch(pattern + r"lines=(?P<lines>\d+)\n", done.stdout)
        assert match, done.stdout
        return match.groupdict()

    def wait(self, state: str) -> dict[str, str]:
        for _ in range(100):
            status = self.status()
            if status["state"] == state:
                return status
            time.sleep(0.1)
        raise AssertionError(status)


@pytest.fixture
def worker(tmp_path):
    """A machine that is installed, but for the program itself."""
    shutil.copy(ROOT / "launch/worker.sh", tmp_path / "worker.sh")
    program = tmp_path / "dreamer/venv/bin/dreamer"
    program.parent.mkdir(parents=True)
    (tmp_path / "dreamer/source").mkdir()
    program.write_text(DREAMER)
    program.chmod(0o755)
    machine = Worker(tmp_path)
    yield machine
    machine("stop")


def test_start_runs_once_and_keeps_exit_code_and_log(worker):
    assert worker.status() | {"host": ""} == {"host": "", "attempt": "0", "state": "idle", "code": "", "lines": "0"}
    for _ in range(2):  # the answer to the first may be lost
        assert worker("start", "1", "train", "quick", "--data.prompt", "a 'b' $c").returncode == 0
        status = worker.wait("exited")
    assert (status["code"], status["attempt"], status["lines"]) == ("0", "1", "2")
    assert worker("log", "2").stdout == f"in {worker.home}/dreamer/source: train quick --data.prompt a 'b' $c\n"
    assert worker("start", "2", "train", "wrong").returncode == 0
    assert worker.wait("exited")["code"] == "2"
    assert (worker.home / "dreamer/runs").read_text() == "run\nrun\n"
    assert "no such file" in worker("log", "3").stdout


def test_stop_lets_the_training_save(worker):
    assert worker("start", "3", "train", "long").returncode == 0
    assert worker.status()["state"] == "running"
    assert worker("stop").returncode == 0
    assert worker.wait("exited")["code"] == "75"
    assert "saved" in worker("log", "1").stdout
    assert worker("stop").returncode == 0


def test_a_new_attempt_ends_the_old_one_first(worker):
    assert worker("start", "1", "train", "long").returncode == 0
    assert worker("start", "2", "train", "quick").returncode == 0
    assert worker.wait("exited") | {"host": "", "lines": ""} == {
        "host": "", "attempt": "2", "state": "exited", "code": "0", "lines": "",
    }  # fmt: skip
    assert "saved" in worker("log", "1").stdout


def test_an_attempt_that_had_to_be_killed_leaves_its_exit_code_to_nobody(worker):
    script = worker.home / "worker.sh"
    script.write_text(script.read_text().replace("seq 240", "seq 2"))
    assert worker("start", "1", "train", "deaf").returncode == 0
    worker.wait("running")
    assert "killing it" in worker("start", "2", "train", "long").stderr
    time.sleep(0.5)
    assert worker.status().items() >= {"attempt": "2", "state": "running", "code": ""}.items()


def test_what_prepare_leaves_running_holds_no_lock(worker):
    """As what mounts a bucket does."""
    (worker.home / "dreamer/installed").unlink(missing_ok=True)
    script = worker.home / "worker.sh"
    text = script.read_text()
    begin, end = text.index("    mkdir source\n"), text.index('    if [[ -n "$prepare" ]]')
    script.write_text(text[:begin] + "    mkdir -p source\n" + text[end:])  # nothing is installed
    text = script.read_text().replace("rm -rf installed source venv", "true")
    script.write_text(text)
    assert worker("install", "s", "setsid sleep 20 </dev/null >/dev/null 2>&1 &").returncode == 0
    begun = time.monotonic()
    assert worker("start", "1", "train", "quick").returncode == 0 and time.monotonic() - begun < 10


def test_a_restarted_machine_has_lost_its_attempt(worker):
    assert worker("start", "1", "train", "long").returncode == 0
    (worker.home / "dreamer/boot").write_text("another boot\n")
    assert worker.status()["state"] == "lost"
    pid = int((worker.home / "dreamer/pid").read_text())
    os.kill(pid, 15)


def test_a_killed_training_process_leaves_its_signal(worker):
    assert worker("start", "1", "train", "long").returncode == 0
    os.kill(int((worker.home / "dreamer/pid").read_text()), 9)
    assert worker.wait("exited")["code"] == "137"


def test_install_is_done_once_a_stamp(worker):
    """With a stand-in for pip: what is checked is the order, and that a half-done installation is repeated."""
    shutil.rmtree(worker.home / "dreamer")
    tools = worker.home / "tools"
    tools.mkdir()
    python = tools / "python3.13"
    python.write_text(
        "#!/usr/bin/env bash\n"
        'echo "$*" >>"$HOME/calls"\n'
        'if [[ "$1 $2" == "-m venv" ]]; then\n'
        '    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/dreamer"\n'
        'elif [[ "$*" == *"pip install"* && -e "$HOME/offline" ]]; then\n'
        '    echo "no network" >&2; exit 1\n'
        "fi\n"
    )
    python.chmod(0o755)
    (worker.home / "configs").mkdir()
    subprocess.run(["tar", "-czf", "dreamer.tar.gz", "configs"], cwd=worker.home, check=True)
    os_path = f"{tools}:{os.environ['PATH']}"

    def install(stamp: str, prepare: str = ""):
        return subprocess.run(
            ["bash", "worker.sh", "install", stamp, prepare],
            cwd=worker.home,
            env=os.environ | {"HOME": str(worker.home), "PATH": os_path},
            capture_output=True,
            text=True,
        )

    (worker.home / "offline").touch()
    failed = install("aaa")
    assert failed.returncode == 1 and "no network" in failed.stderr
    (worker.home / "offline").unlink()
    calls = worker.home / "calls"
    for stamp, prepare, again in (
        ("aaa", "", True),
        ("aaa", "", False),
        ("aaa", "touch here", True),
        ("bbb", "", True),
        ("bbb", "touch here\n\n", True),
        ("bbb", "touch here\n\n", False),
    ):
        before = calls.read_text()
        done = install(stamp, prepare)
        assert done.returncode == 0, done.stderr
        assert (calls.read_text() != before) == again
        assert (worker.home / "dreamer/source/here").exists() == bool(prepare)
    assert (
        "-m pip install --quiet --disable-pip-version-check -c source/requirements/test.lock -e source[tpu,gcs]"
        in before
    )
    assert install("ccc", "false").returncode != 0
    assert not (worker.home / "dreamer/installed").exists()
