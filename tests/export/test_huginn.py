"""Huginn's folders: published and retrofitted ones come in, runs go out, and the PyTorch code computes the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.export.huginn_form import rotations
from dreamer_jax.export.huginn_settings import write_model
from dreamer_jax.export.reading import import_run
from dreamer_jax.export.writing import export
from dreamer_jax.runs import safetensors_files
from dreamer_jax.runs.leaves import open_model
from dreamer_jax.runs.models import load_run
from tests.export.cases import HUGINN, WHY_SKIPPED, huginn_run, write_folder
from tests.outside import official_outputs


@pytest.fixture(scope="module", params=HUGINN)
def run(request, tmp_path_factory) -> Path:
    return huginn_run(tmp_path_factory.mktemp("runs") / request.param, HUGINN[request.param])


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return write(run, run.parent / "exported")


@pytest.fixture(scope="module")
def sandwich(tmp_path_factory) -> Path:
    """A folder of the published form."""
    root = tmp_path_factory.mktemp("sandwich")
    return write(huginn_run(root / "run", HUGINN["huginn"]), root / "folder")


@pytest.fixture
def copy(sandwich: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sandwich, tmp_path / "copy"))


def write(run: Path, out: Path, dtype: str = "float32", shard_bytes: int = 1 << 40) -> Path:
    export(open_model(run), out, dtype, False, lambda folder: None, shard_bytes)
    return out


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(its.array()) for name, its in safetensors_files.open_tensors(folder).items()}


def change(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None takes them away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def same_params(a: Path, b: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, load_run(a).params, load_run(b).params)


# There and back.


@pytest.mark.slow_but("huginn")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_identical_bytes(run: Path, tmp_path: Path, dtype: str) -> None:
    first = write(run, tmp_path / "first", dtype)
    import_run(first, tmp_path / "back")
    second = write(tmp_path / "back", tmp_path / "second", dtype)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    original, back = load_run(run), load_run(tmp_path / "back")
    assert (back.step, back.meta) == (original.step, original.meta)
    assert dataclasses.replace(back.config, run=original.config.run) == original.config
    if dtype == "float32":
        same_params(run, tmp_path / "back")


def test_what_is_written(sandwich: Path) -> None:
    settings, tensors = json.loads((sandwich / "config.json").read_text()), arrays_of(sandwich)
    assert settings["model_type"] == "huginn_raven" and settings["torch_dtype"] == "float32"
    assert settings["init_values"]["std"] == pytest.approx((2 / (5 * 32)) ** 0.5)
    assert settings["init_values"]["embed_scale"] == 32**0.5 and settings["mean_backprop_depth"] == 2
    assert "tie_word_embeddings" not in settings and "rope_theta" not in settings
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])
    assert tensors["freqs_cis"].shape == (1, 32, 1, 4, 2)
    assert tensors["transformer.core_block.1.attn.qk_bias"].shape == (2, 1, 4, 8)
    assert tensors["transformer.coda.0.mlp.fc.weight"].shape == (48, 32)
    angle = 5 * 50_000 ** (-1 / 4)  # of the second pair at the sixth place
    np.testing.assert_allclose(tensors["freqs_cis"][0, 5, 0, 1], [np.cos(angle), np.sin(angle)], rtol=1e-6)
    card = (sandwich / "README.md").read_text()
    assert "modeling_huginn.py" in card and "num_steps" in card and "7 optimizer steps" in card


def test_several_files_with_an_index(run: Path, exported: Path, tmp_path: Path) -> None:
    folder = write(run, tmp_path / "sharded", shard_bytes=30_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    import_run(folder, tmp_path / "back")
    same_params(run, tmp_path / "back")


def test_published_defaults_and_keys_of_no_effect(sandwich: Path, tmp_path: Path) -> None:
    """Keys that say what is the default can go, and so can everything of ours; others don't matter."""
    folder = Path(shutil.copytree(sandwich, tmp_path / "folder"))
    left_out = ("tie_embeddings", "qk_bias", "norm_eps", "rope_base", "init_values", "num_key_value_heads", "n_heads")
    left_out += ("padded_vocab_size", "state_init", "block_class_name", "torch_dtype", "training_run", "block_size")
    left_out += ("n_layers_in_recurrent_block", "mean_recurrence")
    changes = {"tie_word_embeddings": False, "rope_scaling": {"type": "linear"}, "head_dim": 3, "n_layers": 99}
    changes |= {"n_layers_in_recurrent_block": 2, "num_attention_heads": 4}
    change(folder, **(dict.fromkeys(left_out) | changes))
    import_run(folder, tmp_path / "back")
    back = load_run(tmp_path / "back")
    assert back.config.model == dataclasses.replace(HUGINN["huginn"], depth=32)
    assert (back.step, back.config.data.sequence_length) == (0, 4096)
    assert back.config.data.tokenizer == str(folder / "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    change(folder, block_size=17, dtype="bfloat16")
    import_run(folder, tmp_path / "bytes")
    found = load_run(tmp_path / "bytes").config.data
    assert (found.tokenizer, found.sequence_length) == ("bytes", 17)
    write(tmp_path / "bytes", tmp_path / "again")  # its tokenizer is known
    same_params(tmp_path / "bytes", tmp_path / "back")


def test_changed_settings_count_more_than_the_run_s(copy: Path, tmp_path: Path) -> None:
    std = 0.5
    change(copy, mean_recurrence=9, init_values={"std": std, "embed_scale": 2.0})
    import_run(copy, tmp_path / "back")
    config = load_run(tmp_path / "back").config
    assert config.model == dataclasses.replace(HUGINN["huginn"], depth=9, embedding_scale=2.0, state_std=1.0)
    assert config.data.task == "boolean"


# Refusals.


def lost(name: str):
    return lambda tensors: tensors.pop(name)


def no_table(tensors: dict) -> None:
    del tensors["transformer.wte.weight"], tensors["lm_head.weight"]


def other_head(tensors: dict) -> None:
    tensors["lm_head.weight"][3, 5] += 1e-6


def half_a_layer(tensors: dict) -> None:
    del tensors["transformer.coda.0.norm_3.weight"]


def more_biases(tensors: dict) -> None:
    tensors["transformer.adapter.bias"] = np.zeros(32, np.float32)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (no_table, "transformer.wte.weight is missing"),
        (lost("transformer.core_block.1.mlp.fc.weight"), "transformer.core_block.1.mlp.fc.weight is missing"),
        (lost("transformer.prelude.0.attn.qk_bias"), "transformer.prelude.0.attn.qk_bias is missing"),
        (half_a_layer, "transformer.coda.0.norm_3.weight is missing"),
        (other_head, "lm_head.weight differs from transformer.wte.weight"),
        (more_biases, "transformer.adapter.bias is not part of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(copy: Path, tmp_path: Path, capsys, alter, message: str) -> None:
    tensors = arrays_of(copy)
    alter(tensors)
    settings = json.loads((copy / "config.json").read_text())
    refused(write_folder(tmp_path / "altered", tensors, settings), tmp_path, capsys, message)


def test_one_of_two_tied_tensors_is_enough_and_of_others_it_is_not(sandwich: Path, tmp_path: Path, capsys) -> None:
    settings = json.loads((sandwich / "config.json").read_text())
    import_run(sandwich, tmp_path / "both")
    for name in ("lm_head.weight", "transformer.wte.weight"):
        tensors = arrays_of(sandwich)
        del tensors[name], tensors["freqs_cis"]
        folder = write_folder(tmp_path / name, tensors, settings)
        import_run(folder, tmp_path / f"{name}-run")
        same_params(tmp_path / f"{name}-run", tmp_path / "both")
        change(folder, tie_embeddings=False)
        refused(folder, tmp_path, capsys, f"the tensor {name} is missing")


def refused(folder: Path, place: Path, capsys, message: str) -> None:
    """One line on stderr, exit code 2, nothing left behind; from Python the same error."""
    before = sorted(place.iterdir())
    capsys.readouterr()
    assert main(["import", str(folder), str(place / "refused")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert sorted(place.iterdir()) == before
    with pytest.raises(UserError):
        dreamer_jax.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "type 'llama'"),
        ({"injection_type": "add"}, "injection_type is 'add'"),
        ({"state_init": "zero"}, "state_init is 'zero'"),
        ({"nonlin_name": "GELU"}, "nonlin_name is 'GELU'"),
        ({"mlp_class_name": "BaseMLP"}, "mlp_class_name is 'BaseMLP'"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name is 'LayerNorm'"),
        ({"block_class_name": "PreNormBlock"}, "block_class_name is 'PreNormBlock'"),
        ({"bias": True}, "bias is True"),
        ({"test_time_noise": 0.1}, "test_time_noise is 0.1"),
        ({"initial_state_mode": "embedding"}, "initial_state_mode is 'embedding'"),
        ({"qk_bias": False}, "qk_bias is not part of the model"),
        ({"num_key_value_heads": 2}, "2 key heads for 4 query heads"),
        ({"n_heads": 5}, "n_heads 5 does not divide n_embd 32"),
        ({"n_embd": 64}, "has shape"),
        ({"n_embd": "32"}, "n_embd can't be '32'"),
        ({"norm_eps": 10**400}, "norm_eps can't be"),
        ({"tie_embeddings": 1}, "tie_embeddings can't be 1"),
        ({"n_layers_in_prelude": 2}, "transformer.prelude.1.norm_1.weight is missing"),
        ({"n_layers_in_coda": 1 << 30}, "n_layers_in_coda can't be 1073741824"),
        ({"n_layers_in_recurrent_block": 0}, "model.core_layers: 0 is too small"),
        ({"init_values": {"std": 0.0}}, "must be more than zero"),
        ({"init_values": [1]}, "init_values can't be [1]"),
        ({"training_run": {"step": -1}}, "training_run is damaged"),
        ({"training_run": {"config": {"model.depht": 3}}}, "unknown setting 'model.depht'"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused(copy, tmp_path, capsys, changes, message: str) -> None:
    change(copy, **changes)
    refused(copy, tmp_path, capsys, message)


def test_scaled_rotations_are_refused(tmp_path: Path, capsys) -> None:
    folder = write(huginn_run(tmp_path / "run", HUGINN["llama"]), tmp_path / "folder")
    change(folder, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    refused(folder, tmp_path, capsys, "rope_scaling is of type 'yarn'")
    change(folder, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    refused(folder, tmp_path, capsys, "low_freq_factor is missing")
    change(folder, rope_scaling=None, rope_theta=None)
    refused(folder, tmp_path, capsys, "rope_theta is missing")


def test_truncated_files_are_refused(copy: Path, tmp_path: Path, capsys) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(copy, tmp_path, capsys, "truncated")
    path.unlink()
    refused(copy, tmp_path, capsys, "has no model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "branch_norm", "coda_norm": False}, "model.form branch_norm"),
        ({"queries": "norm"}, "model.queries norm"),
        ({"coda_norm": False}, "model.coda_norm false with model.form sandwich"),
        ({"kv_heads": 2}, "model.kv_heads 2"),
        ({"head_size": 16}, "model.head_size 16"),
    ],
)
def test_models_without_a_place_in_the_form_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_model(dataclasses.replace(HUGINN["huginn"], **changes))


@pytest.mark.slow
def test_nothing_is_left_of_a_model_without_a_place(tmp_path: Path) -> None:
    run = huginn_run(tmp_path / "run", dataclasses.replace(HUGINN["huginn"], coda_norm=False))
    with pytest.raises(UserError, match="no place"):
        write(run, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# What others have published.


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def published(request, tmp_path_factory):
    """(folder, official outputs, said) of the tiny Huginn."""
    arrays, said = official_outputs("huginn_tiny")
    tensors = {name[2:]: arrays[name].astype(request.param) for name in arrays.files if name.startswith("w/")}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors["freqs_cis"] = rotations((1, 128, 1, 8, 2), 5e4).astype(request.param)
    settings = said["config"] | {"model_type": "huginn_raven", "torch_dtype": request.param}
    return write_folder(tmp_path_factory.mktemp(request.param) / "folder", tensors, settings), arrays, said


@pytest.mark.slow_but("float32")
def test_the_published_form_gives_the_official_outputs(published, tmp_path: Path) -> None:
    folder, arrays, _ = published
    model = dreamer_jax.load(folder)
    assert model.config.data.sequence_length == 128 and model.config.model.gradient_recurrences == 4
    dtype = model.config.model.dtype
    for depth in (1, 2) if dtype == "float32" else ():
        logits = model.logits(arrays["fwd/input_ids"], depth, arrays["fwd/s0"])
        np.testing.assert_allclose(logits, arrays[f"fwd/logits_r{depth}"], atol=1e-4)
    import_run(folder, tmp_path / "run")
    write(tmp_path / "run", tmp_path / "again", dtype)
    ours, theirs = arrays_of(tmp_path / "again"), arrays_of(folder)
    assert set(ours) == set(theirs)
    for name in set(theirs) - {"freqs_cis"}:
        assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes(), name
    import_run(tmp_path / "again", tmp_path / "back")
    same_params(tmp_path / "run", tmp_path / "back")


@pytest.fixture(scope="module")
def retrofitted(tmp_path_factory):
    """(folder, official outputs): a Llama cut into 2/4/2 layers, put together as the conversion says."""
    arrays, said = official_outputs("retrofit_llama_tiny")
    tensors = {"transformer.adapter.weight": arrays["conv/transformer.adapter.weight"]}
    for name, sources in said["mapping target <- source"].items():
        if name not in tensors:
            sources = sources["cat along dim 0"] if isinstance(sources, dict) else sources
            tensors[name] = np.concatenate([arrays[f"llama/w/{source}"] for source in sources])
    return write_folder(tmp_path_factory.mktemp("retrofit") / "folder", tensors, said["config"]), arrays


def test_retrofitted_models_give_the_official_outputs(retrofitted, tmp_path: Path, capsys) -> None:
    folder, arrays = retrofitted
    model, tokens, s0 = dreamer_jax.load(folder), arrays["input_ids"], arrays["s0"]
    found = model.config.model
    assert (found.form, found.queries, found.coda_norm, found.tied_head) == ("pre_norm", "plain", False, False)
    assert (found.kv_heads, found.rope_base, found.norm_epsilon) == (2, 1000.0, 1e-5)
    assert found.embedding_scale == 1.0 and found.state_std == pytest.approx(0.0087039, rel=1e-4)
    np.testing.assert_allclose(model.logits(tokens, 1, s0), arrays["conv/logits_r1"], atol=1e-4)
    np.testing.assert_allclose(model.states(tokens, 1, s0)[1], arrays["conv/latent_r1"], atol=1e-4)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    assert "tokenizer: bytes, as the folder has no tokenizer.json" in capsys.readouterr().out
    torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
    pytest.importorskip("transformers", reason=WHY_SKIPPED)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    ours, theirs = arrays_of(tmp_path / "again"), arrays_of(folder)
    assert {name: its.tobytes() for name, its in ours.items()} == {name: its.tobytes() for name, its in theirs.items()}
    from dreamer_jax.export.huginn_sides import torch_model

    twin = torch_model(tmp_path / "again")
    out = twin(torch.tensor(tokens), input_states=torch.tensor(s0), num_steps=1, output_hidden_states=True)
    prelude, latent, _ = out.hidden_states
    for actual, key in ((prelude, "prelude_out"), (latent, "latent_r1"), (out.logits, "logits_r1")):
        np.testing.assert_allclose(actual, arrays[f"conv/{key}"], atol=1e-4)


def test_another_rule_of_the_cache(sandwich):
    """Chosen while loading; the model is the same otherwise."""
    model = dreamer_jax.load(sandwich, cache="always-last")
    assert model.config.model == dataclasses.replace(dreamer_jax.load(sandwich).config.model, cache="always-last")
    with pytest.raises(UserError, match="unknown rule 'newest'"):
        dreamer_jax.load(sandwich, cache="newest")
