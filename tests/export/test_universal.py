"""The Universal Transformer's folders: PyTorch computes what the equations say, and runs go out and come in."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.universal_form import UniversalForm
from dreamer_jax.export.writing import export
from dreamer_jax.families import build, initialise
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, check_dtypes, write_folder, write_small_run
from tests.families import plain_universal as plain
from tests.families.test_universal import FORMS, wide

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS = np.random.default_rng(2).integers(0, 259, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def drawn():
    """Parameters of all forms in which nothing is one or zero, and positions take different numbers of steps."""
    params, _ = initialise(build(dataclasses.replace(FORMS["graves"], vocab_size=259)), jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.15 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = structure.unflatten(moved)
    params["halting"]["bias"] = jnp.full(1, -1.0)
    return jax.device_get(params)


def make_run(directory: Path, drawn, form: str = "graves") -> Path:
    model = dataclasses.replace(FORMS[form], vocab_size=259)
    data = DataConfig(sequence_length=24, difficulty=2, heldout_records=8)
    params = {name: drawn[name] for name in build(model).shapes[0]}
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), params, {})


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.fixture(scope="module")
def run(drawn, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", drawn)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return write(run, run.parent / "folder")


def test_transformers_rounds_nothing_that_is_kept_wide(run: Path, tmp_path: Path) -> None:
    check_dtypes(write(run, tmp_path / "folder", "bfloat16"))


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


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_computes_the_equations(drawn, tmp_path: Path, form: str) -> None:
    """Logits, the loss with its ponder cost, and greedy decoding through the cache, by transformers."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from dreamer_jax.export.causal_sides import torch_model

    torch.set_num_threads(1)
    run = make_run(tmp_path / "run", drawn, form)
    twin, config = torch_model(UniversalForm(), write(run, tmp_path / "folder")), load_run(run).config.model
    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        out = twin(tokens, labels=tokens)
    wanted = plain.passed(config, wide(drawn), TOKENS)
    np.testing.assert_allclose(out.logits, wanted.logits, atol=1e-4)
    targets, mask = np.roll(TOKENS, -1, 1), np.arange(9) < 8
    total = plain.loss(config, wide(drawn), TOKENS, targets, mask, np)
    np.testing.assert_allclose(out.loss * 16, total, rtol=1e-5)
    assert form == "none" or len(np.unique(wanted.updates)) > 1
    fast, slow = (
        twin.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=cache)
        for cache in (True, False)
    )
    assert fast.shape == (2, 15) and torch.equal(fast, slow)


def test_transformers_loads_it(exported: Path, tmp_path: Path, monkeypatch) -> None:
    """Padding on the left changes nothing, and what is fine-tuned and saved there comes back."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype="auto")
    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        alone = model(tokens[1:, :6]).logits
        padded = torch.cat([tokens[:1], torch.cat([torch.zeros((1, 3), dtype=torch.long), tokens[1:, :6]], 1)])
        logits = model(padded, torch.tensor([[1] * 9, [0] * 3 + [1] * 6])).logits
    torch.testing.assert_close(logits[1:, 3:], alone, rtol=1e-4, atol=1e-4)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert float(model.halting.weight.grad.abs().max()) > 0
    model.eval().save_pretrained(tmp_path / "tuned")
    expected = model(tokens).logits.detach()
    found = dreamer_jax.load(tmp_path / "tuned").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_verifies_and_import_goes_on(run: Path, tmp_path: Path, capsys, dtype: str) -> None:
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    folder = tmp_path / "folder"
    assert main(["export", str(run), str(folder), "--dtype", dtype]) == 0
    assert "16 greedy tokens agree" in capsys.readouterr().out
    assert main(["import", str(folder), str(tmp_path / "back")]) == 0
    assert "Universal Transformer, at most 4 steps" in capsys.readouterr().out
    assert "Universal Transformer" in (folder / "README.md").read_text()


def missing(tensors):
    del tensors["halting.bias"]


def more(tensors):
    tensors["final_norm.weight"] = np.ones(16, np.float32)


def cut(tensors):
    tensors["layer.inward.weight"] = tensors["layer.inward.weight"][:-1]


@pytest.mark.parametrize(
    ("alter", "settings", "said"),
    [
        (missing, {}, "the tensor halting.bias is missing"),
        (more, {}, "final_norm.weight is not part of the model"),
        (cut, {}, "layer.inward.weight has shape"),
        (None, {"model_type": "universal_transformer"}, "describes a model of type 'universal_transformer'"),
        (None, {"halting": "sometimes"}, "model.halting can't be 'sometimes'"),
        (None, {"heads": 5}, "5 does not divide"),
        (None, {"halting": "none"}, "halting.bias is not part of the model"),
    ],
)
def test_folders_that_do_not_fit_are_refused(exported: Path, tmp_path: Path, capsys, alter, settings, said) -> None:
    tensors = {name: np.array(its.array()) for name, its in safetensors_files.open_tensors(exported).items()}
    if alter is not None:
        alter(tensors)
    content = json.loads((exported / "config.json").read_text()) | settings
    folder = write_folder(tmp_path / "altered", tensors, content)
    assert main(["import", str(folder), str(tmp_path / "refused")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error, error
    with pytest.raises(UserError):
        dreamer_jax.load(folder)


def test_truncated_files_are_refused(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated"):
        import_run(folder, tmp_path / "back")
