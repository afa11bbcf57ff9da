"""The commands as a person gives them: `bash launch/tpu`, gcloud found on PATH, settings from a file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fake_gcloud import World

from dreamer_jax.errors import UserError
from dreamer_jax.launching.archive import check_configuration, pack
from dreamer_jax.launching.cli import main
from dreamer_jax.launching.cloud import Kind, classify
from dreamer_jax.launching.settings import read_settings
from dreamer_jax.launching.slices import all_slices, slice_of

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
name = "demo"
tpu = "v5e-8"
zone = "us-west4-a"
config = "quickstart"
run_dir = "gs://bucket/runs/demo"
options = ["--training.steps", "40"]
spot = true
"""


@pytest.fixture
def terminal(tmp_path):
    """A shell's environment with the fake gcloud on PATH, and a world."""
    program = tmp_path / "bin" / "gcloud"
    program.parent.mkdir()
    fake = Path(__file__).with_name("fake_gcloud.py")
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -S {fake} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "demo.toml").write_text(SETTINGS)
    world = tmp_path / "world.json"
    World(world, hosts=1, target=20).save()
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "DREAMER_LAUNCH_PACE": "0.02",
        "FAKE_GCLOUD": str(world),
    }

    def launch(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(ROOT / "launch/tpu"), *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch, world


def test_a_preempted_run_from_the_shell(terminal):
    launch, path = terminal
    world = World.load(path)
    world.data["faults"] = [{"on": "tpu-vm ssh install", "do": "preempt"}]
    world.path = path
    world.save()
    process = launch("run", "demo", "--settings", "demo.toml")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines() == ["resumed from checkpoint 0", "step 10/20", "step 20/20"]
    assert "preempted: " in err and err.rstrip().endswith("nothing of demo is left in the cloud")
    world = World.load(path)
    assert world.left == [] and world.data["made"] == 2


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_an_interrupted_launcher_says_what_is_left(terminal, number):
    launch, path = terminal
    World(path, hosts=1, target=10**6).save()
    process = launch("run", "demo", "--settings", "demo.toml")
    assert process.stdout
    while "step 10/" not in process.stdout.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the queued resource demo exists in us-west4-a and costs money" in err and "Traceback" not in err
    done = launch("delete", "demo")
    assert done.wait(120) == 0 and World.load(path).left == []


def test_a_dry_run_prints_what_a_run_does_and_does_nothing(terminal, tmp_path):
    launch, path = terminal
    dry = launch("run", "demo", "--settings", "demo.toml", "--dry-run")
    printed, err = dry.communicate(timeout=120)
    assert dry.returncode == 0, err
    assert World.load(path).data["calls"] == [] and not (tmp_path / ".dreamer").exists()
    World(path, hosts=1, target=10).save()
    assert launch("run", "demo", "--settings", "demo.toml").wait(120) == 0

    def kinds(commands):
        verbs = [
            " ".join(words[3:5]) + " ".join(w.split()[2] for w in words if "worker.sh " in w) for words in commands
        ]
        return list(dict.fromkeys(verbs))

    assert kinds([shlex.split(line) for line in printed.splitlines()]) == kinds(World.load(path).data["calls"])


def test_every_command_has_a_dry_run(terminal):
    launch, path = terminal
    for command in ("create", "run", "logs", "status", "stop", "delete"):
        dry = launch(command, "demo", "--settings", "demo.toml", "--dry-run")
        out, err = dry.communicate(timeout=120)
        assert dry.returncode == 0 and "gcloud compute tpus" in out, err
    assert World.load(path).data["calls"] == []


def test_it_needs_nothing_but_python(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import dreamer_jax.launching.cli, dreamer_jax.launching.gke;"
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'numpy', 'yaml', 'rich', 'tyro')])"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.usefixtures("terminal")
def test_without_gcloud_the_message_says_so(tmp_path):
    for tool in ("bash", "dirname", "env"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / "bin" / "gcloud").unlink()
    done = subprocess.run(
        ["bash", str(ROOT / "launch/tpu"), "run", "demo", "--settings", "demo.toml"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "gcloud is not installed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["create", "run", "logs", "status", "stop", "delete"])
def test_a_name_that_is_a_path_is_refused(tmp_path, monkeypatch, capsys, command):
    """Before it names a file: it would lie outside of the folder of states, or nowhere."""
    monkeypatch.setenv("DREAMER_LAUNCH_DIR", str(tmp_path / "launch"))
    for name in ("runs/first", "../first"):
        assert main([command, name]) == 2
        assert f"the name '{name}' won't do" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tpu": "v5p-100"}, "the number counts TensorCores, two a chip); offered: v5p-8, v5p-16"),
        ({"tpu": "v5e-9"}, "offered: v5litepod-1, v5litepod-4"),
        ({"tpu": "a100"}, "there is no TPU type 'a100'"),
        ({"run_dir": "runs/demo"}, "is not gs://BUCKET/FOLDER ("),
        ({"name": "Demo_1"}, "lower-case letters"),
        ({"spott": True}, "did you mean 'spot'?"),
        ({"spot": "yes"}, "spot is 'yes', which is not of type bool"),
        ({"queue_hours": 0}, "it must be at least 1"),
        ({"config": None}, "missing config"),
        ({"options": ["--run.dir", "x"]}, "give the run directory as run_dir"),
        ({"options": ["--run.dir=x"]}, "give the run directory as run_dir"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(tmp_path, change, message):
    path = tmp_path / "demo.toml"
    (key, value) = next(iter(change.items()))
    lines = [line for line in SETTINGS.splitlines() if not line.startswith(f"{key} =")]
    if value is not None:
        lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as error:
        read_settings(path, {})
    assert message in str(error.value)


def test_the_command_line_goes_before_the_file(tmp_path):
    (tmp_path / "demo.toml").write_text(SETTINGS)
    settings = read_settings(tmp_path / "demo.toml", {"tpu": "v4-32", "spot": False, "zone": None})
    assert (settings.tpu, settings.spot, settings.zone) == ("v4-32", False, "us-west4-a")
    assert settings.training_words()[-2:] == ["--training.steps", "40"]


def test_words_for_training_come_behind_those_of_the_file(tmp_path):
    """Of a key that both have, those given count; what is given nothing for stays."""
    lines = [line for line in SETTINGS.splitlines() if not line.startswith("options")]
    written = ["--mesh.data", "2,2", "--training.steps=40", "--model.depth", "4"]
    (tmp_path / "demo.toml").write_text("\n".join([*lines, f"options = {json.dumps(written)}"]))

    def words(*given):
        return list(read_settings(tmp_path / "demo.toml", {"options": given or None}).options)

    assert words() == written
    assert words("--training.steps", "9") == ["--mesh.data", "2,2", "--model.depth", "4", "--training.steps", "9"]
    assert words("--mesh.data=4") == ["--training.steps=40", "--model.depth", "4", "--mesh.data=4"]
    assert words("--run.seed", "1") == [*written, "--run.seed", "1"]


@pytest.mark.parametrize(
    ("name", "chips", "topology", "hosts", "per_host", "machine"),
    [
        ("v4-8", 4, "2x2x1", 1, 4, "ct4p-hightpu-4t"),
        ("v4-64", 32, "2x4x4", 8, 4, "ct4p-hightpu-4t"),
        ("v5litepod-1", 1, "1x1", 1, 1, "ct5lp-hightpu-1t"),
        ("v5e-8", 8, "2x4", 1, 8, "ct5lp-hightpu-8t"),
        ("v5litepod-16", 16, "4x4", 4, 4, "ct5lp-hightpu-4t"),
        ("v5p-128", 64, "4x4x4", 16, 4, "ct5p-hightpu-4t"),
        ("v5p-4096", 2048, "8x16x16", 512, 4, "ct5p-hightpu-4t"),
        ("v6e-256", 256, "16x16", 64, 4, "ct6e-standard-4t"),
    ],
)
def test_slices_are_those_of_googles_tables(name, chips, topology, hosts, per_host, machine):
    found = slice_of(name)
    assert (found.chips, found.topology, found.hosts, found.chips_per_host) == (chips, topology, hosts, per_host)
    assert found.machine_type == machine


def test_every_slice_has_a_runtime_and_a_machine():
    for found in all_slices():
        assert found.runtime_version and found.node_accelerator and found.hosts * found.chips_per_host == found.chips


def test_the_archive_holds_the_checkout_and_is_the_same_for_the_same_files(tmp_path):
    stamps = {pack(ROOT, tmp_path / name) for name in ("a.tar.gz", "b.tar.gz")}
    assert len(stamps) == 1
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        names = archive.getnames()
    assert {"setup.cfg", "launch/worker.sh", "requirements/test.lock"} <= set(names)
    assert {"dreamer_jax/cli/main.py", "dreamer_jax/configs/quickstart.yaml"} <= set(names)
    assert not any("__pycache__" in name for name in names)
    with pytest.raises(UserError, match="not a checkout"):
        pack(tmp_path, tmp_path / "c.tar.gz")


def test_a_configuration_that_the_workers_dont_get_is_refused(terminal, tmp_path, monkeypatch):
    for found in ("quickstart", "huginn/tiny", "configs/quickstart", "dreamer_jax/configs/quickstart.yaml"):
        check_configuration(ROOT, found)
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.touch()
    (tmp_path / "dreamer_jax").mkdir()
    for root, lost in (
        (ROOT, "mine.yaml"),  # in this folder
        (ROOT, str(mine)),
        (ROOT, "requirements/test.lock"),
        (tmp_path, "mine.yaml"),  # in the checkout, but not packed
        (tmp_path, "dreamer_jax/../mine.yaml"),
    ):
        with pytest.raises(UserError, match=r"don't get this file.* put it.*dreamer_jax/configs and give its name"):
            check_configuration(root, lost)
    with pytest.raises(UserError, match=r"write it from the checkout, dreamer_jax/configs/quickstart.yaml"):
        check_configuration(ROOT, str(ROOT / "dreamer_jax/configs/quickstart.yaml"))
    with pytest.raises(UserError, match=r"no such file.*did you mean 'quickstart'"):
        check_configuration(ROOT, "quickstrat")
    refused = terminal[0]("run", "demo", "--settings", "demo.toml", "--config", str(mine), "--dry-run")
    out, err = refused.communicate(timeout=120)
    assert refused.returncode == 2 and not out and "give its name there, such as mine" in err and "Traceback" not in err


def test_messages_of_gcloud_are_understood():
    said = {
        "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255].": Kind.SSH,
        'ERROR: (gcloud.x) This TPU has terminal state "PREEMPTED", so it cannot be used anymore.': Kind.UNUSABLE,
        "ERROR: (gcloud.x) You do not currently have an active account selected.": Kind.LOGIN,
        "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: x": Kind.LOGIN,
        "ERROR: gcloud crashed (ConnectionError): ('Connection aborted.', OSError())": Kind.PASSING,
        "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota limit 'X' has been exceeded. Limit: 0": Kind.QUOTA,
        "ERROR: (gcloud.x) unrecognized arguments: --acceleratr-type=a": Kind.INVALID,
        "ERROR: something new": Kind.OTHER,
        "ERROR: (gcloud.x) the request exceeds your quota.": Kind.QUOTA,
        "ERROR: (gcloud.x) HttpError 429 returned \"Quota limit 'X' has been exceeded..\"": Kind.QUOTA,
        "ERROR: (gcloud.x) gcloud is not reachable; check your network connection": Kind.PASSING,
        # Names of runs, networks, projects and accounts, which may be any word.
        "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'quota'.": Kind.PERMISSION,
        "ERROR: (gcloud.x) FAILED_PRECONDITION: 'projects/p/queuedResources/quota' has nodes": Kind.PASSING,
        "ERROR: (gcloud.x) INVALID_ARGUMENT: [quota-2] has a wrong version": Kind.INVALID,
        "ERROR: (gcloud.x) something new about 'projects/p/queuedResources/network-2'": Kind.OTHER,
        "ERROR: (gcloud.x) Required 'compute.networks.use' permission, said to network@p.com": Kind.OTHER,
    }
    assert {text: classify(text) for text in said} == said


@pytest.mark.slow
def test_the_real_gcloud_knows_every_flag(terminal, tmp_path):
    """Its parser comes before its login: without an account and without any network it refuses only what is wrong."""
    real = shutil.which("gcloud")
    alone = ["unshare", "--net"]
    if real is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the Google Cloud SDK and the right to cut off the network")
    launch, _ = terminal
    more = ["--network=n", "--subnetwork=s", "--service-account=a@b.c", "--project=my-project"]
    printed, _ = launch("run", "demo", "--settings", "demo.toml", *more, "--dry-run").communicate(timeout=120)
    commands = {shlex.join(shlex.split(line)[3:5]): line for line in printed.splitlines()}
    assert len(commands) == 6
    environment = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path / "sdk")}
    broken = commands["queued-resources create"].replace("--node-id", "--node-di")
    for line, said in [*((line, "active account") for line in commands.values()), (broken, "unrecognized arguments")]:
        done = subprocess.run(
            [*alone, *shlex.split(line)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert said in done.stderr, f"{line}\n{done.stderr}"
