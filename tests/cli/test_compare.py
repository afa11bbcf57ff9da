"""`dreamer compare` on run directories written by hand."""

from __future__ import annotations

import json

import pytest

from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config, to_yaml


@pytest.fixture
def runs(tmp_path):
    """Two finished runs, LA and DR, with known metrics."""
    paths = []
    for variant, loss in (("LA", 2.0), ("DR", 1.5)):
        directory = tmp_path / variant
        directory.mkdir()
        source = tmp_path / f"{variant}.yaml"
        source.write_text(f"model:\n  variant: {variant}\n")
        (directory / "config.yaml").write_text(to_yaml(load_config(source)))
        records = [{"step": 5, "tokens": 50, "loss": 3.0}, {"step": 5, "heldout/loss": loss, "heldout/perplexity": 7.0}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (directory / "summary.json").write_text(json.dumps(records[0] | records[1]))
        paths.append(str(directory))
    return paths


def test_rows_hold_cost_and_results(runs, capsys):
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["variant"], row["heldout_loss"], row["tokens"]) for row in rows] == [("LA", 2.0, 50), ("DR", 1.5, 50)]
    assert rows[0]["parameters"] > rows[1]["parameters"]  # eight layers of 64 experts against one
    assert rows[0]["heldout_exact_match"] is None


def test_table_and_figure(runs, tmp_path, capsys):
    assert main(["compare", *runs, "--figure", str(tmp_path / "loss.png")]) == 0
    assert "1.5000" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_unfinished_run_is_refused(runs, tmp_path, capsys):
    (tmp_path / "DR" / "summary.json").unlink()
    assert main(["compare", *runs]) == 2
    assert "not a finished run" in capsys.readouterr().err
