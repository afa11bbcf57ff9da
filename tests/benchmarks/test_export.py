"""`dreamer bench export`: what it reports, and what it refuses."""

import json

import pytest

from dreamer_jax.cli.main import main
from tests.export.cases import WHY_SKIPPED

SIZES = ["--model.hidden_size", "32", "--model.vocab_size", "64", "--model.depth", "2"]
COMMAND = ["bench", "export", "--config", "la_tiny", *SIZES]
SHORT = ["--prompt-tokens", "8", "--tokens", "2", "--rounds", "2"]


def test_numbers_of_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    assert main([*COMMAND, *SHORT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ours"]["parameters"] == pytest.approx(found["theirs"]["parameters"], rel=0.1)
    for part, ratio in found["ratio"].items():
        assert found["ours"][part] > 0 and found["theirs"][part] > 0
        assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"]


def test_only_a_layered_model_has_a_twin(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    assert main([*COMMAND, *SHORT, "--model.variant", "DR"]) == 2
    assert "model.variant DR" in capsys.readouterr().err
