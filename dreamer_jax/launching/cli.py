"""`launch/tpu`: create | run | logs | status | stop | delete a run on a Cloud TPU."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.launching.archive import check_configuration
from dreamer_jax.launching.cloud import Cloud, Runner, run_command
from dreamer_jax.launching.machine import Asked, Machine, Preempted
from dreamer_jax.launching.rehearsal import Rehearsal
from dreamer_jax.launching.settings import Settings, behind, check_name, read_settings
from dreamer_jax.launching.state import State, Store
from dreamer_jax.launching.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
OF_THE_MACHINE = ("tpu", "zone", "project", "spot", "network", "subnetwork", "service_account", "runtime_version")
"""Settings that a machine which exists can't change."""
KILLED = "the training did not end in two minutes; killing it"
"""What launch/worker.sh says on stderr."""
EPILOG = """Settings are the keys of a TOML file (--settings) or options; what follows -- goes to `dreamer train`.
What exists in the cloud is remembered in ~/.dreamer/launch (DREAMER_LAUNCH_DIR), so that a second start goes on where
the first one was cut off. Exit codes: 0 done, 1 the training failed, 2 something to mend, 130 interrupted."""


def main(arguments: Sequence[str] | None = None, runner: Runner = run_command) -> int:
    """Run the launcher with these words and return its exit code.

    Args:
        arguments: by default the process's own.
        runner: runs gcloud.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] | None = None
    if "--" in words:
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    options = _parser().parse_args(words)
    if rest is not None:
        options.options = rest
    command: _Command | None = None
    try:
        if options.name is not None:
            check_name(options.name)  # before it names any file
        command = _Command(options, runner)
        return getattr(command, options.command)()
    except Asked as event:
        _say(f"{event}; this launcher ends")
        return 0
    except Preempted as event:
        _say(f"preempted: {event}")
        return 1
    except UserError as error:
        print(f"launch/tpu: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads what is printed, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it would be tried again, at exit
        return 141
    except OSError as error:  # of this machine's disk: what the cloud's commands meet is in their answers
        print(f"launch/tpu: error: can't keep what this launcher knows: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        if command is not None:
            command.farewell()


class _Command:
    """One start of the launcher."""

    def __init__(self, options: argparse.Namespace, runner: Runner):
        self.options, self.name, self.store = options, options.name, Store()
        self.dry = options.dry_run and self.name is not None  # a list asks the cloud nothing
        self.pace = float(os.environ.get("DREAMER_LAUNCH_PACE", "1"))
        self.runner = runner
        if self.dry and self.name is not None:
            real, self.store = self.store, Store(Path(tempfile.mkdtemp(prefix="dreamer-launch-")))
            entry = real.read(self.name)
            if entry is not None:
                self.store.write(entry)
        self.in_charge = False  # only then may the entry be removed: another launcher may work with it

    def create(self) -> int:
        """Ask for the machine, wait for it and install; leaves it there."""
        with self.store.supervising(self.name):
            self.in_charge = True
            machine = self._machine(self._entry())
            try:
                machine.ensure()
                machine.install()
            except Preempted as event:
                machine.remove()
                raise UserError(f"preempted while it was made: {event}; it is deleted, start again") from None
        _say(f"ready: {self.name}; start the training with: launch/tpu run {self.name}")
        return 0

    def run(self) -> int:
        """Create where needed, start the workers, follow and restart them until the run is finished."""
        with self.store.supervising(self.name):
            self.in_charge = True
            machine = self._machine(self._entry())
            log = self.store.directory / f"{self.name}.log"
            return Supervisor(machine, self._show, log, self.options.keep).run()

    def logs(self) -> int:
        """Follow the log of one worker."""
        machine = self._machine(self._existing())
        first, last_problem = 1, ""
        while True:
            lines, problem = machine.read_log(first, self.options.worker)
            first += len(lines)
            for line in lines:
                self._show(line)
            if problem and not self.options.follow:
                raise UserError(f"could not read the log of worker {self.options.worker}: {problem}")
            if self.dry or not self.options.follow:
                return 0
            if not lines and (machine.cloud.describe_node(self.name) or {}).get("state") != "READY":
                return 0
            if problem and problem != last_problem:  # once: connections drop, and come back
                _say(f"could not read the log of worker {self.options.worker}: {problem}; trying again")
            last_problem = problem
            machine.cloud.sleep(5)

    def status(self) -> int:
        """What exists of one run, or of all that are known."""
        if self.name is None:
            names = self.store.names()
            print("\n".join(names) if names else "nothing is known to exist in the cloud", flush=True)
            return 0
        machine = self._machine(self._existing())
        found = machine.cloud.describe(self.name)
        node = machine.cloud.describe_node(self.name)
        print(f"queued resource: {((found or {}).get('state') or {}).get('state', 'none')}")
        print(f"TPU VM: {(node or {}).get('state', 'none')}")
        for report in machine.reports() if node else []:
            code = "" if report.code is None else f", exit code {report.code}"
            print(f"worker {report.worker}: {report.state}{code}, attempt {report.attempt}")
        return 0

    def stop(self) -> int:
        """End the training; the state is saved and the machine stays."""
        machine = self._machine(self._existing())
        self.store.update(self.name, wanted="stopped")
        answer = machine.stop()
        if answer.code != 0:
            raise UserError(f"could not reach every worker of {self.name}; look with: launch/tpu status {self.name}")
        how = "stopped, its state saved"
        if KILLED in answer.err:
            how = "killed, since it didn't end in two minutes; steps after its last checkpoint are lost"
        _say(f"the training of {self.name} is {how}; 'launch/tpu run {self.name}' goes on")
        return 0

    def delete(self) -> int:
        """Delete everything of a run in the cloud but its folder in the bucket."""
        state = self._existing()
        self.store.update(self.name, wanted="deleted")
        self.in_charge = True
        self._machine(state).remove()
        return 0

    def farewell(self) -> None:
        """The last line: what is left in the cloud."""
        if self.dry:
            shutil.rmtree(self.store.directory, ignore_errors=True)
            return
        if self.name is None or self.options.command in ("status", "logs"):
            return
        try:
            state = self.store.read(self.name)
        except UserError:
            return  # which was the error
        if state is None or (state.phase == "absent" and not self.in_charge):
            return
        if state.phase == "absent":
            self.store.forget(self.name)
            _say(f"nothing of {self.name} is left in the cloud")
            return
        there = "may exist" if state.phase in ("asked", "removing") else "exists"
        _say(
            f"the queued resource {self.name} {there} in {state.settings.zone} and costs money; 'launch/tpu run "
            f"{self.name}' goes on with it, 'launch/tpu delete {self.name}' deletes it"
        )

    def _given(self) -> dict[str, Any]:
        fields = [field.name for field in dataclasses.fields(Settings)]
        return {name: getattr(self.options, name, None) for name in fields if name != "name"}

    def _entry(self) -> State:
        """The run's entry, new or as it is, with the settings given now."""
        given = {key: value for key, value in self._given().items() if value is not None}
        state = self.store.read(self.name)
        settings = self._settings(state, given)
        if not settings.zone:
            raise UserError("missing zone; give it as --zone ZONE or in the settings")
        check_configuration(ROOT, settings.config)
        if state is None:
            state = State(settings, token=secrets.token_hex(8))
        else:
            changed = [k for k in OF_THE_MACHINE if getattr(settings, k) != getattr(state.settings, k)]
            if changed:
                was = ", ".join(f"{key} {getattr(state.settings, key)!r}" for key in changed)
                raise UserError(
                    f"{self.name} exists with {was}; delete it first (launch/tpu delete {self.name}), or take "
                    "another name"
                )
        state = dataclasses.replace(state, settings=settings, wanted="running")
        self.store.write(state)
        return state

    def _settings(self, state: State | None, given: dict[str, Any]) -> Settings:
        """What is given now, over what was given when the run was created."""
        if state is not None and self.options.settings is None:  # also: nothing is given
            if given.get("options"):
                given = given | {"options": tuple(behind(state.settings.options, given["options"]))}
            return dataclasses.replace(state.settings, **given)
        return read_settings(self.options.settings, given | {"name": self.name})

    def _existing(self) -> State:
        state = self.store.read(self.name)
        if state is None and self.dry and self.options.settings:
            settings = read_settings(self.options.settings, {"name": self.name})
            state = State(settings, token="", phase="seen")
            self.store.write(state)
        if state is None:
            known = ", ".join(self.store.names()) or "none"
            raise UserError(
                f"this launcher made no run {self.name} that still exists (known: {known}); what the cloud has: "
                "gcloud compute tpus queued-resources list --zone=ZONE"
            )
        return state

    def _machine(self, state: State) -> Machine:
        runner = self.runner
        if self.dry:
            runner = Rehearsal(state.settings, state.phase in ("asked", "seen"), lambda line: print(line, flush=True))
        sleep = (lambda seconds: None) if self.dry else (lambda seconds: time.sleep(seconds * self.pace))
        cloud = Cloud(state.settings.project, state.settings.zone, runner, sleep)
        return Machine(state, self.store, cloud, ROOT, _say)

    @staticmethod
    def _show(line: str) -> None:
        print(line, flush=True)


def _say(line: str) -> None:
    print(f"launch/tpu: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/tpu",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("create", "run", "logs", "status", "stop", "delete"):
        summary = (getattr(_Command, name).__doc__ or "").strip()
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("name", nargs="?" if name == "status" else None, help="name of the run")
        command.add_argument("--dry-run", action="store_true", help="print every command and run none")
        command.add_argument("--settings", type=Path, help="TOML file of settings")
        if name in ("create", "run"):
            add_settings(command)
        if name == "run":
            command.add_argument("--keep", action="store_true", help="leave the machine when the run has ended")
        if name == "logs":
            command.add_argument(
                "--worker", default="0", help="number of the worker (default 0, which writes the most)"
            )
            command.add_argument("--no-follow", dest="follow", action="store_false", help="end after what there is")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for every field of `Settings` but its name and the words for `dreamer train`."""
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        if field.name in ("name", "options"):
            continue
        if str(field.type) == "bool":
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(option, type=int if str(field.type) == "int" else str, default=None)


if __name__ == "__main__":
    sys.exit(main())
