"""`dreamer analyze` on a run that lies on a bucket."""

from __future__ import annotations

import json

import pytest

from tests.analysis.cases import make_run
from tests.runs.buckets import run_script

pytest.importorskip("fsspec")

SCRIPT = """
from dreamer_jax.cli.main import main

assert main(["analyze", "gs://bucket/runs/la/checkpoints/0", "--sequences", "3"]) == 0
"""


@pytest.mark.slow  # tests/runs/test_buckets.py has a run on a bucket by default
def test_a_run_on_a_bucket_keeps_its_analysis_there(tmp_path):
    make_run(tmp_path / "bucket" / "runs" / "la", "LA")
    assert "done: gs://bucket/runs/la/analysis-0/report.html" in run_script(SCRIPT, tmp_path)
    written = tmp_path / "bucket" / "runs" / "la" / "analysis-0"
    summary = json.loads((written / "analysis.json").read_text())
    assert (summary["run"], summary["sequences"]) == ("la", 3)
    assert (written / "report.html").read_text(encoding="utf-8").count("<section>") == 4
    assert (written / "figures" / "lens.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["bucket"], "nothing is left beside the bucket"
