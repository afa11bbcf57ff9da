"""Held-out metrics of packed batches against documents one by one, and against greedy answers."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.data import Record
from dreamer_jax.data.packing import assemble, plan_rows
from dreamer_jax.data.records import Document
from dreamer_jax.families import build, initialise
from dreamer_jax.inference.answering import answer
from dreamer_jax.parallel import make_mesh
from dreamer_jax.training.evaluation import FILE, PARTS, evaluate, keep_parts, kept_parts
from dreamer_jax.training.train_step import make_evaluation_step
from tests.families.cases import apply
from tests.training.cases import tiny_config

LENGTH = 24
CONFIG = tiny_config(data__sequence_length=LENGTH, mesh__data=(2,))
ALPHABET = "abcdefghijklmnopqrst"
TOKENIZER = SimpleNamespace(
    bos=20,
    eos=21,
    pad=22,
    encode=lambda text: [ALPHABET.index(letter) for letter in text],
    decode=lambda tokens: "".join((ALPHABET + "^$_")[token] for token in tokens),
)


def tokens_of(record: Record) -> list[int]:
    return [TOKENIZER.bos, *TOKENIZER.encode(record.prompt), *TOKENIZER.encode(record.completion), TOKENIZER.eos]


@pytest.fixture(scope="module")
def state():
    """Weights that decide clearly, with an end of text that is likely enough to come."""
    params, model_state = initialise(build(CONFIG.model), jax.random.key(0))
    params = jax.tree.map(lambda p: p if p.ndim == 1 else 4 * p, params)
    head = params["head"].at[TOKENIZER.eos].multiply(2)
    params["head"] = head.at[jnp.array([TOKENIZER.bos, TOKENIZER.pad])].set(0)
    return SimpleNamespace(params=params, model_state=model_state)


@pytest.fixture(scope="module")
def records(state) -> list[Record]:
    """Prompts with the model's own answers, every second one changed in one letter."""
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(ALPHABET), rng.integers(1, 8))) for _ in range(40)]
    answers = answer(CONFIG, state, SimpleNamespace(tokenizer=TOKENIZER), [Record(p, "") for p in prompts])  # type: ignore[arg-type]
    finished = [(p, a) for p, a in zip(prompts, answers, strict=True) if a and len(p) + len(a) + 1 < LENGTH]
    finished = [(p, a) for p, a in finished if set(a) <= set(ALPHABET)]
    assert len(finished) > 12 and len({len(a) for _, a in finished}) > 2
    found = []
    for index, (prompt, given) in enumerate(finished):
        if index % 2:
            at = rng.integers(len(given))
            given = given[:at] + ALPHABET[(ALPHABET.index(given[at]) + 1) % 20] + given[at + 1 :]
        found.append(Record(prompt, given))
    return found


@pytest.fixture(scope="module")
def batches(records):
    documents = [Document(np.array(tokens_of(r), np.int32), len(r.prompt)) for r in records]
    rows = plan_rows(np.array([len(d.tokens) - 1 for d in documents]), LENGTH)
    packed = [[documents[int(i)] for i in rows[row]] for row in range(len(rows))]
    assert len(packed) < len(documents)  # several documents share a row
    packed += [[]] * (-len(packed) % 4)
    return [assemble(packed[at : at + 4], LENGTH, TOKENIZER.pad, True) for at in range(0, len(packed), 4)]


@pytest.fixture(scope="module")
def evaluated(state, batches):
    step = make_evaluation_step(CONFIG, make_mesh(CONFIG.mesh, jax.devices()[:2]))
    data = SimpleNamespace(heldout_batches=lambda: iter(batches), harder_batches=lambda: iter(()))
    return evaluate(step, lambda batch: batch, state, data)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def metrics(evaluated):
    return evaluated.metrics


def test_greedy_answers_agree_with_exact_match(metrics, records):
    """What greedy decoding writes is exactly right, what was changed is exactly wrong."""
    assert metrics["heldout/exact_match"] == math.ceil(len(records) / 2) / len(records)


def test_loss_and_exact_match_of_documents_one_by_one(metrics, state, records):
    """Every document alone in a row, its whole log-softmax in float64."""
    tokens = np.full((len(records), LENGTH), TOKENIZER.pad, np.int32)
    for row, record in enumerate(records):
        tokens[row, : len(tokens_of(record))] = tokens_of(record)
    bias = state.model_state["balancing"]
    logits = np.asarray(jax.jit(lambda t: apply(CONFIG.model, state.params, bias, t).logits)(tokens), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses, exact = [], 0
    for row, record in enumerate(records):
        places = np.arange(len(record.prompt), len(tokens_of(record)) - 1)
        wanted = tokens[row, places + 1]
        losses += list(-log_p[row, places, wanted])
        exact += np.array_equal(log_p[row, places].argmax(-1), wanted)
    assert metrics["heldout/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["heldout/perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert metrics["heldout/exact_match"] == exact / len(records)
    assert set(metrics) == {"heldout/loss", "heldout/perplexity", "heldout/exact_match"}  # nothing harder


def test_nothing_held_out(state):
    data = SimpleNamespace(heldout_batches=lambda: iter(()), harder_batches=lambda: iter(()))
    assert evaluate(lambda *_: {}, lambda batch: batch, state, data) == ({}, {})  # type: ignore[arg-type]


def test_parts_of_the_held_out_rows(evaluated, batches, tmp_path):
    """Each row is in the part that its number names, and all parts together are what the means are of."""
    parts = evaluated.parts
    masks = np.concatenate([batch["loss_mask"] for batch in batches])
    assert parts["targets"] == [float(masks[part::PARTS].sum()) for part in range(PARTS)]
    assert sum(parts["loss"]) / sum(parts["targets"]) == pytest.approx(evaluated.metrics["heldout/loss"], rel=1e-5)
    assert sum(parts["exact"]) / sum(parts["answers"]) == evaluated.metrics["heldout/exact_match"]
    keep_parts(tmp_path, 2, {"loss": [1.0]})
    with (tmp_path / FILE).open("a") as file:
        file.write('\n{"step": 4, "lo')  # a kill
    keep_parts(tmp_path, 2, parts)
    keep_parts(tmp_path, 1, {"loss": [2.0]})
    assert kept_parts(tmp_path) == {1: {"loss": [2.0]}, 2: parts}
    keep_parts(tmp_path / "nowhere", 1, parts)


def test_answers_end_at_the_end_of_the_row_or_the_limit(state):
    """A prompt that fills the row can't be answered; no answer is longer than asked."""
    prompts = [Record("a" * (LENGTH - 1), ""), Record("a" * LENGTH, ""), Record("abc", "")]
    found = answer(CONFIG, state, SimpleNamespace(tokenizer=TOKENIZER), prompts, limit=3)  # type: ignore[arg-type]
    assert found[:2] == ["", ""] and len(found[2]) <= 3
