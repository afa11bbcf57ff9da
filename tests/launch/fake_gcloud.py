"""A cloud in one JSON file that answers as gcloud does, and does its worst when told to.

Flags, answers and messages follow gcloud 528 (its own parser checks the commands in test_commands.py). In-process
`World.load(path)` is a runner of the launcher; executed as a program it is a `gcloud` to put on PATH.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

COMMON = {"--zone", "--project", "--quiet", "--format"}
FLAGS = {
    ("queued-resources", "create"): {
        "--node-id", "--accelerator-type", "--runtime-version", "--labels", "--valid-until-duration", "--spot",
        "--network", "--subnetwork", "--service-account", "--scopes",
    },
    ("queued-resources", "describe"): set(),
    ("queued-resources", "delete"): {"--force"},
    ("tpu-vm", "describe"): set(),
    ("tpu-vm", "delete"): set(),
    ("tpu-vm", "ssh"): {"--worker", "--command"},
    ("tpu-vm", "scp"): {"--worker"},
}  # fmt: skip
QUEUE = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
STEPS_A_LOOK = 10
PLACE = "projects/my-project/locations/us-west4-a"
ACCOUNT = (
    "This command is authenticated as me@example.com which is the active account specified by the [core/account] "
    "property"
)


class LauncherKilled(BaseException):
    """Stands for SIGKILL of the launcher in the middle of a command."""


class Refused(Exception):
    """gcloud ends with an error: exit code and message."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class World:
    """The state of the cloud: what exists, what workers do, what lies in the bucket."""

    def __init__(self, path: Path | None = None, hosts: int = 2, target: int = 40, faults: list | None = None):
        self.path = path
        self.data = {
            "hosts": hosts, "target": target, "resources": {}, "nodes": {}, "bucket": 0, "made": 0,
            "calls": [], "steps": [], "faults": faults or [], "attempts": [],
        }  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> World:
        world = cls(path)
        world.data = json.loads(path.read_text())
        return world

    def save(self) -> None:
        if self.path:
            self.path.write_text(json.dumps(self.data))

    @property
    def left(self) -> list[str]:
        """Everything that costs money."""
        return [*self.data["resources"], *self.data["nodes"]]

    # One command.

    def __call__(self, words, seconds=0.0):
        from dreamer_jax.launching.cloud import Answer

        return Answer(*self.answer(list(words)))

    def answer(self, words: list[str]) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of one command."""
        self.data["calls"].append(words)
        name = ".".join(words[1:5])
        fault = self._fault(words)
        kind = fault.get("do", "")
        late = fault.get("after", False)
        try:
            if kind and not late:
                self._strike(kind)
            try:
                out = self._do(words)
            finally:
                if kind and late:
                    self._strike(kind)
            return 0, out, ""
        except Refused as error:
            return error.code, "", f"ERROR: ({name}) {error}\n"
        finally:
            self.save()

    def _fault(self, words: list[str]) -> dict:
        """The fault planned for this call, by its number or by what it is ("tpu-vm ssh install")."""
        call = len(self.data["calls"]) - 1
        what = " ".join(words[3:5])
        command = _flags(words).get("--command", "")
        if command:
            what += " " + shlex.split(command)[2]
        for fault in self.data["faults"]:
            if fault.get("at") == call or (fault.get("on") == what and not fault.get("done")):
                fault["skip"] = fault.get("skip", 0) - 1
                if fault["skip"] < 0:
                    fault["done"] = not fault.get("always", False)
                    return fault
        return {}

    def _strike(self, kind: str) -> None:
        kind, _, detail = kind.partition(":")
        if kind == "preempt":
            for resource in self.data["resources"].values():
                resource["state"] = "SUSPENDING"
            for node in self.data["nodes"].values():
                node["state"] = "PREEMPTED"
        elif kind == "vanish":  # somebody else deletes it
            self.data["resources"].clear()
            self.data["nodes"].clear()
        elif kind == "reboot":
            for node in self.data["nodes"].values():
                for worker in node["workers"]:
                    worker["state"] = "lost" if worker["state"] == "running" else worker["state"]
        elif kind == "maintenance":  # the machine starts anew and is back after some looks
            for node in self.data["nodes"].values():
                node["maintenance"] = 5
            self._strike("reboot")
        elif kind == "exit":  # one worker ends with this code, and so the others with 75
            for node in self.data["nodes"].values():
                for number, worker in enumerate(node["workers"]):
                    if worker["state"] == "running":
                        worker |= {"state": "exited", "code": int(detail) if number == 0 else 75}
        elif kind == "fail":  # the request fails late, with this code of gRPC
            for resource in self.data["resources"].values():
                message = "Quota limit 'TPUV5sPreemptibleLitepod' has been exceeded. Limit: 0 in region us-west4."
                if detail != "8":
                    message = "an internal error occurred"
                resource |= {"state": "FAILED", "error": {"code": int(detail), "message": message}}
            self.data["nodes"].clear()
        elif kind == "kill":
            self.save()
            raise LauncherKilled
        else:
            raise Refused(*ERRORS[kind])

    def _do(self, words: list[str]) -> str:
        if words[:3] != ["gcloud", "compute", "tpus"] or tuple(words[3:5]) not in FLAGS:
            raise Refused(2, f"Invalid choice: '{' '.join(words[1:5])}'.")
        collection, verb = words[3:5]
        flags = _flags(words)
        unknown = set(flags) - COMMON - FLAGS[collection, verb]
        if unknown or "--zone" not in flags:
            raise Refused(2, f"unrecognized arguments: {' '.join(sorted(unknown)) or 'no zone'}")
        plain = [word for word in words[5:] if not word.startswith("--")]
        method = getattr(self, f"_{collection}_{verb}".replace("-", "_"))
        return method(plain, flags)

    # Queued resources.

    def _queued_resources_create(self, plain, flags) -> str:
        name = plain[0]
        if name in self.data["resources"]:
            raise Refused(1, f"ALREADY_EXISTS: Resource '{PLACE}/queuedResources/{name}' already exists. {ACCOUNT}")
        self.data["made"] += 1
        self.data["resources"][name] = {"state": QUEUE[0], "flags": flags, "node": flags["--node-id"]}
        return ""

    def _queued_resources_describe(self, plain, flags) -> str:
        resource = self._find("resources", "queuedResources", plain[0])
        key, value = resource["flags"].get("--labels", "a=b").split("=")
        state = {"state": resource["state"], f"{_camel(resource['state'])}Data": {}}
        if resource["state"] == "FAILED":
            state["failedData"] = {"error": resource["error"]}
        spec = {
            "acceleratorType": resource["flags"]["--accelerator-type"],
            "labels": {key: value},
            "networkConfig": {"enableExternalIps": True, "network": "default"},
            "runtimeVersion": resource["flags"]["--runtime-version"],
            "serviceAccount": {},
        }
        answer = {
            "createTime": "2026-01-01T00:00:00.000000000Z",
            "name": f"{PLACE}/queuedResources/{plain[0]}",
            "state": state,
            "tpu": {"nodeSpec": [{"node": spec, "nodeId": resource["node"], "parent": PLACE}]},
        }
        if "--spot" in resource["flags"]:
            answer["spot"] = {}
        self._advance(plain[0], resource)
        return json.dumps(answer, indent=2)

    def _advance(self, name: str, resource: dict) -> None:
        """Time passes between two looks."""
        state = resource["state"]
        if state in QUEUE[:-1]:
            resource["state"] = QUEUE[QUEUE.index(state) + 1]
            if resource["state"] == "ACTIVE":
                self.data["nodes"][resource["node"]] = {
                    "state": "CREATING",
                    "id": str(1000 + self.data["made"]),
                    "workers": [_worker() for _ in range(self.data["hosts"])],
                }
        elif state == "SUSPENDING":
            resource["state"] = "SUSPENDED"
            self.data["nodes"].pop(resource["node"], None)

    def _queued_resources_delete(self, plain, flags) -> str:
        resource = self._find("resources", "queuedResources", plain[0])
        if resource["state"] == "SUSPENDING":
            raise Refused(1, "FAILED_PRECONDITION: the queued resource is being suspended and can't be deleted now")
        if resource["node"] in self.data["nodes"] and "--force" not in flags:
            raise Refused(1, "FAILED_PRECONDITION: the queued resource has nodes")
        del self.data["resources"][plain[0]]
        if not self.data.get("leaves_node"):
            self.data["nodes"].pop(resource["node"], None)
        return ""

    # Nodes.

    def _tpu_vm_describe(self, plain, flags) -> str:
        node = self._find("nodes", "nodes", plain[0])
        answer = {
            "acceleratorType": "v5litepod-8",
            "createTime": f"2026-01-01T00:00:0{self.data['made']}Z",
            "health": "UNHEALTHY_MAINTENANCE" if node.get("maintenance", 0) > 0 else "HEALTHY",
            "id": node["id"],
            "name": f"{PLACE}/nodes/{plain[0]}",
            "networkEndpoints": [
                {"accessConfig": {"externalIp": f"203.0.113.{i}"}, "ipAddress": f"10.0.0.{i}", "port": 8470}
                for i in range(len(node["workers"]))
            ],
            "state": node["state"],
        }
        if node["state"] == "CREATING":
            node["state"] = "READY"
        node["maintenance"] = node.get("maintenance", 0) - 1
        return json.dumps(answer, indent=2)

    def _tpu_vm_delete(self, plain, flags) -> str:
        self._find("nodes", "nodes", plain[0])
        del self.data["nodes"][plain[0]]
        return ""

    def _tpu_vm_scp(self, plain, flags) -> str:
        *files, target = plain
        name, _, folder = target.partition(":")
        for worker in self._workers(name, flags):
            worker["files"] = [Path(file).name for file in files]
        assert folder == "" and all(Path(file).is_file() for file in files)
        return ""

    def _tpu_vm_ssh(self, plain, flags) -> str:
        program, script, verb, *rest = shlex.split(flags["--command"])
        assert (program, script) == ("bash", "worker.sh")
        workers = self._workers(plain[0], flags)
        if verb == "status":
            self._train()
        return "".join(getattr(self, f"_worker_{verb}")(number, w, rest) for number, w in workers.items())

    def _workers(self, name: str, flags: dict):
        node = self._find("nodes", "nodes", name)
        if node["state"] in ("PREEMPTED", "TERMINATED"):
            raise Refused(1, f'This TPU has terminal state "{node["state"]}", so it cannot be used anymore.')
        if node["state"] != "READY":
            raise Refused(1, f'This TPU has state "{node["state"]}", so it cannot be currently connected to.')
        wanted = flags.get("--worker", "0")
        chosen = {i: w for i, w in enumerate(node["workers"]) if wanted in ("all", str(i))}
        return chosen if "--command" in flags else chosen.values()

    def _find(self, kind: str, collection: str, name: str) -> dict:
        if name not in self.data[kind]:
            raise Refused(1, f"NOT_FOUND: Resource '{PLACE}/{collection}/{name}' was not found. {ACCOUNT}")
        return self.data[kind][name]

    # What worker.sh does.

    def _worker_install(self, number, worker, rest) -> str:
        if set(worker["files"]) != {"dreamer.tar.gz", "worker.sh"}:
            raise Refused(127, "bash: worker.sh: No such file or directory")
        worker["installed"] = rest[0]
        return "dreamer-jax 0.1.0\n"

    def _worker_start(self, number, worker, rest) -> str:
        if not worker["installed"]:
            raise Refused(127, "../venv/bin/dreamer: No such file or directory")
        attempt, *words = rest
        if worker["attempt"] != int(attempt):
            worker |= {"attempt": int(attempt), "state": "running", "code": None}
            if number == 0:
                self.data["attempts"].append(words)
                worker["log"].append(f"resumed from checkpoint {self.data['bucket']}")
        return ""

    def _train(self) -> None:
        """All workers that run make progress, which is saved; a slice trains only with all its workers."""
        for node in self.data["nodes"].values():
            if any(worker["state"] != "running" for worker in node["workers"]) or node["state"] != "READY":
                continue
            for _ in range(min(STEPS_A_LOOK, self.data["target"] - self.data["bucket"])):
                self.data["bucket"] += 1
                self.data["steps"].append(self.data["bucket"])
            node["workers"][0]["log"].append(f"step {self.data['bucket']}/{self.data['target']}")
            if self.data["bucket"] >= self.data["target"]:
                for worker in node["workers"]:
                    worker |= {"state": "exited", "code": 0}

    def _worker_status(self, number, worker, rest) -> str:
        code = "" if worker["code"] is None else worker["code"]
        return (
            f"dreamer-worker t1v-n-1a2b-w-{number} attempt={worker['attempt']} state={worker['state']} "
            f"code={code} lines={len(worker['log'])}\n"
        )

    def _worker_log(self, number, worker, rest) -> str:
        first = int(rest[0]) - 1
        return "".join(line + "\n" for line in worker["log"][first : first + 2000])

    def _worker_stop(self, number, worker, rest) -> str:
        if worker["state"] == "running":
            worker |= {"state": "exited", "code": 75}
        return ""


ERRORS = {
    "passing": (1, "UNAVAILABLE: The service is currently unavailable."),
    "network": (1, "There was a problem: Unable to find the server at tpu.googleapis.com"),
    "quota": (1, "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZone' has been exceeded."),
    "permission": (1, f"PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'my-project'. {ACCOUNT}"),
    "login": (1, "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login\n"),
    "unreadable": (1, f"NOT_FOUND: Resource '{PLACE}/queuedResources/demo' was not found. {ACCOUNT}"),
    "invalid": (1, "INVALID_ARGUMENT: accelerator type v5litepod-16 is not available in zone us-west4-a"),
    "drop": (255, "[/usr/bin/ssh] exited with return code [255]."),
    "broken": (1, "ERROR: No matching distribution found for jax"),
    "hang": (124, "timed out after 900 s"),
}
"""Fault -> exit code and message."""


def _worker() -> dict:
    return {"files": [], "installed": "", "attempt": 0, "state": "idle", "code": None, "log": []}


def _flags(words: list[str]) -> dict[str, str]:
    return {word.partition("=")[0]: word.partition("=")[2] for word in words[5:] if word.startswith("--")}


def _camel(state: str) -> str:
    first, *rest = state.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)


def main() -> int:
    """Answer one command as the program gcloud; the world is the file FAKE_GCLOUD."""
    code, out, err = World.load(Path(os.environ["FAKE_GCLOUD"])).answer(["gcloud", *sys.argv[1:]])
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


if __name__ == "__main__":
    sys.exit(main())
