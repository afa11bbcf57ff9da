"""The launcher against a cloud that preempts, refuses and drops at every moment: finished or said why, nothing left."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import signal
import subprocess
import sys
import tarfile

import fake_gcloud
import pytest
from fake_gcloud import LauncherKilled, World

from dreamer_jax.launching import archive, cli
from dreamer_jax.launching.cloud import Answer, run_command
from dreamer_jax.launching.machine import LOG_LINES
from dreamer_jax.launching.state import Store

MACHINE = ["--tpu", "v5e-8", "--zone", "us-west4-a", "--project", "my-project", "--spot"]
MACHINE += ["--config", "quickstart", "--run-dir", "gs://bucket/runs/demo"]
CREATE = ["create", "demo", *MACHINE]
RUN = ["run", "demo", *MACHINE, "--", "--training.steps", "40"]
HOSTS = 2
pytestmark = pytest.mark.usefixtures("quick")


def launch(world, words=RUN) -> int:
    return cli.main(words, runner=world)


def number_of_calls() -> int:
    world = World(hosts=HOSTS)
    assert launch(world) == 0
    return len(world.data["calls"])


def check_end(world, code: int, err: str) -> None:
    """Finished with nothing left, or a message; and if something is left it is named and can be deleted."""
    if code == 0:
        assert world.data["bucket"] == 40 and world.left == []
    assert world.data["steps"] == sorted(set(world.data["steps"])), "a step was trained twice"
    assert code in (0, 1, 2), err
    assert code == 0 or "launch/tpu" in err
    if world.left or Store().names():
        assert "launch/tpu delete demo" in err
        world.data["faults"].clear()
        assert launch(world, ["delete", "demo"]) == 0
    assert world.left == []
    assert Store().names() == []


def test_a_run_without_faults_is_finished_and_deleted(capsys):
    world = World(hosts=HOSTS)
    assert launch(world) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["resumed from checkpoint 0"] + [f"step {n}/40" for n in (10, 20, 30, 40)]
    assert "nothing of demo is left in the cloud" in printed.err
    create = next(words for words in world.data["calls"] if words[4] == "create")
    assert "--accelerator-type=v5litepod-8" in create and "--spot" in create and "--project=my-project" in create
    assert world.data["attempts"] == [
        ["train", "quickstart", "--run.dir", "gs://bucket/runs/demo", "--training.steps", "40"]
    ]
    check_end(world, 0, "")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_preemption_at_every_moment(after, capsys):
    for call in range(number_of_calls()):
        world = World(hosts=HOSTS, faults=[{"at": call, "do": "preempt", "after": after}])
        code = launch(world)
        assert code == 0, f"call {call}: {capsys.readouterr().err}"
        check_end(world, code, capsys.readouterr().err)


def test_many_preemptions_in_one_run(capsys):
    faults = [{"at": call, "do": "preempt"} for call in (3, 11, 25, 39, 52, 66, 80, 94)]
    world = World(hosts=HOSTS, target=40, faults=faults)
    assert launch(world) == 0
    assert world.data["made"] > 4
    check_end(world, 0, capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["passing", "network", "drop", "hang"])
@pytest.mark.parametrize("after", [False, True], ids=["unsent", "answer lost"])
def test_a_passing_fault_at_every_moment(kind, after, capsys):
    for call in range(number_of_calls()):
        world = World(hosts=HOSTS, faults=[{"at": call, "do": kind, "after": after}])
        code = launch(world)
        err = capsys.readouterr().err
        if kind != "drop":  # which the API never says
            assert code == 0, f"call {call}: {err}"
        check_end(world, code, err)


@pytest.mark.parametrize("kind", ["quota", "permission", "login", "invalid", "broken", "vanish", "reboot"])
def test_a_refusal_at_every_moment(kind, capsys):
    for call in range(number_of_calls()):
        world = World(hosts=HOSTS, faults=[{"at": call, "do": kind}])
        code = launch(world)
        check_end(world, code, capsys.readouterr().err)


def test_an_outage_of_the_launchers_network_at_every_moment(capsys):
    asked = 2  # calls until the machine is asked for
    for call in range(asked, number_of_calls()):
        world = World(hosts=HOSTS, faults=[{"at": later, "do": "network"} for later in range(call, call + 14)])
        code = launch(world)
        err = capsys.readouterr().err
        assert code == 0 and world.data["made"] == 1, f"call {call}: {err}"
        check_end(world, code, err)


@pytest.mark.slow_but("passing", "login")
@pytest.mark.parametrize("kind", ["permission", "login", "quota", "passing"])
def test_a_refusal_from_some_moment_on(kind, capsys):
    for call in range(number_of_calls()):
        faults = [{"at": later, "do": kind} for later in range(call, call + 4000)]
        world = World(hosts=HOSTS, faults=faults)
        code = launch(world)
        assert code != 0
        check_end(world, code, capsys.readouterr().err)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_killed_launcher_goes_on_where_it_was(after, capsys):
    for call in range(number_of_calls()):
        world = World(hosts=HOSTS, faults=[{"at": call, "do": "kill", "after": after}])
        with pytest.raises(fake_gcloud.LauncherKilled):
            launch(world)
        capsys.readouterr()
        if world.left:
            assert Store().names() == ["demo"], f"call {call}: an orphan"
        assert launch(world) == 0, f"call {call}: {capsys.readouterr().err}"
        assert len(world.data["attempts"]) <= 2
        check_end(world, 0, capsys.readouterr().err)


@pytest.mark.parametrize("code", [75, 137, 139])
def test_workers_that_ask_for_it_are_started_again(code, capsys):
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "skip": 2, "do": f"exit:{code}"}])
    assert launch(world) == 0
    assert len(world.data["attempts"]) == 2 and world.data["made"] == 1
    check_end(world, 0, capsys.readouterr().err)


def test_maintenance_is_waited_out(capsys):
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "skip": 2, "do": "maintenance"}])
    assert launch(world) == 0
    assert "TPU VM demo: under maintenance" in capsys.readouterr().err
    assert len(world.data["attempts"]) == 2 and world.data["made"] == 1


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_defect_or_a_wrong_setting_or_an_interrupt_is_not_tried_again(code, capsys):
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "skip": 2, "do": f"exit:{code}"}])
    assert launch(world) == 1
    err = capsys.readouterr().err
    assert f"exit code {code} on worker 0" in err and "nothing of demo is left" in err
    assert len(world.data["attempts"]) == 1
    check_end(world, 1, err)


def test_attempts_that_end_at_once_are_given_up(capsys):
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "do": "exit:139", "always": True}])
    assert launch(world) == 1
    err = capsys.readouterr().err
    assert "giving up: 3 attempts in a row" in err and len(world.data["attempts"]) == 3
    check_end(world, 1, err)


def test_an_attempt_that_lasts_begins_the_count_anew(capsys, monkeypatch):
    seconds = itertools.accumulate(itertools.chain.from_iterable((0, each) for each in (1, 1, 600, 1, 1, 1)))
    monkeypatch.setattr(cli, "Supervisor", functools.partial(cli.Supervisor, clock=lambda: next(seconds)))
    # Of each attempt two looks: before the workers are started, and after.
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "do": "exit:139"} for _ in range(2 * 5)])
    assert launch(world) == 0, capsys.readouterr().err
    assert len(world.data["attempts"]) == 6
    check_end(world, 0, "")


def test_a_request_that_cant_be_read_yet_is_waited_for(capsys):
    """The first look is from before the request."""
    faults = [{"on": "queued-resources describe", "skip": 1, "do": "unreadable"} for _ in range(3)]
    world = World(hosts=HOSTS, faults=faults)
    assert launch(world) == 0, capsys.readouterr().err
    assert world.data["made"] == 1 and all(fault["done"] for fault in faults)
    check_end(world, 0, "")


@pytest.mark.parametrize(("code", "made"), [(8, 1), (13, 3)], ids=["quota", "internal"])
def test_a_request_that_fails_late_is_deleted(code, made, capsys):
    fault = {"on": "queued-resources describe", "skip": 3, "do": f"fail:{code}"}
    world = World(hosts=HOSTS, faults=[fault | {"always": True}])
    assert launch(world) in (1, 2)
    err = capsys.readouterr().err
    assert ("Quota limit" in err) == (code == 8)
    assert world.data["made"] == made
    check_end(world, 2, err)


def test_a_node_that_its_queued_resource_leaves_behind_is_deleted():
    world = World(hosts=HOSTS)
    world.data["leaves_node"] = True
    assert launch(world) == 0 and world.left == []


def test_someone_elses_resource_is_left_alone(capsys):
    world = World(hosts=HOSTS)
    other = "gcloud compute tpus queued-resources create demo --node-id=demo --accelerator-type=v4-8 --zone=z"
    world.answer([*other.split(), "--runtime-version=x"])
    assert launch(world) == 2
    assert "that this launcher didn't make" in capsys.readouterr().err
    assert list(world.data["resources"]) == ["demo"] and Store().names() == []
    assert launch(world, ["delete", "demo"]) == 2
    assert list(world.data["resources"]) == ["demo"]


def test_a_resource_that_appears_under_the_same_name_is_left_alone(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, CREATE) == 0
    world.data["resources"]["demo"]["flags"]["--labels"] = "dreamer-launch=another"
    assert launch(world) == 2
    assert "didn't make" in capsys.readouterr().err and world.left


def test_create_then_run_then_nothing_left(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, CREATE) == 0
    err = capsys.readouterr().err
    assert "costs money" in err and "launch/tpu delete demo" in err
    assert launch(world, ["status", "demo"]) == 0
    assert "queued resource: ACTIVE" in capsys.readouterr().out
    calls = len(world.data["calls"])
    assert launch(world, ["run", "demo", "--", "--training.steps", "40"]) == 0
    assert not any("install" in " ".join(words) for words in world.data["calls"][calls:])
    check_end(world, 0, "")


def test_another_machine_under_the_same_name_is_refused(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, CREATE) == 0
    assert launch(world, ["run", "demo", "--tpu", "v5e-16"]) == 2
    assert "exists with tpu 'v5e-8'; delete it first" in capsys.readouterr().err


class Elsewhere:
    """A runner that gives a command to the launcher from another terminal while it runs one."""

    def __init__(self, world, at: int, words: list[str]):
        self.world, self.at, self.words = world, at, words

    def __call__(self, words, seconds):
        self.at -= 1
        if self.at == 0:
            self.code = cli.main(self.words, runner=self.world)
        return self.world(words, seconds)


@pytest.mark.parametrize("at", [3, 8, 12, 16])
def test_delete_from_another_terminal_ends_the_supervisor(at, capsys):
    world = World(hosts=HOSTS)
    elsewhere = Elsewhere(world, at, ["delete", "demo"])
    code = cli.main(RUN, runner=elsewhere)
    assert elsewhere.code == 0 and code in (0, 2)
    assert world.left == [] and Store().names() == [], capsys.readouterr().err
    assert world.data["made"] == 1


def test_stop_from_another_terminal_saves_and_keeps_the_machine(capsys):
    world = World(hosts=HOSTS)
    assert cli.main(RUN, runner=Elsewhere(world, 18, ["stop", "demo"])) == 0
    assert "is to be stopped; this launcher ends" in capsys.readouterr().err
    assert world.left and {w["code"] for w in world.data["nodes"]["demo"]["workers"]} == {75}
    assert launch(world, ["run", "demo"]) == 0
    assert len(world.data["attempts"]) == 2
    check_end(world, 0, "")


def test_a_training_that_had_to_be_killed_is_not_said_to_be_saved(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, CREATE) == 0

    def killing(words, seconds):
        answer = world(words, seconds)
        return dataclasses.replace(answer, err=cli.KILLED) if "--command=bash worker.sh stop" in words else answer

    assert cli.main(["stop", "demo"], runner=killing) == 0
    err = capsys.readouterr().err
    assert "killed, since it didn't end" in err and "saved" not in err
    assert cli.KILLED in (cli.ROOT / "launch/worker.sh").read_text()


def test_a_second_supervisor_is_refused(capsys):
    world = World(hosts=HOSTS)
    elsewhere = Elsewhere(world, 16, ["run", "demo"])
    assert cli.main(RUN, runner=elsewhere) == 0
    assert elsewhere.code == 2 and "already runs demo" in capsys.readouterr().err
    assert len(world.data["attempts"]) == 1


def test_workers_that_stay_silent_cost_the_machine(capsys):
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "skip": 2, "do": "drop", "always": True}])
    assert launch(world) == 1
    err = capsys.readouterr().err
    assert "2 of 2 workers do not answer" in err and "giving up" in err
    check_end(world, 1, err)


def test_keep_leaves_the_machine_and_says_so(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, [RUN[0], RUN[1], "--keep", *RUN[2:]]) == 0
    assert world.left and "exists in us-west4-a and costs money" in capsys.readouterr().err
    assert launch(world, ["delete", "demo"]) == 0
    assert world.left == [] and Store().names() == []


def test_a_delete_that_is_refused_names_the_resource_and_the_command(capsys):
    world = World(hosts=HOSTS, faults=[{"on": "queued-resources delete", "do": "permission", "always": True}])
    assert launch(world) == 2
    err = capsys.readouterr().err
    assert "gcloud compute tpus queued-resources delete demo --force --zone=us-west4-a --project=my-project" in err
    assert world.left and Store().names() == ["demo"]


def test_new_words_for_the_training_start_a_new_attempt():
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh status", "skip": 3, "do": "kill"}])
    with pytest.raises(fake_gcloud.LauncherKilled):
        launch(world)
    assert launch(world, ["run", "demo", "--", "--training.steps", "40", "--checkpoint.every", "5"]) == 0
    assert [words[-1] for words in world.data["attempts"]] == ["40", "5"]


def test_logs_and_an_unreadable_entry(quick, capsys):
    world = World(hosts=HOSTS)
    assert launch(world, [RUN[0], RUN[1], "--keep", *RUN[2:]]) == 0
    capsys.readouterr()
    assert launch(world, ["logs", "demo", "--no-follow"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "step 40/40"
    assert (quick / "demo.log").read_text().splitlines()[-1] == "step 40/40"
    entry = quick / "demo.json"
    assert json.loads(entry.read_text())["phase"] == "seen"
    entry.write_text("{")
    assert launch(world, ["delete", "demo"]) == 2
    assert "queued-resources list" in capsys.readouterr().err and world.left


def test_logs_are_whole_though_a_worker_gives_so_many_lines_at_once(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, [RUN[0], RUN[1], "--keep", *RUN[2:]]) == 0
    world.data["nodes"]["demo"]["workers"][0]["log"] = lines = [f"step {i}" for i in range(2 * LOG_LINES + 1)]
    capsys.readouterr()
    assert launch(world, ["logs", "demo", "--no-follow"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_logs_say_that_a_worker_cant_be_reached(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, [RUN[0], RUN[1], "--keep", *RUN[2:]]) == 0
    world.data["faults"] = [{"on": "tpu-vm ssh log", "do": "drop"}]
    capsys.readouterr()
    assert launch(world, ["logs", "demo", "--no-follow"]) == 2
    assert "could not read the log of worker 0" in capsys.readouterr().err


def test_a_disk_that_takes_no_state_gets_a_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DREAMER_LAUNCH_DIR", str(tmp_path / "file"))
    world = World(hosts=HOSTS)
    assert launch(world) == 2 and not world.data["calls"]
    assert "can't keep what this launcher knows" in capsys.readouterr().err


def test_a_disk_that_fills_up_leaves_a_message_and_what_exists(monkeypatch, capsys):
    def full(store, state):
        if state.attempt:
            raise OSError(28, "No space left on device")
        write(store, state)

    write = Store.write
    monkeypatch.setattr(Store, "write", full)
    world = World(hosts=HOSTS)
    assert launch(world) == 2 and world.left
    err = capsys.readouterr().err
    assert "No space left on device" in err and "launch/tpu delete demo" in err


def test_the_state_is_written_before_the_request():
    seen = []

    def runner(words, seconds):
        if words[4] == "create":
            state = Store().read("demo")
            assert state is not None
            seen.append((state.phase, f"--labels=dreamer-launch={state.token}" in words))
        return world(words, seconds)

    world = World(hosts=HOSTS)
    assert cli.main(RUN, runner=runner) == 0
    assert seen == [("asked", True)]


def test_changes_of_two_launchers_to_an_entry_are_both_kept():
    store = Store()
    assert launch(World(hosts=HOSTS), [RUN[0], RUN[1], "--keep", *RUN[2:]]) == 0
    before = store.read("demo")
    assert before is not None
    store.update("demo", wanted="stopped")
    store.update("demo", attempt=7)
    assert store.read("demo") == dataclasses.replace(before, wanted="stopped", attempt=7)


def changed(world, when, change):
    """The world, whose answers to the calls that `when` finds are changed by `change(number, answer)`."""
    numbers = itertools.count()

    def runner(words, seconds):
        answer = world(words, seconds)
        return change(next(numbers), answer) if when(words) else answer

    return runner


def test_half_an_answer_is_asked_for_again(capsys):
    world = World(hosts=HOSTS)

    def cut(number, answer):
        return Answer(0, answer.out[: len(answer.out) // 2], "") if answer.code == 0 and number == 8 else answer

    check_end(world, cli.main(RUN, runner=changed(world, lambda words: words[4] == "describe", cut)), "")
    assert world.data["bucket"] == 40 and "its answer was cut off" in capsys.readouterr().err


def test_a_worker_that_is_silent_once_is_no_reason_to_start_all_anew(capsys):
    """The launcher comes back to a training that runs, and the first connection to a worker drops."""
    world = World(hosts=HOSTS, faults=[{"on": "tpu-vm ssh start", "do": "kill", "after": True}])
    with pytest.raises(LauncherKilled):
        launch(world)
    started = len(world.data["attempts"])

    def drop(number, answer):
        return Answer(1, "", "Connection reset by peer") if number == 0 else answer

    runner = changed(world, lambda words: any("worker.sh status" in word for word in words), drop)
    assert cli.main(["run", "demo"], runner=runner) == 0
    assert len(world.data["attempts"]) == started and "going on with it" in capsys.readouterr().err


def test_a_worker_that_never_ends_is_ended(capsys):
    """The other has, and says that all is well."""
    world = World(hosts=HOSTS)

    def hang(number, answer):
        assert number < 60
        first, *others = answer.out.split("\n")
        if not any("worker.sh stop" in word for call in world.data["calls"] for word in call):
            first = first.replace("state=exited code=0", "state=running code=")
        return Answer(answer.code, "\n".join([first, *others]), answer.err)

    runner = changed(world, lambda words: any("worker.sh status" in word for word in words), hang)
    check_end(world, cli.main(RUN, runner=runner), "")
    assert "some workers have ended and others have not" in capsys.readouterr().err


def test_a_line_of_a_log_is_one_line_whatever_is_in_it():
    """A progress bar's carriage returns end none, nor do bytes that are no text."""
    assert run_command(["printf", r"10%%\r20%%\r30%%\nse\xffcond\n"], 5).out == "10%\r20%\r30%\nse\ufffdcond\n"


