"""Folders of recursive transformers: PyTorch computes what the equations say, and runs go out and come in."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.sources import read_source
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, check_dtypes, write_folder, write_small_run
from tests.export.source_cases import SETTINGS, llama_tensors
from tests.families.cases import drawn_params
from tests.families.plain_recursive import PlainRecursive, wide
from tests.families.test_recursive import FORMS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS = np.random.default_rng(2).integers(0, 259, (2, 9)).astype(np.int32)


def make_run(directory: Path, form: str) -> Path:
    model = dataclasses.replace(FORMS[form], vocab_size=259)
    data = DataConfig(sequence_length=24, difficulty=2, heldout_records=8)
    return write_small_run(Config(model=model, data=data, run=RunConfig(dir=str(directory))), drawn_params(model), {})


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Form -> (run, exported folder), made when they are asked for."""
    made, place = {}, tmp_path_factory.mktemp("runs")

    def of(form: str) -> tuple[Path, Path]:
        if form not in made:
            run = make_run(place / form, form)
            made[form] = run, write(run, place / f"{form}-folder")
        return made[form]

    return of


def test_a_converted_llama_goes_out_and_comes_in(tmp_path: Path) -> None:
    """One loop of bfloat16 tensors: convert, export, import; every value is the source's, bit by bit."""
    sizes = SETTINGS | {"vocab_size": 259, "num_hidden_layers": 2}
    tensors = llama_tensors(2) | {
        name: np.random.default_rng(0).normal(size=(259, 8)) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    folder, run, back = write_folder(tmp_path / "llama", tensors, sizes), tmp_path / "run", tmp_path / "back"
    assert main(["convert", str(folder), str(run), "--to", "recursive", "--loops", "1"]) == 0
    import_run(write(run, tmp_path / "folder", "bfloat16"), back)
    params, source = load_run(back).params, read_source(folder)
    for k in range(2):
        for half, leaves in source.layer(k).items():
            for name, values in leaves.items():
                np.testing.assert_array_equal(params["layers"][str(k)][half][name], values)
    for name, values in source.around().items():
        np.testing.assert_array_equal(params[name], values)


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_computes_the_equations(form: str) -> None:
    """Logits, the loss of every loop, and greedy decoding through the cache, by transformers."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from dreamer_jax.export.modeling_recursive import RecursiveConfig, RecursiveForCausalLM

    torch.set_num_threads(1)
    config = dataclasses.replace(FORMS[form], vocab_size=259)
    settings: Any = dataclasses.asdict(config) | {"dtype": None}
    twin: Any = RecursiveForCausalLM(RecursiveConfig(**settings)).eval()
    leaves = jax.tree_util.tree_leaves_with_path(drawn_params(config))
    twin.load_state_dict({".".join(key.key for key in path): torch.tensor(leaf) for path, leaf in leaves})
    tokens = torch.tensor(TOKENS).long()
    with torch.no_grad():
        out = twin(tokens, labels=tokens)
    plain = PlainRecursive(config, wide(drawn_params(config)))
    rows = [plain.row(row) for row in TOKENS]
    np.testing.assert_allclose(out.logits, np.stack([logits for logits, *_ in rows]), atol=1e-4)
    total = sum(entropy(logits, row) for (logits, *_), row in zip(rows, TOKENS, strict=True))
    for (_, _, states), row in zip(rows, TOKENS, strict=True) if config.exit_weight else ():
        total += config.exit_weight * sum(entropy(plain.read(x), row) for x in states[:-1])
    np.testing.assert_allclose(out.loss * 16, total, rtol=1e-5)
    fast, slow = (
        twin.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=cache)
        for cache in (True, False)
    )
    assert fast.shape == (2, 15) and torch.equal(fast, slow)


def entropy(logits, row):
    """The sum over all tokens but the first."""
    picked = logits[np.arange(8), row[1:]]
    return (np.log(np.exp(logits[:-1]).sum(-1)) - picked).sum()


def test_transformers_loads_it(folders, tmp_path: Path, monkeypatch) -> None:
    """Padding on the left changes nothing, and what is fine-tuned and saved there comes back."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    _, folder = folders("cycle")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
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
            assert float(parameter.grad.abs().max()) > 0
            parameter -= 0.1 * parameter.grad
    model.eval().save_pretrained(tmp_path / "tuned")
    found = dreamer_jax.load(tmp_path / "tuned").logits(TOKENS)
    np.testing.assert_allclose(found, model(tokens).logits.detach(), atol=1e-4)


def test_export_verifies_and_import_goes_on(folders, tmp_path: Path, capsys) -> None:
    """There and back again gives identical bytes."""
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    (run, _), first, back = folders("plain"), tmp_path / "first", tmp_path / "back"
    assert main(["export", str(run), str(first), "--dtype", "bfloat16"]) == 0
    assert "16 greedy tokens agree" in capsys.readouterr().out
    assert main(["import", str(first), str(back)]) == 0
    assert "recursive transformer, 2 layers 2 times (cycle)" in capsys.readouterr().out
    second = write(back, tmp_path / "second", "bfloat16")
    check_dtypes(second)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, again = load_run(run), load_run(back)
    assert dataclasses.replace(again.config, run=original.config.run) == original.config
    assert "Recursive transformer" in (first / "README.md").read_text()


@pytest.mark.parametrize(
    ("leaf", "settings", "said"),
    [
        ("layers.1.feed_forward.up", {}, "the tensor layers.1.feed_forward.up is missing"),
        (
            None,
            {"rank": 4},
            "relaxation.0.attention.k_low.down has shape (3, 16, 3) where config.json asks for (3, 16, 4)",
        ),
        (None, {"rank": 0}, "relaxation.0.attention.k_low.down is not part of the model"),
        (None, {"sharing": "spiral"}, "model.sharing can't be 'spiral'"),
        (None, {"model_type": "recursive_llama"}, "describes a model of type 'recursive_llama'"),
    ],
)
def test_folders_that_do_not_fit_are_refused(folders, tmp_path: Path, leaf, settings, said) -> None:
    _, exported = folders("cycle")
    tensors = {n: np.array(its.array()) for n, its in safetensors_files.open_tensors(exported).items() if n != leaf}
    content = json.loads((exported / "config.json").read_text()) | settings
    folder = write_folder(tmp_path / "altered", tensors, content)
    with pytest.raises(UserError) as refused:
        import_run(folder, tmp_path / "refused")
    assert said in str(refused.value) and "\n" not in str(refused.value)
