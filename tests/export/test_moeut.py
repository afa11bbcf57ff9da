"""MoEUT's folders: published state dicts come in, runs go out and come back, and PyTorch computes the equations."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from dreamer_jax.blocks.sigma_moe import Selection
from dreamer_jax.cli.main import main
from dreamer_jax.config.sections import Config, DataConfig, RunConfig
from dreamer_jax.export.moeut import params_of
from dreamer_jax.export.moeut_form import MoeutForm
from dreamer_jax.export.moeut_sides import ties
from dreamer_jax.export.reading import import_run, read_model
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import WHY_SKIPPED, check_dtypes, write_folder, write_small_run
from tests.families.cases import drawn_params
from tests.families.plain_moeut import PlainMoeut
from tests.families.plain_ouro import wide
from tests.families.test_moeut import GATED, TINY, cross_entropies
from tests.outside import official_outputs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SMALL = dataclasses.replace(TINY, hidden_size=16, heads=2, head_size=8, expert_size=6, vocab_size=259)
FORMS = {
    "experts": SMALL,
    "gated": dataclasses.replace(SMALL, layers=GATED.layers, attention_experts=GATED.attention_experts),
}
TOKENS = np.random.default_rng(2).integers(0, 259, (2, 9)).astype(np.int32)
ASKED = {"model_type": "moeut", "depth": 2, "experts_per_token": 3, "attention_experts_per_token": 2}
"""What tensors don't tell of the official outputs' model."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    data = DataConfig(sequence_length=24, difficulty=2, heldout_records=8)
    configs = {
        form: Config(model=model, data=data, run=RunConfig(dir=str(place / form))) for form, model in FORMS.items()
    }
    return {form: write_small_run(config, drawn_params(config.model), {}) for form, config in configs.items()}


def write(run: Path, out: Path, dtype: str = "float32") -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_transformers_rounds_nothing_that_is_kept_wide(runs, tmp_path: Path, form: str) -> None:
    check_dtypes(write(runs[form], tmp_path / "folder", "bfloat16"))


@pytest.fixture(scope="module")
def exported(runs) -> dict[str, Path]:
    return {form: write(run, run.parent / f"{form}_folder") for form, run in runs.items()}


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(its.array()) for name, its in safetensors_files.open_tensors(folder).items()}


@pytest.mark.parametrize(("form", "dtype"), [("experts", "float32"), ("gated", "bfloat16")])
def test_there_and_back_gives_identical_bytes(runs, tmp_path: Path, form: str, dtype: str) -> None:
    first = write(runs[form], tmp_path / "first", dtype)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, back = load_run(runs[form]), load_run(tmp_path / "back")
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    if dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, original.params, back.params)


# Published state dicts.


@pytest.fixture(scope="module")
def published():
    """Tensors under their official names, and what the official code computed."""
    arrays, said = official_outputs("moeut_tiny")
    said = said["moe"]
    tensors = {name[6:]: arrays[name] for name in arrays.files if name.startswith("moe/w/")}
    return tensors, arrays, said


def test_a_published_state_dict(published, tmp_path: Path, capsys) -> None:
    """With what its shapes don't tell it is the model of the official outputs (tests/families/test_moeut.py); import,
    export and import again change no bit of it. Without, one line says what is wanted."""
    tensors, *_ = published
    folder = write_folder(tmp_path / "folder", tensors, ASKED)
    import_run(folder, tmp_path / "run")
    model = load_run(tmp_path / "run")
    assert model.config.model == TINY and model.config.data.sequence_length == 1024
    jax.tree.map(np.testing.assert_array_equal, model.params, params_of(tensors, TINY))
    again = write(tmp_path / "run", tmp_path / "again")
    ours = arrays_of(again)
    assert set(ours) == set(tensors)
    for name, values in tensors.items():
        assert ours[name].tobytes() == values.tobytes(), name
    import_run(again, tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "run").params, load_run(tmp_path / "back").params)
    (folder / "config.json").write_text(json.dumps({"model_type": "moeut", "depth": 2}))
    refused(folder, tmp_path, capsys, "config.json: experts_per_token and attention_experts_per_token missing")
    (folder / "config.json").unlink()
    refused(folder, tmp_path, capsys, "config.json does not exist; the tensors are MoEUT's: write")


def test_pytorch_gives_the_official_outputs(published, tmp_path: Path) -> None:
    """Logits and cross-entropy, and with the regularisers in training."""
    torch, twin_of = twins()
    tensors, arrays, said = published
    sizes = {key: value for key, value in dataclasses.asdict(TINY).items() if key not in ("family", "dtype")}
    twin = twin_of(write_folder(tmp_path / "folder", tensors, sizes | ASKED))
    tokens = torch.tensor(arrays["moe/tokens"]).long()
    with torch.no_grad():
        out = twin(tokens, labels=tokens, output_hidden_states=True)
        np.testing.assert_allclose(out.logits[:, :10], arrays["moe/logits"], atol=1e-4)
        assert out.loss.item() == pytest.approx(said["ce"], rel=1e-5)
        first = {"input_ids": tokens[:, :10], "labels": tokens[:, :10]}  # those that the official code regularised
        added = twin.train()(**first).loss - twin.eval()(**first).loss
    np.testing.assert_allclose(out.hidden_states[1][:, :10], arrays["moe/residual_after_layer"][3], atol=1e-4)
    assert added.item() == pytest.approx(said["reg_loss"], rel=1e-4)


# PyTorch.


def twins():
    """torch, and what makes a model of a folder."""
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    from dreamer_jax.export.causal_sides import torch_model

    torch.set_num_threads(1)
    return torch, functools.partial(torch_model, MoeutForm())


