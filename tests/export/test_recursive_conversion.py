"""Pretrained stacks as recursive transformers: official outputs, folders of transformers itself, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.export.recursive_conversion import config_of, params_of, tied_layers
from dreamer_jax.export.sources import read_source
from dreamer_jax.families import build, forward
from tests.export.cases import write_folder
from tests.export.source_cases import SETTINGS, llama_tensors, transformers_model
from tests.families.plain_recursive import PlainRecursive, wide
from tests.outside import official_outputs

ORDERS = {  # (loops, sharing, init) -> where 6 layers go
    (2, "cycle", "stepwise"): [(0, (0, 3)), (2, (1, 4)), (5, (2, 5))],
    (3, "sequence", "lower"): [(0, (0, 1, 2)), (1, (3, 4, 5))],
    (2, "middle_cycle", "upper"): [(3, (1, 3)), (4, (2, 4))],
    (2, "middle_sequence", "average"): [(None, (1, 2)), (None, (3, 4))],
    (4, "middle_cycle", "stepwise"): [(1, (1, 2, 3, 4))],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama") / "folder", llama_tensors(), SETTINGS)


def converted(source, loops, sharing="cycle", init: Any = "stepwise", rank: Any = 0, share_norms=None):
    config = config_of(source, loops, sharing, rank, share_norms)
    return dataclasses.replace(config, dtype="float32"), params_of(source, config, tied_layers(source, config, init))


def plain_logits(config, params, tokens):
    model = wide(params)
    return np.stack([PlainRecursive(config, model).row(row)[0] for row in tokens])


@functools.cache
def compiled(config):
    family = build(config)

    def logits(params, tokens):
        passed = forward(family, params, {}, {"tokens": tokens})
        return family.logits(params, family.readout(params, passed.state, passed.memory, passed.context)[0])

    return jax.jit(logits, compiler_options={"xla_backend_optimization_level": 0})


# Official outputs.


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """Outputs, and their source as a folder."""
    arrays, said = official_outputs("relaxed_recursive_tiny")
    said = said["config"]
    tensors = {name[2:]: arrays[name] for name in arrays.files if name.startswith("w/")}
    folder = write_folder(tmp_path_factory.mktemp("official") / "llama", tensors, {"model_type": "llama", **said})
    return {name: arrays[name] for name in arrays.files}, read_source(folder)


@pytest.mark.parametrize("init", ["stepwise", "average"])
def test_official_sharing_and_decomposition(official, init):
    """Shared weights, products A B, and logits without LoRA, at rank 4 with scale 1 and 2, and at full rank; norms are
    tied there."""
    arrays, source = official
    tokens, case = arrays["input_ids"], f"cycle_B2_{init}"
    config, params = converted(source, 2, init=init)
    np.testing.assert_allclose(plain_logits(config, params, tokens), arrays[f"{case}/logits_shared"], atol=1e-4)
    for k in range(3) if init == "average" else ():
        its, theirs = params["layers"][str(k)], f"{case}/shared_w/layers_{k}_{k + 3}"
        qkv = [arrays[f"{theirs}/self_attn.{name}_proj.weight"] for name in "qkv"]
        np.testing.assert_allclose(its["attention"]["qkv"], np.concatenate(qkv).T, atol=1e-6)
        np.testing.assert_allclose(its["feed_forward"]["out"], arrays[f"{theirs}/mlp.down_proj.weight"].T, atol=1e-6)
        np.testing.assert_allclose(its["mlp_norm"]["scale"], arrays[f"{theirs}/post_attention_layernorm.weight"])
    config, params = converted(source, 2, init=init, rank=4, share_norms=True)
    found = plain_logits(config, params, tokens)
    np.testing.assert_allclose(found, arrays[f"{case}/svd_r4_s1/logits"], atol=5e-4)
    np.testing.assert_allclose(compiled(config)(params, tokens), found, atol=1e-4)
    products = [name for name in arrays if name.startswith(f"{case}/svd_r4_s1/BA/")]
    for name in products:
        l, _, kind = name.rpartition("/")[2].removesuffix("_proj").partition("_")
        ours = {"o": "out", "down": "out"}.get(kind, kind)
        half = params["relaxation"][str(int(l) % 3)]["attention" if kind in "qkvo" else "feed_forward"][f"{ours}_low"]
        np.testing.assert_allclose((half["down"] @ half["up"])[int(l) // 3].T, arrays[name], atol=1e-5)
    assert len(products) == (42 if init == "average" else 4)
    for tree in (params["relaxation"][k][half] for k in "012" for half in ("attention", "feed_forward")):
        for name in tree:
            tree[name] = {**tree[name], "up": 2 * tree[name]["up"]}
    found = plain_logits(config, params, tokens)
    np.testing.assert_allclose(found, arrays[f"{case}/svd_r4_s2/logits"], atol=5e-4)
    config, params = converted(source, 2, init=init, rank="full", share_norms=True)
    found = plain_logits(config, params, tokens)
    np.testing.assert_allclose(found, arrays[f"{case}/svd_rfull_s1/logits"], atol=5e-4)


@pytest.mark.parametrize(("loops", "sharing"), [(2, "cycle"), (3, "sequence"), (2, "middle_sequence")])
def test_full_rank_with_the_norms_of_the_source_is_the_source(official, loops, sharing):
    """Every W to 1e-6, and the logits of the original to 1e-4; with tied norms they err by more than 1."""
    arrays, source = official
    config, params = converted(source, loops, sharing, rank="full")
    assert config.rank == 32 and not config.share_norms
    model = PlainRecursive(config, wide(params))
    for l, (k, b) in enumerate(model.order(), int(config.ends)):
        its, original = model.weights(k, b), source.layer(l)
        for half in ("attention", "feed_forward"):
            for name in original[half]:
                np.testing.assert_allclose(its[half][name], original[half][name], atol=1e-6)
    found = plain_logits(config, params, arrays["input_ids"])
    np.testing.assert_allclose(found, arrays["logits_original"], atol=1e-4)
    tied = plain_logits(*converted(source, 2, rank="full", share_norms=True), arrays["input_ids"])
    assert np.abs(tied - arrays["logits_original"]).max() > 1


def test_one_loop_is_the_original(official):
    """Rank 0 and B = 1, whichever way the layers are shared."""
    arrays, source = official
    for sharing in ("cycle", "middle_sequence"):
        config, params = converted(source, 1, sharing)
        np.testing.assert_allclose(
            plain_logits(config, params, arrays["input_ids"]), arrays["logits_original"], atol=1e-4
        )


def test_another_official_llama(official, tmp_path):
    """The source of the retrofitted model: 8 layers, its own base of rotations; as one loop, and at full rank."""
    arrays, said = official_outputs("retrofit_llama_tiny")
    said = said["llama config"]
    tensors = {name[8:]: arrays[name] for name in arrays.files if name.startswith("llama/w/")}
    source = read_source(write_folder(tmp_path / "llama", tensors, {"model_type": "llama", **said}))
    for its in (converted(source, 1), converted(source, 3, "middle_cycle", "average", "full")):
        np.testing.assert_allclose(plain_logits(*its, arrays["input_ids"]), arrays["llama/logits"], atol=1e-4)


# Which layers are taken.


@pytest.mark.parametrize("order", ORDERS, ids=lambda its: "-".join(map(str, its)))
def test_layers_that_are_chosen(llama, order):
    loops, sharing, init = order
    source = read_source(llama)
    assert [tuple(its) for its in tied_layers(source, config_of(source, loops, sharing), init)] == ORDERS[order]


def test_equal_layers_make_every_way_to_start_the_same(tmp_path):
    source = read_source(write_folder(tmp_path / "equal", llama_tensors(equal=True), SETTINGS))
    _, wanted = converted(source, 2, init="stepwise", rank=2)
    for init in ("average", "lower", "upper"):
        _, found = converted(source, 2, init=init, rank=2)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found["layers"], wanted["layers"])
        assert max(np.abs(leaf["up"]).max() for leaf in found["relaxation"]["0"]["attention"].values()) < 1e-5


def test_parameters_are_those_of_the_family(llama):
    """The same tree and shapes as fresh ones, in every order of layers, with and without LoRA and norms of its own."""
    source = read_source(llama)
    settings = [
        ("cycle", 2, True),
        ("sequence", 0, False),
        ("middle_cycle", 0, True),
        ("middle_sequence", "full", False),
    ]
    for sharing, rank, share_norms in settings:
        config, params = converted(source, 2, sharing, rank=rank, share_norms=share_norms)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nn.meta.unbox(build(config).boxed))


# Folders that transformers writes.


@pytest.mark.parametrize(("kind", "sharing"), [("Llama", "cycle"), ("Qwen3", "sequence"), ("Olmo2", "middle_cycle")])
def test_folders_of_transformers_itself(tmp_path, capsys, kind, sharing):
    """Logits of the original, from one loop and from full rank; then as a run, in shards, with what is said."""
    torch, model = transformers_model(kind)
    model.save_pretrained(tmp_path / "folder", max_shard_size="5MB" if kind == "Llama" else "20KB")
    tokens = np.random.default_rng(0).integers(0, 259, (2, 9)).astype(np.int32)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens).long()).logits.numpy()
    source = read_source(tmp_path / "folder")
    np.testing.assert_allclose(plain_logits(*converted(source, 1, sharing), tokens), wanted, atol=1e-4)
    config, params = converted(source, 2, sharing, rank="full")
    np.testing.assert_allclose(compiled(config)(params, tokens), wanted, atol=1e-4)
    if kind != "Llama":
        assert len({its.path for its in source.tensors.values()}) > 1
        return
    words = ["convert", str(tmp_path / "folder"), str(tmp_path / "run"), "--to", "recursive", "--loops", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Llama, 4 layers" in said and "shared layer 3: layer 3, in place of 3" in said
    found = dreamer_jax.load(tmp_path / "run")
    np.testing.assert_allclose(found.logits(tokens), wanted, atol=1e-4)
    assert found.config.data.sequence_length == 64
    # As many older ones are: float16, computed in float32, which rounds nothing.
    model.half().save_pretrained(tmp_path / "half")
    assert main(["convert", str(tmp_path / "half"), str(tmp_path / "of_half"), *words[3:]]) == 0
    found = dreamer_jax.load(tmp_path / "of_half")
    again = type(model).from_pretrained(tmp_path / "half", dtype=torch.float32)  # .float() would keep rounded rotations
    with torch.no_grad():
        rounded = again(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(found.logits(tokens), rounded, atol=1e-4)
    assert found.config.model.dtype == "float32" and np.abs(rounded - wanted).max() > 5e-4


# What is refused.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "gpt2"}, "a model of type 'gpt2'; conversions read llama, qwen3, olmo2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8}}, "rope_scaling is of type 'yarn'; only llama3 and"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "linear", "factor": 8}},
            "rope_scaling is of type 'linear'",
        ),
        ({"attention_bias": True}, "attention_bias is True; only False can be computed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types has 'sliding_attention'"),
        ({"layer_types": 5}, "layer_types has 5; only full_attention"),
        ({"model_type": ["llama"]}, "a model of type ['llama']; conversions read"),
        ({"rope_parameters": 5}, "rope_parameters is 5; only one rotation of all layers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, "only one rotation of all"),
        ({"hidden_size": "8"}, "hidden_size can't be '8'; it is a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"intermediate_size": 7}, "mlp.gate_proj.weight has shape (6, 8) where config.json asks for (7, 8)"),
        ({"num_hidden_layers": 7}, "the tensor model.layers.6.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 5}, "model.layers.5.input_layernorm.weight is not part of the model"),
        ({"model_type": "qwen3", "head_dim": 4}, "the tensor model.layers.0.self_attn.q_norm.weight is missing"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight isn't"),
    ],
)
def test_folders_that_do_not_fit_are_refused(llama, tmp_path, capsys, settings, said):
    folder = write_folder(tmp_path / "folder", llama_tensors(), SETTINGS | settings)
    refuses(capsys, [str(folder), str(tmp_path / "run")], said)


@pytest.mark.parametrize("beside", [1e4, None])
def test_the_rotation_that_transformers_would_take(tmp_path, beside):
    """Version 5 writes its base into rope_parameters, and reads it there before a rope_theta of an older file."""
    settings = SETTINGS | {"rope_theta": beside, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    folder = write_folder(tmp_path / "folder", llama_tensors(), settings)
    assert read_source(folder).rope_base == 5e5


def test_weights_that_are_no_numbers_are_refused(tmp_path, capsys):
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    folder, out = write_folder(tmp_path / "folder", tensors, SETTINGS), tmp_path / "run"
    said = "model.layers.1.mlp.up_proj.weight holds numbers that aren't finite"
    refuses(capsys, [str(folder), str(out), "--rank", "2"], said)
    refuses(capsys, [str(folder), str(out)], said)
    assert not out.exists()


def test_a_tokenizer_with_more_ids_than_the_model_has_tokens_is_refused(tmp_path, capsys):
    """Begin and end of text count, unless the folder says which tokens they are: then it trains and generates."""
    tokenizers = pytest.importorskip("tokenizers")
    folder, out = write_folder(tmp_path / "folder", llama_tensors(), SETTINGS), tmp_path / "run"
    words = {"<|im_start|>": 0, "<|im_end|>": 1} | {f"w{i}": i for i in range(2, 11)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    capsys.readouterr()
    refuses(capsys, [str(folder), str(out)], "begin and end of text it has 13 ids, and the model 11 tokens; name its")
    assert not out.exists()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}')
    assert main(["convert", str(folder), str(out), "--to", "recursive"]) == 0
    assert dreamer_jax.load(out).encode("w5") == [0, 5]
    assert f"tokenizer: {folder / 'tokenizer.json'}\n" in capsys.readouterr().out


def test_a_begin_of_text_that_is_new_to_the_model_is_said(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_folder(tmp_path / "folder", llama_tensors(), SETTINGS)
    words = {f"w{i}": i for i in range(9)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    assert main(["convert", str(folder), str(tmp_path / "run"), "--to", "recursive"]) == 0
    assert "it names no begin of text, and 9, which all texts begin with now, is new" in capsys.readouterr().out


def refuses(capsys, words, said):
    assert main(["convert", *words, "--to", "recursive"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error, error


def test_words_and_files_that_do_not_fit_are_refused(llama, tmp_path, capsys):
    out = str(tmp_path / "run")
    refuses(capsys, [str(llama), out, "--loops", "4"], "--loops 4 does not divide 6 layers")
    words = ["--loops", "3", "--sharing", "middle_cycle"]
    refuses(capsys, [str(llama), out, *words], "the 4 layers between the first and the last")
    refuses(capsys, [str(llama), out, "--rank", "half"], "'half' is neither a number of 0 or more nor `full`")
    refuses(capsys, [str(tmp_path / "nowhere"), out], "of config.json and safetensors, of Llama, Qwen3, OLMo 2")
    (tmp_path / "there").mkdir()
    # Said before anything is read: the folder needn't even be there.
    for folder in (llama, tmp_path / "nowhere"):
        refuses(capsys, [str(folder), str(tmp_path / "there")], "exists; name a path that doesn't")
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated"):
        read_source(copy)
    assert not Path(out).exists()
