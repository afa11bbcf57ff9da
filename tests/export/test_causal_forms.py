"""Folders of AlgoFormer and PonderLM: PyTorch computes what the equations say, and runs go out and come in."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.errors import UserError
from dreamer_jax.export.description import FORMS
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, check_dtypes, write_folder, write_small_run
from tests.families import test_algoformer, test_ponder
from tests.families.cases import drawn_params
from tests.families.plain_ouro import wide

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS = np.random.default_rng(2).integers(0, 259, (2, 9)).astype(np.int32)
ALGOFORMER, PONDER = (dataclasses.replace(its.TINY, vocab_size=259) for its in (test_algoformer, test_ponder))
MODELS: dict[str, Any] = {
    "algoformer": ALGOFORMER,
    "added": dataclasses.replace(ALGOFORMER, inject="add", score="sampled"),
    "ponder": PONDER,
}


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model -> (run, exported folder), made when they are asked for."""
    made, place = {}, tmp_path_factory.mktemp("runs")

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            data = DataConfig(sequence_length=24, difficulty=2, heldout_records=8)
            config = Config(model=MODELS[name], data=data, run=RunConfig(dir=str(place / name)))
            run = write_small_run(config, drawn_params(MODELS[name]), {})
            made[name] = run, write(run, place / f"{name}-folder")
        return made[name]

    return of


def twin_of(folder: Path) -> Any:
    """The folder's model in PyTorch."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from dreamer_jax.export.causal_sides import torch_model

    torch.set_num_threads(1)
    form: Any = FORMS[json.loads((folder / "config.json").read_text())["model_type"]]
    return torch_model(form, folder)


def plain_logits(config: Any, times: int) -> Any:
    """[2, S, V] after so many loops or passes."""
    params = wide(drawn_params(config))
    if config.family == "ponder":
        rows = [test_ponder.PlainPonder(config, params).row(row, times)[-1] @ params["head"].T for row in TOKENS]
    else:
        rows = [test_algoformer.PlainAlgoformer(config, params).logits(row, times) for row in TOKENS]
    return np.stack(rows)


def entropy(logits: Any) -> Any:
    """The mean over all tokens but the first."""
    picked = np.take_along_axis(logits[:, :-1], TOKENS[:, 1:, None], -1)[..., 0]
    return (np.log(np.exp(logits[:, :-1]).sum(-1)) - picked).mean()


@pytest.mark.parametrize("name", MODELS)
def test_pytorch_computes_the_equations(folders, name: str) -> None:
    """Logits, also at another depth, the loss, and greedy decoding through the cache, by transformers."""
    twin, config = twin_of(folders(name)[1]), MODELS[name]
    import torch

    tokens = torch.tensor(TOKENS).long()
    out, earlier = twin(tokens, labels=tokens), twin(tokens, depth=2)
    wanted = {times: plain_logits(config, times) for times in (2, 3)}
    np.testing.assert_allclose(out.logits, wanted[3], atol=1e-4)
    np.testing.assert_allclose(earlier.logits, wanted[2], atol=1e-4)
    scored = (2, 3) if name == "algoformer" else (3,)
    np.testing.assert_allclose(out.loss, np.mean([entropy(wanted[times]) for times in scored]), rtol=1e-5)
    fast, slow = (
        twin.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=cache)
        for cache in (True, False)
    )
    assert fast.shape == (2, 15) and torch.equal(fast, slow)


def test_training_of_algoformer(folders) -> None:
    """A sampled loss is that after one of the scored loops; truncated, what is before them learns nothing."""
    twin = twin_of(folders("added")[1]).train()
    import torch

    tokens = torch.tensor(TOKENS).long()
    losses = [entropy(plain_logits(MODELS["added"], times)) for times in (2, 3)]
    torch.manual_seed(0)
    drawn = {float(twin(tokens, labels=tokens).loss) for _ in range(8)}
    np.testing.assert_allclose(sorted(drawn), sorted(losses), rtol=1e-5)
    twin = twin_of(folders("algoformer")[1]).train().requires_grad_(True)
    for truncate in (False, True):
        twin.config.truncate = truncate
        twin.zero_grad()
        twin(tokens, labels=tokens).loss.backward()
        learns = {name: p.grad is not None and bool(p.grad.any()) for name, p in twin.named_parameters()}
        assert all(its != (truncate and name.startswith("pre.")) for name, its in learns.items()), learns


@pytest.mark.parametrize("name", ["algoformer", "ponder"])
def test_transformers_loads_it(folders, tmp_path: Path, monkeypatch, name: str) -> None:
    """Padding on the left changes nothing, and what is fine-tuned and saved there comes back."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    _, folder = folders(name)
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


@pytest.mark.parametrize(("name", "dtype"), [("added", "float32"), ("ponder", "bfloat16")])
def test_export_verifies_and_import_goes_on(folders, tmp_path: Path, capsys, name: str, dtype: str) -> None:
    """There and back again gives identical bytes."""
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    (run, _), first, back = folders(name), tmp_path / "first", tmp_path / "back"
    assert main(["export", str(run), str(first), "--dtype", dtype]) == 0
    assert "16 greedy tokens agree" in capsys.readouterr().out
    assert main(["import", str(first), str(back)]) == 0
    second = write(back, tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, again = load_run(run), load_run(back)
    assert dataclasses.replace(again.config, run=original.config.run) == original.config
    if dtype == "bfloat16":
        check_dtypes(second)


@pytest.mark.parametrize(
    ("name", "tensor", "settings", "said"),
    [
        ("algoformer", "loop.1.mlp_norm.weight", {}, "the tensor loop.1.mlp_norm.weight is missing"),
        ("algoformer", None, {"post_layers": 0}, "post.0.attention.out.weight is not part of the model"),
        ("algoformer", None, {"post_layers": 1 << 30}, "model.post_layers can't be 1073741824"),
        ("algoformer", None, {"scored": 4}, "4 losses, but model.depth is 3"),
        ("ponder", None, {"mlp_size": 13}, "has shape (12, 16) where config.json asks for (13, 16)"),
        ("ponder", None, {"model_type": "ponder_lm"}, "describes a model of type 'ponder_lm'"),
    ],
)
def test_folders_that_do_not_fit_are_refused(folders, tmp_path: Path, name, tensor, settings, said) -> None:
    _, exported = folders(name)
    tensors = {n: np.array(its.array()) for n, its in safetensors_files.open_tensors(exported).items() if n != tensor}
    content = json.loads((exported / "config.json").read_text()) | settings
    folder = write_folder(tmp_path / "altered", tensors, content)
    with pytest.raises(UserError) as refused:
        import_run(folder, tmp_path / "refused")
    assert said in str(refused.value) and "\n" not in str(refused.value)