def test_an_interrupt_is_one_also_where_the_command_has_just_ended(monkeypatch):
    def communicate(self, **_):
        self.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        run_command(["true"], 5)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(World(hosts=HOSTS), ["status"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_that_cannot_be_read_yet_is_waited_for_and_deleted(capsys):
    world = World(hosts=HOSTS, faults=[{"on": "queued-resources create", "do": "kill", "after": True}])
    with pytest.raises(LauncherKilled):
        launch(world, CREATE)
    world.data["faults"] = [{"on": "queued-resources describe", "do": "unreadable"}]
    assert launch(world, ["delete", "demo"]) == 0 and world.left == []


def test_a_node_without_its_queued_resource_is_deleted(capsys):
    world = World(hosts=HOSTS)

    def lose(number, answer):
        if number == 1:
            world.data["resources"].clear()
        return answer

    runner = changed(world, lambda words: any("worker.sh status" in word for word in words), lose)
    assert cli.main(RUN, runner=runner) == 2 and world.left == []
    assert "someone else deleted it" in capsys.readouterr().err


def test_words_for_the_training_come_behind_the_remembered_ones(capsys):
    world = World(hosts=HOSTS)
    assert launch(world, [*CREATE, "--", "--mesh.data", "8", "--training.steps", "20"]) == 0
    assert launch(world, ["run", "demo", "--", "--training.steps", "40"]) == 0
    assert world.data["attempts"][0][-4:] == ["--mesh.data", "8", "--training.steps", "40"]


def test_a_dry_list_is_the_list(capsys):
    world = World(hosts=HOSTS)
    launch(world, CREATE)
    capsys.readouterr()
    for words in (["status"], ["status", "--dry-run"]):
        assert launch(world, words) == 0 and capsys.readouterr().out == "demo\n"
    launch(world, ["delete", "demo"])


def test_nobody_reads_what_is_printed():
    """As behind `| head`: no error of the disk."""
    code = "import sys; from dreamer_jax.launching.cli import main; sys.exit(main(['status']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_a_configuration_behind_a_link_is_sent_itself(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    configs = tmp_path / "source/dreamer_jax/configs"
    configs.mkdir(parents=True)
    for part in archive.PARTS[1:]:
        (tmp_path / "source" / part).touch()
    (configs / "mine.yaml").symlink_to(tmp_path / "mine.yaml")
    archive.pack(tmp_path / "source", tmp_path / "sent.tar.gz")
    with tarfile.open(tmp_path / "sent.tar.gz") as sent:
        assert sent.extractfile("dreamer_jax/configs/mine.yaml").read() == b"model: {}\n"
