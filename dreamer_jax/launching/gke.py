"""`launch/gke/jobset`: the manifest of a run on GKE, a JobSet with one pod for every machine of the slice."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.launching.archive import check_configuration
from dreamer_jax.launching.cli import ROOT, add_settings
from dreamer_jax.launching.settings import Settings, read_settings

GRACE_SECONDS = 120
"""A pod that is told to end may save for so long (spot nodes give less than half a minute whatever is asked)."""
USER_EXIT_CODES = (1, 2)
"""Exit codes of `dreamer train` that no restart mends."""


def jobset(settings: Settings) -> dict[str, Any]:
    """The JobSet (jobset.x-k8s.io/v1alpha2) of a run, as plain values.

    All workers of a slice train together, so the failure of one ends the job; the JobSet then makes all of them
    anew and they resume from the bucket, up to `restarts` times. A defect or a wrong setting (exit code 1 or 2)
    ends the JobSet at once.

    Raises:
        UserError: without an image.
    """
    if not settings.image:
        raise UserError("missing image; build one with launch/gke/Dockerfile and give it as --image")
    hosts = settings.slice.hosts
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "train", "operator": "In", "values": list(USER_EXIT_CODES)},
                }
            ]
        },
        "template": {"metadata": {"labels": {"dreamer-run": settings.name}}, "spec": _pod(settings)},
    }
    policy = {
        "maxRestarts": settings.restarts,
        "rules": [
            {"name": "not-again", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": settings.name,
            "labels": {"dreamer-run": settings.name},
            # Another run's pods never share a slice's machines.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": policy,
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(settings: Settings) -> dict[str, Any]:
    slice_ = settings.slice
    chips = {"google.com/tpu": slice_.chips_per_host}
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slice_.node_accelerator,
        "cloud.google.com/gke-tpu-topology": slice_.topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if settings.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"})
    words = ["dreamer", *settings.training_words()]
    if settings.prepare:
        words = ["bash", "-euc", f'{settings.prepare}\nexec "$@"', "prepare", *words]
    words = [word.replace("$", "$$") for word in words]  # Kubernetes replaces $(NAME), and makes one $ of two
    return {
        "restartPolicy": "Never",
        "serviceAccountName": settings.kubernetes_account,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [
            {
                "name": "train",
                "image": settings.image,
                "workingDir": "/dreamer",
                "command": words,
                # The workers find each other through these and the variables that GKE sets for pods with TPUs.
                "ports": [{"containerPort": port, "protocol": "TCP"} for port in (8471, 8476)],
                "securityContext": {"privileged": True},
                "resources": {"requests": dict(chips), "limits": dict(chips)},
            }
        ],
    }


def node_pool_command(settings: Settings) -> str:
    """The command that makes the node pool the manifest asks for; CLUSTER and LOCATION are the cluster's."""
    slice_ = settings.slice
    words = [
        f"gcloud container node-pools create {settings.name} --cluster=CLUSTER --location=LOCATION",
        f"--node-locations={settings.zone or 'ZONE'}",
        f"--machine-type={slice_.machine_type}",
        *([f"--tpu-topology={slice_.topology}"] if slice_.hosts > 1 else []),
        f"--enable-autoscaling --num-nodes=0 --min-nodes=0 --max-nodes={slice_.hosts}",
        *(["--spot"] if settings.spot else []),
        *([f"--project={settings.project}"] if settings.project else []),
        "--scopes=https://www.googleapis.com/auth/cloud-platform",
    ]
    return " ".join(words)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Plain values as YAML; strings are quoted as JSON does wherever YAML might read something else."""
    pad = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{pad}{_scalar(key)}:{_nested(item, indent + 1)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_item(entry, indent + 1)}" for entry in value)
    return f"{pad}{_scalar(value)}\n"


def _nested(value: Any, indent: int) -> str:
    if isinstance(value, (dict, list)) and value:
        return "\n" + to_yaml(value, indent)
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    return " " + to_yaml(value, indent).lstrip(" ")


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][-A-Za-z0-9_./]*[A-Za-z0-9]", value)
    if plain and value.lower() not in ("true", "false", "yes", "no", "on", "off", "null"):
        return value
    if not isinstance(value, str):
        return json.dumps(value)
    # As JSON has it, but for what lies beyond 16 bits: JSON escapes two halves of it, which YAML refuses.
    return '"' + "".join(f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in value) + '"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the manifest of the settings; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] | None = None
    if "--" in words:
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="launch/gke/jobset",
        description="Print the JobSet manifest of a run on GKE; what follows -- goes to `dreamer train`.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", help="name of the run")
    parser.add_argument("--settings", type=Path, help="TOML file of settings")
    add_settings(parser)
    options = vars(parser.parse_args(words))
    try:
        settings = read_settings(options.pop("settings"), options | {"options": rest or None})
        check_configuration(ROOT, settings.config)
        manifest = jobset(settings)
    except UserError as error:
        print(f"launch/gke/jobset: error: {error}", file=sys.stderr)
        return 2
    print(f"# Made by launch/gke/jobset. Its node pool:\n#   {node_pool_command(settings)}")
    print(to_yaml(manifest), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
