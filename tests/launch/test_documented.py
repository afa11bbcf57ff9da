"""Every command of docs/running.md that starts something in a cloud, in the order of the page, against the fake one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_gcloud import World

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/running.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("bash launch/tpu", "bash launch/gke"))
]
HOSTS = {"pod": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the checkout by links, with the fake gcloud on PATH."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    program = folder / "bin" / "gcloud"
    program.parent.mkdir()
    fake = Path(__file__).with_name("fake_gcloud.py")
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -S {fake} "$@"\n')
    program.chmod(0o755)
    return folder


def test_the_page_has_them():
    assert {line.split()[2] for line in COMMANDS if "launch/tpu" in line} == {
        "create", "run", "logs", "status", "stop", "delete",
    }  # fmt: skip
    assert any("launch/gke/jobset" in line for line in COMMANDS)


def test_the_commands_in_their_order(place):
    path = place / "world.json"
    environment = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "DREAMER_LAUNCH_DIR": str(place / "state"),
        "DREAMER_LAUNCH_PACE": "0.01",
        "FAKE_GCLOUD": str(path),
    }
    name = ""
    for command in COMMANDS:
        words = command.split()
        if len(words) > 3 and words[3] != name:
            name = words[3]
            World(path, hosts=HOSTS.get(name, 1), target=10).save()
        done = subprocess.run(
            ["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        if "launch/tpu" in command:
            world = World.load(path)
            left = "nothing of" not in done.stderr and "--dry-run" not in command and words[2:] != ["status"]
            assert bool(world.left) == left, command
            if words[2] == "run" and "--dry-run" not in command:
                assert "step 10/10" in done.stdout
            if words[2:] == ["status"]:
                assert "nothing is known to exist" in done.stdout
    manifest = yaml.safe_load((place / "jobset.yaml").read_text())
    assert manifest["kind"] == "JobSet"
