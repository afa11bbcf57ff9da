"""CoTFormer's decoding: through caches what the equations give, and tokens that stop where the threshold says."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.families import build, depth_of
from dreamer_jax.families.cotformer import State
from dreamer_jax.inference import Engine, fold
from dreamer_jax.inference.model import through_depths
from tests.families import plain_cotformer as plain
from tests.families.cases import logits_in_flight, until_stopped
from tests.families.test_cotformer import FORMS, LENGTH, ROWS, RULES, TINY, batch, drawn_params, expected, wide

FORM = "threshold"
PLACES = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))


@functools.cache
def folded():
    return fold(FORMS[FORM], drawn_params(FORM), {})


def repeats(took, length):
    """[S]: how many repeats every position of a row took part in."""
    return np.sum([np.isin(np.arange(length), its) for its in took], axis=0)


@functools.cache
def wanted():
    """Logits [B, S, V] and repeats [B, S] of the whole rows, by the equations."""
    rows = expected(FORM)
    return np.stack([row.logits for row in rows]), np.stack([repeats(row.took, LENGTH) for row in rows])


def test_positions_at_different_depths():
    """Position i is at repeat t - i at time t: each comes to what the pass over the row says."""
    found = logits_in_flight(folded(), batch()["tokens"], PLACES, folded().empty_slots(ROWS, LENGTH))
    np.testing.assert_allclose(found, wanted()[0], atol=1e-4)


def test_decoding_stops_and_gives_what_the_whole_pass_gives():
    """Token by token behind a prompt; slots that held another text are as good as new."""
    model, tokens, prompt = folded(), batch()["tokens"], 9
    logits, taken = wanted()
    whole = jax.jit(through_depths)
    slots = model.empty_slots(ROWS, LENGTH + 2)
    _, slots = whole(model, tokens[:, ::-1], PLACES, slots)
    hidden, slots = whole(model, tokens, PLACES, slots)
    np.testing.assert_allclose(model.logits(hidden), logits, atol=1e-4)
    for place in range(prompt, LENGTH):
        its = jnp.full((ROWS, 1), place)
        logs, slots, depths = until_stopped(model, tokens[:, place, None], its, slots)
        np.testing.assert_array_equal(depths, taken[:, place])
        np.testing.assert_allclose(logs, jax.nn.log_softmax(logits[:, place]), atol=1e-4)
    assert len(np.unique(taken[:, prompt:])) == TINY.depth


def test_the_engine_stops_where_the_model_says():
    """Greedy texts and repeats of every token are those of the whole row."""
    engine, prompt = Engine(folded()), batch()["tokens"][0, :6].tolist()
    assert engine.exits_early
    row = engine.generate([prompt], 5)[0]
    text = np.array([*prompt, *row.tokens], np.int32)
    its = plain.passed(FORMS[FORM], wide(drawn_params(FORM)), text, RULES[FORM])
    assert row.tokens == its.logits[5:-1].argmax(-1).tolist()
    assert row.depths[1:] == repeats(its.took, len(text))[6:-1].tolist()


def test_a_mesh_can_divide_the_slots():
    """By rows, the second axis of every array."""
    slots = jax.eval_shape(lambda: build(FORMS[FORM]).slots(7, 20, TINY.depth))
    assert {leaf.shape[1] for leaf in jax.tree.leaves(slots)} == {7}


def test_who_never_stops():
    for config in (TINY, dataclasses.replace(FORMS["capacity"], threshold=0.0)):
        family = build(config)
        assert not family.flags.halts
        state = State(jnp.zeros((1, 1, 32)), jnp.ones((1, 1)), jnp.ones((1, 1), bool))
        assert family.finished({}, state, state, depth_of(0, 3)) is None
