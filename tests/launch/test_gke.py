"""Manifests for GKE against the published models of Kubernetes and JobSet, and against what a slice needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from pydantic import ValidationError

from dreamer_jax.errors import UserError
from dreamer_jax.launching import gke
from dreamer_jax.launching.settings import Settings
from dreamer_jax.launching.slices import all_slices

ROOT = Path(__file__).resolve().parents[2]
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"}


def settings(**changes) -> Settings:
    values = {
        "name": "demo",
        "tpu": "v5p-128",
        "zone": "us-east5-a",
        "spot": True,
        "image": "us-docker.pkg.dev/p/r/d:1",
    }
    values |= {"config": "quickstart", "run_dir": "gs://bucket/runs/demo"}
    return Settings(**(values | changes))


def check(manifest: dict) -> None:
    """Every key is known to Kubernetes' and JobSet's OpenAPI models, of the right type, and nothing required lacks."""
    model = JobsetV1alpha2JobSet.from_dict(manifest)
    assert model is not None
    assert model.to_dict() == manifest  # what no model knows would be missing here


@pytest.mark.parametrize("name", [s.accelerator_type for s in all_slices()])
def test_every_slice_gets_a_valid_manifest_with_all_its_workers(name):
    wanted = settings(tpu=name)
    manifest = yaml.safe_load(gke.to_yaml(gke.jobset(wanted)))
    assert manifest == gke.jobset(wanted)
    check(manifest)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == wanted.slice.hosts
    assert chips * job["parallelism"] == wanted.slice.chips
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == wanted.slice.topology


def test_the_check_finds_what_is_wrong():
    for path, value in (
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "sixteen"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "port"), []),
        (("spec", "replicatedJobs", 0, "name"), None),
    ):
        manifest = gke.jobset(settings())
        place = manifest
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises((AssertionError, ValidationError)):
            check(manifest)


def test_a_defect_ends_the_set_and_a_preemption_restarts_all_of_it():
    manifest = gke.jobset(settings(restarts=7))
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert {rule["action"] for rule in policy["rules"]} <= ACTIONS
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2])
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    # Kubernetes demands these two of a job with a podFailurePolicy, and one failed worker must end the job.
    assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] == 0


def expanded(word: str) -> str:
    """What Kubernetes makes of a word of `command`, as its package expansion does, with HOME=/root."""
    made, at = "", 0
    while at < len(word):
        opened = word.startswith("$(", at) and ")" in word[at:]
        end = word.index(")", at) + 1 if opened else at + 2 if word[at] == "$" else at + 1
        read = word[at:end]
        made += {"$$": "$", "$(HOME)": "/root"}.get(read, read)
        at = end
    return made


def test_words_are_expanded_as_kubernetes_does():
    """Some of the cases of its own test."""
    cases = {"$(HOME)": "/root", "$$(HOME)": "$(HOME)", "$$$(HOME)": "$/root", "$(A)_$(HOME)": "$(A)_/root"}
    cases |= {"$$$$$$$(HOME)": "$$$/root", "f000-$HOME": "f000-$HOME", "foo\\$(HOME)": "foo\\/root", "$?_x$": "$?_x$"}
    cases |= {"$(HOME": "$(HOME", "--$(HOME)--$$": "--/root--$", "$)$": "$)$", "a$$$": "a$$"}
    assert {word: expanded(word) for word in cases} == cases


def test_the_container_trains_into_the_bucket():
    def command(**changes):
        job = gke.jobset(settings(**changes))["spec"]["replicatedJobs"][0]["template"]["spec"]
        return job["template"]["spec"]["containers"][0]["command"]

    assert command() == ["dreamer", "train", "quickstart", "--run.dir", "gs://bucket/runs/demo"]
    prepare, prompt = "echo $(( 1 + 1 )) 'a  b $$ $$(HOME) $'; [[ $$ -gt 0 ]]", "x $(HOME) $$ $$$ ${HOME} $"
    plain = [expanded(word) for word in command(prepare=prepare, options=("--data.prompt", prompt))]
    assert plain[2].startswith(prepare) and plain[-1] == prompt
    plain[-len(command()) - 2] = "echo"  # stands for dreamer
    done = subprocess.run(plain, capture_output=True, text=True)
    trained = f"train quickstart --run.dir gs://bucket/runs/demo --data.prompt {prompt}"
    assert done.stdout == f"2 a  b $$ $$(HOME) $\n{trained}\n"


def test_spot_and_the_node_pool():
    manifest = gke.jobset(settings(spot=False, kubernetes_account="trainer"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert "cloud.google.com/gke-spot" not in str(pod) and pod["serviceAccountName"] == "trainer"
    said = gke.node_pool_command(settings())
    for part in (
        "--machine-type=ct5p-hightpu-4t",
        "--tpu-topology=4x4x4",
        "--max-nodes=16",
        "--spot",
        "--location=LOCATION",
    ):
        assert part in said.split()
    assert "--tpu-topology" not in gke.node_pool_command(settings(tpu="v5e-8"))
    assert "--project" not in said and "--project=mine" in gke.node_pool_command(settings(project="mine")).split()


def test_yaml_of_awkward_values():
    value = {
        "yes": ["no", "4x4", "1e3", "a: b", "x\ny", "🙂\x7f\x85\u2028", "", None, True, 3, -1.5, {}, []],
        "nested": [[1, ["a"]], {"k": [{"z": "é # not a comment"}]}, {"a": 1, "b": [2]}],
        "gs://a": {"b/c.d-e": "-x"},
    }
    assert yaml.safe_load(gke.to_yaml(value)) == value


def test_the_command_prints_it_from_the_same_settings(tmp_path):
    def run(*words):
        return subprocess.run(
            ["bash", str(ROOT / "launch/gke/jobset"), *words],
            cwd=ROOT,
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )

    done = run("--settings", "launch/example.toml", "--image", "d:1", "--", "--training.steps", "5")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    check(manifest)
    assert manifest["metadata"]["name"] == "first"
    assert "--training.steps" in str(manifest) and "gcloud container node-pools create first" in done.stdout
    refused = run("--settings", "launch/example.toml")
    assert refused.returncode == 2 and "missing image" in refused.stderr
    refused = run("--settings", "launch/example.toml", "--image", "d:1", "--config", "pyproject.toml")
    assert refused.returncode == 2 and "don't get this file" in refused.stderr and not refused.stdout
    refused = run("--settings", "launch/example.toml", "--image", "d:1", "--config", "nosuchthing")
    assert refused.returncode == 2 and "nosuchthing: no such file" in refused.stderr and not refused.stdout
    with pytest.raises(UserError):
        gke.jobset(settings(image=""))
