"""The depth-recurrent transformer's folders: PyTorch computes what the equations say, and runs go out and come in."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.depth_recurrent_form import DepthRecurrentForm
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, write_small_run
from tests.families.plain_depth_recurrent import answers, thoughts
from tests.families.puzzle_cases import FORMS, drawn_params, form, puzzles


def model_of(name: str) -> Any:
    return form(name, vocab_size=259)


@pytest.fixture(scope="module", params=FORMS)
def run(request, tmp_path_factory) -> Path:
    """A run in which no weight is zero or one."""
    directory, model = tmp_path_factory.mktemp("runs") / request.param, model_of(request.param)
    data = DataConfig(sequence_length=20, difficulty=2, heldout_records=8)
    params = drawn_params(model)
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), params, {})


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.mark.slow_but("graph", "bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_identical_bytes(run: Path, tmp_path: Path, dtype: str) -> None:
    first = write(run, tmp_path / "first", dtype)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, back = load_run(run), load_run(tmp_path / "back")
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    if dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, original.params, back.params)
    names = {path.name for path in first.iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_depth_recurrent.py", "README.md"}
    assert "DepthRecurrent.load" in (first / "README.md").read_text()


def test_pytorch_computes_the_equations(run: Path, tmp_path: Path) -> None:
    """Also deeper than trained, against the float64 version, with padding and a graph."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    from dreamer_jax.export.modeling_depth_recurrent import DepthRecurrent

    torch.set_num_threads(1)
    twin, model = DepthRecurrent.load(str(write(run, tmp_path / "folder"))), load_run(run).config.model
    batch, steps = puzzles(model), 6
    names = ("tokens", "read", "visible", "segment_ids")
    with torch.no_grad():
        logits = twin(**{name: torch.tensor(batch[name]) for name in names if name in batch}, steps=steps)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), load_run(run).params)
    states = thoughts(model, wide, batch, steps)[1:]
    wanted = np.stack([answers(model, wide, batch, state) for state in states])
    real = batch["loss_mask"].any(1)  # the last row is padding
    np.testing.assert_allclose(logits[:, real], wanted[:, real], atol=2e-4, rtol=1e-4)


def test_the_card_runs_as_it_stands(run: Path, tmp_path: Path, monkeypatch) -> None:
    """And steps that the model can't take are refused in one sentence."""
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    monkeypatch.setattr("sys.path", list(sys.path))
    folder, found = write(run, tmp_path / "folder"), {}
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    exec(code[1].replace("FOLDER", str(folder)), found)
    model, settings = found["model"], load_run(run).config.model
    assert found["logits"].shape == (settings.depth, 1, settings.classes)
    for steps in (0, -1, *([settings.max_depth + 1] if settings.depth_embedding_std else [])):
        with pytest.raises(ValueError, match=f"steps {steps}: must be 1 or more, and at most max_depth"):
            model(found["tokens"], found["read"], visible=found.get("visible"), steps=steps)


def test_pytorch_computes_where_its_inputs_are(run: Path, tmp_path: Path) -> None:
    """Another device than the CPU; this one has shapes only, and refuses tensors of others."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    from dreamer_jax.export.modeling_depth_recurrent import DepthRecurrent

    twin = DepthRecurrent.load(str(write(run, tmp_path / "folder"))).to("meta")
    batch = puzzles(load_run(run).config.model)
    names = ("tokens", "read", "visible", "segment_ids")
    logits = twin(**{name: torch.tensor(batch[name], device="meta") for name in names if name in batch}, steps=3)
    assert logits.device.type == "meta" and logits.shape[:2] == (3, len(batch["tokens"]))


@pytest.mark.slow_but("graph-bfloat16", "text-float32", "plain-float32", "post-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_verifies_and_import_goes_on(run: Path, tmp_path: Path, capsys, dtype: str) -> None:
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    folder = tmp_path / "folder"
    assert main(["export", str(run), str(folder), "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert "float32 logits differ by" in printed and "greedy" not in printed
    assert main(["import", str(folder), str(tmp_path / "back")]) == 0
    printed = capsys.readouterr().out
    assert "depth-recurrent transformer, 2 to 4 steps" in printed and "tokenizer" not in printed
    loaded = dreamer_jax.load(folder)
    with pytest.raises(UserError, match="answer puzzles"):
        loaded.logits([[1, 2]])


def test_another_form_of_computing_is_noticed(tmp_path: Path, capsys) -> None:
    """A setting in config.json that the run hasn't is another model; one of the wrong type is no model."""
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    config = Config(model=model_of("graph"), data=DataConfig(sequence_length=20, difficulty=2, heldout_records=8))
    config = dataclasses.replace(config, run=RunConfig(dir=str(tmp_path / "run")))
    run = write_small_run(config, drawn_params(config.model), {})
    folder = write(run, tmp_path / "folder")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"activation": "relu"}))
    assert main(["export", str(run), str(folder), "--verify-only"]) == 2
    assert "describes another model" in capsys.readouterr().err
    path.write_text(json.dumps(content | {"hidden_size": "wide"}))
    with pytest.raises(UserError, match=r"model\.hidden_size can't be 'wide'"):
        DepthRecurrentForm().read(folder, json.loads(path.read_text()))
