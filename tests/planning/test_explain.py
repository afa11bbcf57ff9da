"""Why a bound is what it is: its terms, and what one setting would change, against rooflines made apart."""

from __future__ import annotations

import json
import shlex

import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.planning.explain import WORTH_SAYING, changes, explain
from dreamer_jax.planning.roofline import roofline
from dreamer_jax.planning.topology import parse_topology

V5E = parse_topology("v5e:16x16")
MESH = ["--mesh.data", "8,8", "--mesh.expert", "4", "--training.batch_size", "1024"]
CONFIG = load_config("dr_da_32", MESH).config


def test_the_terms_are_those_of_the_bound():
    """They add up to it, and without one of them the rest is left."""
    reasons, bound = explain(CONFIG, V5E), roofline(CONFIG, V5E)
    assert sum(its.seconds for its in reasons) == pytest.approx(bound.seconds)
    assert sum(its.share for its in reasons) == pytest.approx(1)
    assert [its.seconds for its in reasons] == sorted((its.seconds for its in reasons), reverse=True)
    for its in reasons:
        useful = bound.mfu * bound.seconds
        assert its.mfu_without == pytest.approx(useful / (bound.seconds - its.seconds))
    limits = {its.name: its.limit for its in reasons}
    assert limits["expert exchange"] == limits["weight gather"] == "wires"
    assert limits["sequence attention: scores"] == "matrix units" and limits["optimizer"] == "HBM"


def test_changes_are_what_the_command_line_makes_of_them():
    """Each text, given as words, has the bound that is said of it; all settings are there."""
    found = list(changes(CONFIG, V5E))
    assert {its.text.split()[0] for its in found} == {
        "--mesh.data",
        "--mesh.exchange",
        *(f"--training.{name}" for name in ("microbatches", "remat", "gradient_depths", "scatter", "scatter_dtype")),
    }
    for its in found:
        words = shlex.split(its.text)
        kept = [word for i in range(0, len(MESH), 2) if MESH[i] not in words for word in MESH[i : i + 2]]
        changed = load_config("dr_da_32", [*kept, *words]).config
        assert its.bound == roofline(changed, V5E), its.text
    for reason in explain(CONFIG, V5E):
        if reason.change is None:
            assert reason.seconds_then == reason.seconds
        else:
            assert reason.seconds_then < (1 - WORTH_SAYING) * reason.seconds


def test_the_command(capsys):
    words = ["plan", "dr_da_32", "--topology", "v5e:16x16", "--explain", *MESH]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "waits for" in shown and "optimizer" in shown and "nothing that can be set" in shown
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["seconds"] == pytest.approx(explain(CONFIG, V5E)[0].seconds)
    assert main([*words, "--sweep"]) == 2
    assert "--explain compiles nothing" in capsys.readouterr().err
