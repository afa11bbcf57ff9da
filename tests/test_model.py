"""The front door, `dreamer_jax.load`: a run, a checkpoint in it, an exported folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config import Config
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.inference import Engine, fold
from dreamer_jax.model import Model
from dreamer_jax.runs.models import TrainedModel, load_run
from tests.export.cases import make_run
from tests.families.cases import TINY_MODELS

BYTES = ByteTokenizer()
TEXTS = ["1 & 0", "a longer one"]
BATCH = {"tokens": jax.numpy.asarray([[1, 2, 3, 4]])}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def model(run):
    return dreamer_jax.load(run)


@pytest.fixture(scope="module")
def exported(run) -> Path:
    pytest.importorskip("torch")
    folder = run.parent / "exported"
    assert main(["export", str(run), str(folder), "--dtype", "float32", "--keep-shared"]) == 0
    return folder


def test_importing_the_package_takes_no_jax():
    code = "import sys, dreamer_jax; assert callable(dreamer_jax.__getattr__); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError):
        _ = dreamer_jax.nothing


def test_logits_states_and_scores_agree(model):
    """Of one row: the head of the last state gives the logits, and those give the scores."""
    tokens = model.encode(TEXTS[0])
    assert tokens == [BYTES.bos, *TEXTS[0].encode()]
    depth, hidden = model.config.model.depth, model.config.model.hidden_size
    logits, states = model.logits([tokens]), model.states([tokens])
    assert logits.shape == (1, len(tokens), 259) and states.shape == (depth + 1, 1, len(tokens), hidden)
    embedding = np.asarray(model.params["embedding"])[tokens]
    np.testing.assert_allclose(states[0, 0], embedding, rtol=1e-6, err_msg="before the first depth")
    logprobs = jax.nn.log_softmax(logits[0])[np.arange(len(tokens) - 1), tokens[1:]]
    scores = model.score(TEXTS[0])[0]
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-5)
    np.testing.assert_array_equal(scores.greedy, logits[0, :-1].argmax(-1) == np.array(tokens[1:]))


def test_states_are_those_of_every_depth(model):
    """At the trained depth and at another: what depth after depth leaves where the model decodes."""
    tokens = np.array([model.encode(TEXTS[1])])
    places = np.arange(tokens.shape[1])[None]
    for depth in (model.config.model.depth, 2):
        folded = fold(model.config.model, model.params, model.model_state, depth)
        flight, slots = folded.enter(tokens, places, folded.empty_slots(1, tokens.shape[1]))
        found = model.states(tokens, depth)
        for l in range(depth):
            np.testing.assert_allclose(found[l], flight.state, atol=1e-5)
            flight, slots = folded.step(flight, places, l, slots)
        np.testing.assert_allclose(found[depth], flight.state, atol=1e-5)
        np.testing.assert_allclose(
            folded.logits(folded.leave(flight, places, slots)[0]), model.logits(tokens, depth), atol=1e-4
        )


def test_generates_from_texts_and_tokens(run, model):
    """What the engine generates from the same tokens, at any depth; one text needs no list."""
    rows = [model.encode(text) for text in TEXTS]
    for depth in (None, 1):
        expected = Engine.of(load_run(run), depth).generate(rows, 6, stop_ids=[BYTES.eos])
        for prompts in (TEXTS, rows):
            found = model.generate(prompts, 6, depth=depth)
            assert [text.tokens for text in found] == [row.tokens for row in expected]
            assert [text.text for text in found] == [BYTES.decode(row.tokens) for row in expected]
    assert model.generate(TEXTS[0], 6)[0] == model.generate(TEXTS, 6)[0]
    drawn = [model.generate(TEXTS, 6, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [(np.int64, 3), (jax.numpy.int32, -1)])
def test_depths_of_numpy_and_jax_count_as_pythons(model, kind, more):
    """Above and below the trained depth, whichever comes first."""
    tokens, depth = [model.encode(TEXTS[0])], model.family.depth + more
    number = kind(depth)
    jax.clear_caches()  # which know no difference between the two
    logits, states = model.logits(tokens, number), model.states(tokens, number)
    state = forward(model.family, model.params, model.model_state, BATCH, number).state
    jax.clear_caches()
    np.testing.assert_array_equal(logits, model.logits(tokens, depth))
    assert states.shape == (depth + 1, 1, len(tokens[0]), model.config.model.hidden_size)
    np.testing.assert_array_equal(state, forward(model.family, model.params, model.model_state, BATCH, depth).state)
    with pytest.raises(UserError, match="depth 0: must be 1 or more"):
        forward(model.family, model.params, model.model_state, BATCH, kind(0))


@pytest.mark.slow
def test_a_string_stands_for_a_list_of_one(model):
    long = model.generate(TEXTS, 12, temperature=3.0, seed=4)
    stop = long[0].text[2:4]
    assert model.generate(TEXTS, 12, temperature=3.0, seed=4, stop=stop) == model.generate(
        TEXTS, 12, temperature=3.0, seed=4, stop=[stop]
    )
    np.testing.assert_array_equal(model.embed(TEXTS[0]), model.embed(TEXTS[:1]))


@pytest.mark.slow
def test_a_mesh_as_jax_makes_it(run, model):
    """Whose axes are explicit by default."""
    shared = dreamer_jax.load(run, mesh=jax.make_mesh((2,), ("data",)))
    assert [text.tokens for text in shared.generate(TEXTS, 6)] == [text.tokens for text in model.generate(TEXTS, 6)]
    with pytest.raises(UserError, match=r"mesh: 2 is none; make one, such as jax\.make_mesh"):
        dreamer_jax.load(run, mesh=2).generate(TEXTS, 6)


def test_a_checkpoint_and_a_precision(run, model):
    step = dreamer_jax.load(run / "checkpoints" / "7", dtype="bfloat16")
    assert step.step == 7 and model.step == 7
    tokens = [step.encode(TEXTS[0])]
    assert step.states(tokens).dtype == "bfloat16"
    found, expected = step.logits(tokens), model.logits(tokens)
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.05 * float(np.abs(expected).max()))


@pytest.mark.slow
def test_an_exported_folder_is_the_run_it_came_from(exported, model):
    found = dreamer_jax.load(exported)
    jax.tree.map(np.testing.assert_array_equal, (found.params, found.model_state), (model.params, model.model_state))
    assert found.config.model == model.config.model and repr(found) == repr(model)
    assert found.generate(TEXTS, 4) == model.generate(TEXTS, 4)
    with pytest.raises(UserError, match="holds one step"):
        dreamer_jax.load(exported, average=2)


def test_an_exported_folder_brings_its_tokenizer(exported, tmp_path):
    """Where the run's own file is gone."""
    pytest.importorskip("tokenizers")
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    content = json.loads((copy / "config.json").read_text())
    content["training_run"]["config"]["data.tokenizer"] = "gone.model"
    (copy / "config.json").write_text(json.dumps(content))
    model = dreamer_jax.load(copy)
    for text in (*TEXTS, "über 🎉 <|begin_of_text|>"):
        assert model.encode(text) == [BYTES.bos, *text.encode()]
    assert (model.tokenizer.eos, model.tokenizer.pad) == (BYTES.eos, BYTES.pad)


