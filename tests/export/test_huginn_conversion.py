"""Pretrained stacks retrofitted with recurrence: official outputs, folders of transformers itself, block influence."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.export.huginn_conversion import Split, config_of, params_of, split_of
from dreamer_jax.export.influence import block_influence, rows_of
from dreamer_jax.export.sources import read_source
from dreamer_jax.families import Drawn, build, forward
from tests.export.cases import write_folder
from tests.export.source_cases import SETTINGS, llama_tensors, transformers_model
from tests.families.test_huginn import plain_forward, to_tensors
from tests.outside import official_outputs


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama") / "folder", llama_tensors(), SETTINGS)


@functools.cache
def compiled(config):
    family = build(config)

    def logits(params, tokens, recurrences):
        passed = forward(family, params, {}, {"tokens": tokens}, Drawn(recurrences, 3))
        return family.logits(params, family.readout(params, passed.state, passed.memory, passed.context)[0])

    return jax.jit(logits, compiler_options={"xla_backend_optimization_level": 0})


def test_official_retrofitted_llama(tmp_path):
    """2 + 4 + 2 of 8 layers: every tensor bit for bit, and the logits of one recurrence with the official adapter."""
    arrays, said = official_outputs("retrofit_llama_tiny")
    tensors = {name[8:]: arrays[name] for name in arrays.files if name.startswith("llama/w/")}
    source = read_source(write_folder(tmp_path / "llama", tensors, {"model_type": "llama", **said["llama config"]}))
    split = split_of(source, 2, 4, 2)
    config, params = dataclasses.replace(config_of(source, split), dtype="float32"), params_of(source, split)
    assert config.state_std == pytest.approx(said["init_values"]["std"], rel=1e-6)
    params["adapter"] = np.ascontiguousarray(arrays["conv/transformer.adapter.weight"].T)
    found = to_tensors(params, config)
    assert set(found) == set(said["mapping target <- source"])
    for name, theirs in said["mapping target <- source"].items():
        if name != "transformer.adapter.weight":
            theirs = theirs["cat along dim 0"] if isinstance(theirs, dict) else theirs
            np.testing.assert_array_equal(found[name], np.concatenate([tensors[its] for its in theirs]), err_msg=name)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    logits = plain_forward(config, wide, arrays["input_ids"], 1, arrays["s0"])
    np.testing.assert_allclose(logits, arrays["conv/logits_r1"], atol=1e-4)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Olmo2"])
def test_every_number_of_recurrences_gives_the_chosen_layers(tmp_path, capsys, kind):
    """Of folders that transformers writes; the state is random, and a random adapter looks at it."""
    torch, model = transformers_model(kind)
    model.save_pretrained(tmp_path / "folder")
    tokens = np.random.default_rng(0).integers(0, 259, (2, 9)).astype(np.int32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[l] for l in (0, 3, 1, 2)])
    with torch.no_grad():
        wanted = model(torch.tensor(tokens).long(), use_cache=False).logits.numpy()
    if kind == "Llama":
        words = ["convert", str(tmp_path / "folder"), str(tmp_path / "run"), "--to", "huginn"]
        assert main([*words, "--prelude", "0-0", "--core", "3,1", "--coda", "2-2"]) == 0
        said = capsys.readouterr().out
        assert "core: layers 3, 1" in said and "dropped: none" in said and "Huginn 1+2x8+1" in said
        loaded = dreamer_jax.load(tmp_path / "run")
        settings: Any = loaded.config.model
        assert settings.curriculum_steps == 250 and settings.embedding_scale == 1
        for recurrences in (1, 3):
            np.testing.assert_allclose(loaded.logits(tokens, depth=recurrences), wanted, atol=1e-4)
        return
    source, split = read_source(tmp_path / "folder"), Split((0,), (3, 1), (2,))
    config, params = dataclasses.replace(config_of(source, split), dtype="float32"), params_of(source, split)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nn.meta.unbox(build(config).shapes[0]))
    for recurrences in (1, 3):
        np.testing.assert_allclose(compiled(config)(params, tokens, recurrences), wanted, atol=1e-4)
    params = params_of(source, split, "random", seed=1)
    one, three = (np.asarray(compiled(config)(params, tokens, r)) for r in (1, 3))
    assert np.abs(one - three).max() > 0.01


def test_layers_that_are_chosen(llama):
    source = read_source(llama)
    assert split_of(source, 1, 2, 1) == ((0,), (3, 4), (5,))  # as 4, 8, 4 of 22 are 0-3, 10-17, 18-21
    assert split_of(source, 0, 6, 0) == ((), (0, 1, 2, 3, 4, 5), ())
    assert split_of(source, 0, (2, 2), (5,)) == ((), (2, 2), (5,))
    assert split_of(source, 1, 2, 1, [0.5, 0.1, 0.4, 0.2, 0.9, 0.3]) == ((0,), (2, 4), (5,))


def test_influence_of_layers_that_are_known(tmp_path):
    """A token's embedding is 3 times a unit vector; layer 1 adds an orthogonal vector of length 3, layer 4 one of
    length 4 that is orthogonal to both; the others add nothing. Cosines are 3 / sqrt(18) and sqrt(18) / sqrt(34)."""
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"] = 3 * np.eye(11, 8, dtype=np.float32)
    for l in range(6):
        for name in ("self_attn.o", "mlp.down"):
            tensors[f"model.layers.{l}.{name}_proj.weight"][:] = 0
    for l, place, length, before in ((1, 6, 3, 3), (4, 7, 4, 6)):
        # One neuron sees the sum of the normed state, which is `before` / rms and as much for all tokens.
        for name in ("gate", "up"):
            tensors[f"model.layers.{l}.mlp.{name}_proj.weight"][0] = 1
        mean_square = (9 if l == 1 else 18) / 8
        seen = before / np.sqrt(mean_square + 1e-6)
        tensors[f"model.layers.{l}.mlp.down_proj.weight"][place, 0] = length / (seen / (1 + np.exp(-seen)) * seen)
    source = read_source(write_folder(tmp_path / "folder", tensors, SETTINGS))
    found = block_influence(source, np.asarray([[0, 1, 2, 3], [5, 4, 2, 0]], np.int32))
    wanted = [0, 1 - 3 / 18**0.5, 0, 0, 1 - (18 / 34) ** 0.5, 0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert split_of(source, 0, 1, 1, found) == ((), (1,), (4,))


def test_rows_of_a_text(llama, tmp_path):
    """Whole rows of the source's longest context, at most 512 tokens, with nothing left over."""
    path = tmp_path / "text"
    path.write_bytes(bytes([1, 2, 3, 4, 5, 6, 7]))
    source = dataclasses.replace(read_source(llama), length=3)
    assert rows_of(source, path).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_what_does_not_fit_is_refused(llama, tmp_path, capsys):
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("abc")
    empty.write_text("")
    select = ["--select", "influence", "--text"]
    cases = [
        (["--core", "2"], "needs --prelude, --core and --coda"),
        (["--prelude", "1", "--core", "0", "--coda", "1"], "--core 0: what is applied again and again"),
        (["--prelude", "2", "--core", "4", "--coda", "1"], "are 7 layers;"),
        (["--prelude", "0-1", "--core", "2", "--coda", "1"], "are all lists of layers (a single one is 3-3)"),
        (["--prelude", "0-1", "--core", "2-4", "--coda", "6-6"], "--coda names layer 6, but the layers of"),
        (["--prelude", "3-1", "--core", "2", "--coda", "1"], "'3-1' is neither a number nor a list of layers"),
        (["--prelude", "1", "--core", "2", "--coda", "1", "--loops", "3"], "--loops is an option of --to recursive"),
        (["--prelude", "1", "--core", "2", "--coda", "1", "--select", "influence"], "are given together"),
        (["--prelude", "0-0", "--core", "2-3", "--coda", "5-5", *select, str(text)], "--select chooses the layers"),
        (["--prelude", "1", "--core", "2", "--coda", "1", "--seed", "3"], "--seed is of --adapter random"),
        (["--prelude", "1", "--core", "2", "--coda", "1", *select, str(tmp_path / "no")], "--text: can't read"),
        (["--prelude", "1", "--core", "2", "--coda", "1", *select, str(empty)], "is empty"),
        (
            ["--prelude", "1", "--core", "2", "--coda", "1", *select, str(text)],
            "gives token 99, but the vocabulary has 11",
        ),
    ]
    for words, said in cases:
        assert main(["convert", str(llama), str(tmp_path / "run"), "--to", "huginn", *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and "Traceback" not in error, error
    assert not (tmp_path / "run").exists()
