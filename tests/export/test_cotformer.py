"""CoTFormer's folders: PyTorch computes what the equations say, and runs go out and come in."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.cotformer_form import CotformerForm
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, check_dtypes, use_of, write_folder, write_small_run
from tests.families import plain_cotformer as plain
from tests.families.cases import TINY_MODELS
from tests.families.test_cotformer import FORMS, RULES, drawn_params, wide

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WRITTEN = ("plain", "capacity", "threshold")
TOKENS = np.random.default_rng(2).integers(0, 64, (2, 9)).astype(np.int32)


def make_run(directory: Path, form: str) -> Path:
    model = dataclasses.replace(FORMS[form], vocab_size=259)
    table = np.random.default_rng(3).normal(size=(259, model.hidden_size)) * 0.15
    table[:64] = drawn_params(form)["embedding"]
    params = drawn_params(form) | {"embedding": table.astype(np.float32)}
    data = DataConfig(sequence_length=24, difficulty=2, heldout_records=8)
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), params, {})


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    return {form: make_run(directory / form, form) for form in WRITTEN}


@pytest.fixture(scope="module")
def exported(runs) -> Path:
    return write(runs["threshold"], runs["threshold"].parent / "folder")


def test_transformers_rounds_nothing_that_is_kept_wide(runs, tmp_path: Path) -> None:
    check_dtypes(write(runs["threshold"], tmp_path / "folder", "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_identical_bytes(runs, tmp_path: Path, dtype: str) -> None:
    first = write(runs["threshold"], tmp_path / "first", dtype)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, back = load_run(runs["threshold"]), load_run(tmp_path / "back")
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    if dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, original.params, back.params)


@pytest.mark.parametrize("form", WRITTEN)
def test_pytorch_computes_the_equations(runs, tmp_path: Path, form: str) -> None:
    """Logits, the loss, who goes on, and greedy decoding through the cache, by transformers."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from dreamer_jax.export.causal_sides import torch_model

    torch.set_num_threads(1)
    twin, params = (
        torch_model(CotformerForm(), write(runs[form], tmp_path / "folder")),
        wide(load_run(runs[form]).params),
    )
    rule = plain.by_capacity(0.75, 0.5) if form == "capacity" else RULES.get(form)
    wanted = [plain.passed(FORMS[form], params, row, rule) for row in TOKENS]
    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        out = twin(tokens, labels=tokens, output_hidden_states=True)
    np.testing.assert_allclose(out.logits, np.stack([row.logits for row in wanted]), atol=1e-4)
    np.testing.assert_allclose(torch.stack(out.hidden_states[:-1], 1), [row.states for row in wanted], atol=1e-4)
    targets, mask = np.roll(TOKENS, -1, 1), np.arange(9) < 8
    total = sum(plain.loss(row.logits, targets[b], mask, np) for b, row in enumerate(wanted))
    np.testing.assert_allclose(out.loss * 16, total, rtol=1e-5)
    if FORMS[form].adaptive:
        assert len({len(took) for row in wanted for took in row.took}) > 2
    fast, slow = (
        twin.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=cache)
        for cache in (True, False)
    )
    assert fast.shape == (2, 15) and torch.equal(fast, slow)


def test_transformers_loads_it(exported: Path, tmp_path: Path, monkeypatch) -> None:
    """Padding on the left and packing change nothing, and what is fine-tuned and saved there comes back."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype="auto")
    tokens = torch.tensor(TOKENS).long()
    for decide in ("threshold", "capacity"):
        with torch.no_grad():
            alone = model(tokens[1:, :6], decide=decide).logits
            padded = torch.cat([tokens[:1], torch.cat([torch.zeros((1, 3), dtype=torch.long), tokens[1:, :6]], 1)])
            mask = torch.tensor([[1] * 4 + [2] * 5, [0] * 3 + [1] * 6])
            logits = model(padded, mask, decide=decide).logits
            first = model(tokens[:1, :4], decide=decide).logits
        torch.testing.assert_close(logits[1:, 3:], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[:1, :4], first, rtol=1e-4, atol=1e-4)
    model.train()
    torch.manual_seed(0)
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
    assert float(model.routers.grad.abs().max()) > 0
    model.eval().save_pretrained(tmp_path / "tuned")
    expected = model(tokens).logits.detach()
    found = dreamer_jax.load(tmp_path / "tuned").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_export_verifies_and_import_goes_on(runs, tmp_path: Path, capsys) -> None:
    """In bfloat16, which compares both sides in float32 too."""
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    folder = tmp_path / "folder"
    assert main(["export", str(runs["capacity"]), str(folder), "--dtype", "bfloat16"]) == 0
    assert "16 greedy tokens agree" in capsys.readouterr().out
    assert main(["import", str(folder), str(tmp_path / "back")]) == 0
    assert "adaptive CoTFormer 1+2x3+1" in capsys.readouterr().out
    assert "CoTFormer, 2 layers repeated 3 times" in (folder / "README.md").read_text()


def test_the_card_says_which_depths_there_are() -> None:
    """Routers and learned depth embeddings are of so many repeats."""
    model = TINY_MODELS["cotformer"]
    for its, said in ((model, "fewer"), (dataclasses.replace(model, adaptive=False), "another number of")):
        assert f"`depth` allows {said} repeats than {its.depth}." in use_of(CotformerForm(), its)


def missing(tensors):
    del tensors["routers"]


def more(tensors):
    tensors["middle.2.inward.weight"] = np.ones((128, 32), np.float32)


def cut(tensors):
    tensors["end.0.attention.qkv.weight"] = tensors["end.0.attention.qkv.weight"][:-1]


@pytest.mark.parametrize(
    ("alter", "settings", "said"),
    [
        (missing, {}, "the tensor routers is missing"),
        (more, {}, "middle.2.inward.weight is not part of the model"),
        (cut, {}, "end.0.attention.qkv.weight has shape"),
        (None, {"model_type": "cotformers"}, "describes a model of type 'cotformers'"),
        (None, {"decide": "sometimes"}, "model.decide can't be 'sometimes'"),
        (None, {"heads": 5}, "5 does not divide"),
        (None, {"adaptive": False}, "routers is not part of the model"),
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