@pytest.mark.parametrize("tokens", [[[1, 2], [1]], [1, 2], [[0.5]], "abc", [], [[]]])
def test_tokens_are_rows_of_one_length(model, tokens):
    with pytest.raises(UserError, match="rows of one length"):
        model.logits(tokens)


def test_what_can_not_be_asked(model, run):
    with pytest.raises(UserError, match="outside the model's vocabulary of 259"):
        model.states([[259]])
    with pytest.raises(UserError, match="depth 0: must be 1 or more"):
        model.logits([[1]], 0)
    for dtype in ("float16", "float64", "f32"):
        with pytest.raises(UserError, match=f"dtype: .*{dtype}"):
            dreamer_jax.load(run, dtype=dtype)
    with pytest.raises(UserError, match="cache: models of the family dreamer have one rule"):
        dreamer_jax.load(run, cache="latest")
    for said, words in (
        ("max_tokens 1.5: must be a whole number", {"max_tokens": 1.5}),
        ("max_tokens 0: must be 1 or more", {"max_tokens": 0}),
        ("batch_size 0: must be 1 or more", {"batch_size": 0}),
    ):
        with pytest.raises(UserError, match=said):
            model.generate(["a"], **words)
    for said, words in (
        ("stop None: must be a list of texts", {"stop": None}),
        (r"stop \[1\]: must be a list of texts", {"stop": [1]}),
        ("temperature a: must be a number", {"temperature": "a"}),
    ):
        with pytest.raises(UserError, match=said):
            model.generate(["a"], **words)
    with pytest.raises(UserError, match="every text must be a str"):
        model.embed([[1, 2]])
    with pytest.raises(UserError, match=r"average 1\.5: must be a whole number"):
        dreamer_jax.load(run, average=1.5)
    with pytest.raises(UserError, match="dtype: expected one of"):
        dreamer_jax.load(run, dtype=np.float32)
    for asked in (model.score, model.embed):
        with pytest.raises(UserError, match="batch_size -1: must be 1 or more"):
            asked(["some text"], batch_size=-1)
    for rows in ([1, 2, 3], [[1, 2.5]]):
        for asked in (model.score, model.generate):
            with pytest.raises(UserError, match="is neither a text nor a list of tokens; one prompt of tokens goes in"):
                asked(rows)
    with pytest.raises(UserError, match="not a run directory"):
        dreamer_jax.load(run / "nothing")
    with pytest.raises(UserError, match="no checkpoint of step 8"):
        dreamer_jax.load(run, step=8)


@pytest.mark.slow
def test_states_to_start_from():
    """A number multiplies the model's own draw, an array takes its place; the dreamer of the run has no draw."""
    config = Config(TINY_MODELS["huginn"])
    params, model_state = initialise(build(config.model), jax.random.key(0))
    model = Model(TrainedModel(config, 0, params, model_state, {}), ByteTokenizer)
    tokens = [[5, 7, 9]]
    shape = (1, 3, config.model.hidden_size)
    np.testing.assert_array_equal(model.logits(tokens, initial_state=1), model.logits(tokens))
    zeros = model.logits(tokens, initial_state=0)
    assert np.abs(zeros - model.logits(tokens)).max() > 1e-3
    np.testing.assert_array_equal(model.logits(tokens, initial_state=np.zeros(shape)), zeros)
    np.testing.assert_array_equal(model.states(tokens, initial_state=np.full(shape, 2.0))[0], np.full(shape, 2.0))
    for state in (1j, float("nan"), np.full(shape, np.inf), np.zeros(shape[1:]), "zeros"):
        with pytest.raises(UserError, match=r"must be a finite number or \[B, S, h\] = \[1, 3, "):
            model.logits(tokens, initial_state=state)


def test_a_model_without_its_tokenizer_still_computes(tmp_path):
    """Only texts need one."""
    model = dreamer_jax.load(make_run(tmp_path / "run", "LA", tokenizer="another"))
    assert model.logits([[1, 2]]).shape == (1, 2, 259)
    with pytest.raises(UserError, match="not the tokenizer"):
        model.encode("x")
    layers = model.config.model.depth
    with pytest.raises(UserError, match=f"has {layers} layers and can't be applied at depth {layers + 1}"):
        model.logits([[1, 2]], layers + 1)