@functools.cache
def plainly(form: str):
    """Logits, and the regularisers by row."""
    rows = [PlainMoeut(FORMS[form], wide(drawn_params(FORMS[form]))) for _ in TOKENS]
    states = [row.row(tokens, 2)[-1] for row, tokens in zip(rows, TOKENS, strict=True)]
    return rows[0].logits(np.stack(states)), np.array([row.regularisers() for row in rows])


@pytest.mark.parametrize("form", ["experts", "gated"])
def test_pytorch_computes_the_equations(exported, form: str) -> None:
    """Logits, the loss of training, and greedy decoding through the cache, by transformers; padding changes nothing."""
    torch, twin_of = twins()
    twin, tokens = twin_of(exported[form]), torch.tensor(TOKENS).long()
    wanted, terms = plainly(form)
    labels = tokens.clone()
    labels[1, 5:] = -100  # rows count by their targets
    with torch.no_grad():
        np.testing.assert_allclose(twin(tokens).logits, wanted, atol=1e-4)
        loss = twin.train()(tokens, labels=labels).loss
        alone = twin.eval()(tokens[1:, :6]).logits
        padded = torch.cat([tokens[:1], torch.cat([torch.zeros((1, 3), dtype=torch.long), tokens[1:, :6]], 1)])
        logits = twin(padded, torch.tensor([[1] * 9, [0] * 3 + [1] * 6])).logits
    torch.testing.assert_close(logits[1:, 3:], alone, rtol=1e-4, atol=1e-4)
    losses, counts = cross_entropies(wanted[:, :-1], TOKENS[:, 1:]), np.array([8, 4])
    total = losses[0].sum() + losses[1, :4].sum() + (counts * (terms @ [0.01, 0.001])).sum()
    assert loss.item() == pytest.approx(total / 12, rel=1e-5)
    fast, slow = (
        twin.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=cache)
        for cache in (True, False)
    )
    assert fast.shape == (2, 14) and torch.equal(fast, slow)


def test_what_is_fine_tuned_in_transformers_comes_back(exported, tmp_path: Path, monkeypatch) -> None:
    torch, _ = twins()
    transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported["experts"], trust_remote_code=True, dtype="auto")
    tokens = torch.tensor(TOKENS).long()
    model.train()(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert float(parameter.grad.abs().max()) > 0, name
            parameter -= 0.1 * parameter.grad
    model.save_pretrained(tmp_path / "tuned")
    tuned = {name: its.numpy() for name, its in model.state_dict().items()}
    jax.tree.map(np.testing.assert_array_equal, read_model(tmp_path / "tuned").params, params_of(tuned, SMALL))


def test_the_command_exports_verifies_and_imports(runs, tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    folder = tmp_path / "folder"
    assert main(["export", str(runs["gated"]), str(folder), "--dtype", "bfloat16"]) == 0
    assert "16 greedy tokens agree" in capsys.readouterr().out
    assert main(["import", str(folder), str(tmp_path / "back")]) == 0
    printed = capsys.readouterr().out
    assert "MoEUT 1x2" in printed and "no tokenizer.json" not in printed
    assert "1 layers, 2 repeats" in (folder / "README.md").read_text()


def test_ties_of_any_head_are_found() -> None:
    """Between the last expert that is selected and the first that isn't; other ties decide nothing."""
    logits = np.zeros((4, 2, 4), np.float32) + np.array([3, 2, 1, 0], np.float32)
    logits[1, 1, 2] = 2  # the second and the third: a tie
    logits[2, 0, 1] = 3  # the first and the second
    indices = np.zeros((4, 2, 2), np.int32)
    assert ties(Selection(logits, indices, indices)).tolist() == [False, True, False, False]  # type: ignore[arg-type]
    assert not ties(Selection(logits[..., :2], indices, indices)).any()  # type: ignore[arg-type]  # all are selected


# Refusals.


def refused(folder: Path, place: Path, capsys, message: str) -> None:
    """One line on stderr, exit code 2, nothing left behind."""
    before = sorted(place.iterdir())
    capsys.readouterr()
    assert main(["import", str(folder), str(place / "refused")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert sorted(place.iterdir()) == before


def missing(tensors):
    del tensors["lm_head.bias"]


def more(tensors):
    tensors["transformer.layers.0.attention.q.bias"] = np.ones(16, np.float32)


def cut(tensors):
    tensors["transformer.layers.1.ffn.values"] = tensors["transformer.layers.1.ffn.values"][:-1]


@pytest.mark.parametrize(
    ("alter", "settings", "said"),
    [
        (missing, {}, "the tensor lm_head.bias is missing"),
        (more, {}, "attention.q.bias is not part of the model"),
        (cut, {}, "layers.1.ffn.values has shape (5, 6, 16) where config.json asks for (6, 6, 16)"),
        (None, {"model_type": "moe"}, "describes a model of type 'moe'"),
        (None, {"layers": 3}, "layers.2.ln1.weight is missing"),
        (None, {"attention_experts": 1}, "has shape"),
        (None, {"experts_per_token": 7}, "7 is more than model.num_experts 6"),
        (None, {"depth": "2"}, "model.depth can't be '2'"),
    ],
)
def test_folders_that_do_not_fit_are_refused(exported, tmp_path: Path, capsys, alter, settings, said) -> None:
    tensors = arrays_of(exported["experts"])
    if alter is not None:
        alter(tensors)
    content = json.loads((exported["experts"] / "config.json").read_text()) | settings
    refused(write_folder(tmp_path / "altered", tensors, content), tmp_path, capsys, said)


def test_truncated_files_are_refused(exported, tmp_path: Path, capsys) -> None:
    folder = Path(shutil.copytree(exported["gated"], tmp_path / "copy"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, tmp_path, capsys, "truncated")
