"""CoTFormer: the official outputs, the model against its equations, its limits, and what it counts."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.mixture_of_repeats import drawn_capacities
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.config.models.cotformer import CotformerConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.families import build, forward
from tests.families import plain_cotformer as plain
from tests.outside import official_outputs

TINY = CotformerConfig(
    depth=3,
    begin_layers=1,
    middle_layers=2,
    end_layers=1,
    hidden_size=32,
    heads=2,
    mlp_size=128,
    vocab_size=64,
    dtype="float32",
)
FORMS = {
    "plain": dataclasses.replace(TINY, repeat_norm=False, depth_embedding="none"),
    "lnmid": TINY,
    "capacity": dataclasses.replace(TINY, adaptive=True, decide="capacity", capacity=0.5),
    "threshold": dataclasses.replace(TINY, adaptive=True, depth_embedding="learned"),
}
OFFICIAL = {"plain": "plain", "lnmid": "lnmid", "capacity": "adaptive_.75_.5"}
ROWS, LENGTH = 2, 16
RULES = {"capacity": plain.by_capacity(0.75, 0.5), "threshold": plain.by_threshold(0.5)}


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@functools.cache
def drawn_params(form):
    """Parameters in which nothing is one or zero; gates on both sides of one half."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        name = str(path[-1].key)
        values = rng.normal(size=leaf.shape) * (0.5 if name == "row" else 0.15)
        return (values + (name == "scale" or name.endswith("_norm"))).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(build(FORMS[form]).shapes[0]))


@functools.cache
def batch():
    """Whole rows of one document each."""
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, TINY.vocab_size, (ROWS, LENGTH)).astype(np.int32) for _ in range(2))
    segments, positions = np.ones_like(tokens), np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    mask = rng.random((ROWS, LENGTH)) < 0.7
    its = {"tokens": tokens, "targets": targets, "loss_mask": mask, "segment_ids": segments, "positions": positions}
    return its | {"depth": np.int32(TINY.depth)}


def run_of(form):
    """(params, batch with `depth`) -> (loss sum, (logits, state after every repeat))."""
    family = build(FORMS[form])

    def keep_state(step):
        def kept(*args, **more):
            stepped = step(*args, **more)
            return stepped._replace(counts=stepped.state)

        return kept

    def run(params, batch):
        its = forward(family, params, {}, batch, batch["depth"], observe=keep_state)
        loss, _ = family.loss(params, its, batch)
        hidden, _ = family.readout(params, its.state, its.memory, its.context)
        return loss, (family.logits(params, hidden), its.counts)

    return run


@functools.cache
def compiled(form):
    """A form's one program, for any number of repeats; of those with gradients also these."""
    run = run_of(form)
    return jax.jit(jax.value_and_grad(run, has_aux=True) if form in ("lnmid", "capacity") else run)


def found(form, params, its):
    """(loss, logits, states), gradients or None."""
    out = compiled(form)(params, its)
    (loss, (logits, states)), gradients = jax.device_get(out if form in ("lnmid", "capacity") else (out, None))
    return (loss, logits, states), gradients


@functools.cache
def of_batch(form):
    return found(form, drawn_params(form), batch())


@functools.cache
def expected(form):
    """Of every row, by the equations."""
    params = wide(drawn_params(form))
    return [plain.passed(FORMS[form], params, row, RULES.get(form)) for row in batch()["tokens"]]


# The official outputs.


@pytest.fixture(scope="module")
def official():
    return official_outputs("cotformer_tiny")


def in_halves(rows):
    """Rows that make queries or keys: the official rotation pairs neighbours, ours the halves of a head."""
    size = len(rows) // TINY.heads
    return rows.reshape(TINY.heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def our_tree(of):
    """The tree of parameters from the official names; `of` gives the array of a name."""

    def layer(name):
        q, k, v = np.split(of(f"transformer.{name}.attn.c_attn.weight"), 3)
        its = {part: of(f"transformer.{name}.{part}.weight") for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
        return {
            "attention": {"qkv": np.concatenate([in_halves(q), in_halves(k), v]).T, "out": its["attn.c_proj"].T},
            "attention_norm": {"scale": of(f"transformer.{name}.ln_1.weight")},
            "feed_forward": {"in_matrix": its["mlp.c_fc"].T, "out_matrix": its["mlp.c_proj"].T},
            "mlp_norm": {"scale": of(f"transformer.{name}.ln_2.weight")},
        }

    return {
        "embedding": of("transformer.wte.weight"),
        "begin": {"0": layer("h_begin.0")},
        "middle": {"0": layer("h_mid.0"), "1": layer("h_mid.1")},
        "end": {"0": layer("h_end.0")},
        "final_norm": of("transformer.ln_f.weight"),
        "repeat_norm": of("transformer.ln_mid.weight"),
        "depth_embedding": of("depth_emb.embs.weight")[0],
        "routers": {"row": np.concatenate([of(f"transformer.mod.{r}.mod_router.weight") for r in range(3)])},
    }


def official_pass(arrays, form):
    params = our_tree(lambda name: arrays[f"w/{name}"])
    params = {name: params[name] for name in build(FORMS[form]).shapes[0]}
    targets = arrays["targets"]
    its = batch() | {"tokens": arrays["idx"], "targets": np.maximum(targets, 0), "loss_mask": targets >= 0}
    return found(form, params, its), its["loss_mask"].sum()


@pytest.mark.slow_but("capacity", "plain")
@pytest.mark.parametrize("form", OFFICIAL)
def test_official_logits_and_gradients(official, form):
    arrays, numbers = official
    tag = OFFICIAL[form]
    ((loss, logits, states), gradients), count = official_pass(arrays, form)
    np.testing.assert_allclose(logits, arrays[f"{tag}/logits"], atol=1e-4)
    np.testing.assert_allclose(loss / count, numbers[tag]["loss"], rtol=1e-5)
    if form == "plain":
        np.testing.assert_allclose(states.x, arrays["plain/after_repeat"], atol=1e-4)
        return
    norms = numbers[tag]["grad_l2"]
    wanted = our_tree(lambda name: arrays.get(f"{tag}/grad/{name}", np.full(arrays[f"w/{name}"].shape, np.nan)))
    wanted = {name: wanted[name] for name in gradients}
    seen = 0
    for own, leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        whole = ~np.isnan(leaf)
        seen += whole.any()
        np.testing.assert_allclose(np.asarray(own)[whole] / count, leaf[whole], atol=1e-5)
    assert seen >= 4
    norm = np.sqrt(sum(np.sum(np.square(each)) for each in jax.tree.leaves(gradients))) / count
    assert norm == pytest.approx(np.sqrt(sum((norms[name] or 0) ** 2 for name in norms)), rel=1e-4)


def test_official_repeats(official):
    """Layer norm after each repeat; who goes on, with which gate, and what is put together again."""
    arrays, _ = official
    ((_, _, states), _), _ = official_pass(arrays, "lnmid")
    np.testing.assert_allclose(states.x, arrays["lnmid/ln_mid_out"], atol=1e-4)
    ((_, _, states), _), _ = official_pass(arrays, "capacity")
    tag, rows = OFFICIAL["capacity"], np.arange(ROWS)[:, None]
    for r in (0, 1):
        index = arrays[f"{tag}/active_original_index_{r + 1}"]
        going_on = np.zeros((ROWS, LENGTH), bool)
        going_on[rows, index] = True
        np.testing.assert_array_equal(states.active[r], going_on)
        before = arrays[f"{tag}/active_original_index_{r}"]
        np.testing.assert_allclose(states.x[r][rows, before], arrays[f"{tag}/router_in_{r}"], atol=1e-4)
        relative = arrays[f"{tag}/selected_relative_{r}"]
        places = np.take_along_axis(before, relative, 1)
        np.testing.assert_allclose(states.gate[r][rows, places], arrays[f"{tag}/gate_{r}"], atol=1e-5)
    np.testing.assert_allclose(states.x[-1], arrays[f"{tag}/reassembled"], atol=1e-4)


# The equations.


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_loss_are_those_of_the_equations(form):
    (loss, logits, states), _ = of_batch(form)
    wanted, its = expected(form), batch()
    np.testing.assert_allclose(logits, np.stack([row.logits for row in wanted]), atol=1e-4)
    np.testing.assert_allclose(states.x, np.stack([row.states for row in wanted], 1), atol=1e-4)
    total = sum(plain.loss(row.logits, its["targets"][b], its["loss_mask"][b], np) for b, row in enumerate(wanted))
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    if FORMS[form].adaptive:
        active = np.zeros((TINY.depth, ROWS, LENGTH), bool)
        for b, row in enumerate(wanted):
            for r, took in enumerate(row.took):
                active[r, b, took] = True
        np.testing.assert_array_equal(states.active[:-1], active[1:])
        assert 0 < active[2].sum() < active[1].sum() < active[0].sum()


def test_gradients_are_those_of_the_unrolled_loop():
    """Keys of earlier repeats get theirs from all later ones. Who goes on is given: it has no gradient."""
    config, params = FORMS["capacity"], drawn_params("capacity")
    its = batch() | {"loss_mask": batch()["loss_mask"] & (np.arange(ROWS) == 0)[:, None]}
    _, gradients = found("capacity", params, its)
    took = [*expected("capacity")[0].took, np.arange(0)]

    def total(params):
        chosen = plain.passed(config, params, its["tokens"][0], lambda r, _: np.isin(took[r], took[r + 1]), jnp)
        return plain.loss(chosen.logits, its["targets"][0], its["loss_mask"][0], jnp)

    wanted = jax.jit(jax.grad(total))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        own = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        np.testing.assert_allclose(own, leaf, atol=1e-5 * max(1, np.abs(leaf).max()), err_msg=str(path))
    assert np.abs(wanted["routers"]["row"][:2]).max() > 1e-3 and not np.any(gradients["routers"]["row"][2])


@pytest.mark.parametrize("remat", ["none", pytest.param("attention", marks=pytest.mark.slow)])
def test_what_is_kept_changes_no_gradient(remat):
    """The memory of a depth is put in the place of what the forward pass saw, and its gradient is on the tape."""
    family, its = build(FORMS["capacity"]), {**batch()}
    del its["depth"]

    def loss(params):
        return family.loss(params, forward(family, params, {}, its, remat=remat), its)[0]

    found = jax.jit(jax.grad(loss))(drawn_params("capacity"))
    wanted = of_batch("capacity")[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max())), found, dict(wanted)
    )


@pytest.mark.parametrize("form", ["lnmid", "capacity", "threshold"])
def test_packed_documents_are_what_they_are_alone(form):
    """Also who goes on: each document has its own capacity."""
    segments = np.array([[1] * 6 + [2] * 10, [1] * 13 + [0] * 3], np.int32)
    positions = np.array([[*range(6), *range(10)], [*range(13), *range(3)]], np.int32)
    its = batch() | {"segment_ids": segments, "positions": positions}
    (_, logits, _), _ = found(form, drawn_params(form), its)
    params = wide(drawn_params(form))
    for row, start, stop in ((0, 0, 6), (0, 6, 16), (1, 0, 13)):
        wanted = plain.passed(FORMS[form], params, its["tokens"][row, start:stop], RULES.get(form))
        np.testing.assert_allclose(logits[row, start:stop], wanted.logits, atol=1e-4)


# Limits.


def test_one_repeat_without_norm_is_the_plain_stack():
    (_, logits, _), _ = found("plain", drawn_params("plain"), batch() | {"depth": np.int32(1)})
    params, config = wide(drawn_params("plain")), FORMS["plain"]
    layers = [params[part][n] for part in ("begin", "middle", "end") for n in sorted(params[part])]
    for row, tokens in enumerate(batch()["tokens"]):
        x, places = params["embedding"][tokens], np.arange(LENGTH)
        for weights in layers:
            x = plain.layer(config, weights, x, places, [], np)
        wanted = plain.layer_norm(x, params["final_norm"], np) @ params["embedding"].T
        np.testing.assert_allclose(logits[row], wanted, atol=1e-4)


@pytest.mark.parametrize("form", ["lnmid", "threshold", "capacity"])
def test_who_sees_what_comes_later(form):
    """Nobody, but for the choice of the largest gates."""
    (_, logits, _), _ = of_batch(form)
    tokens = batch()["tokens"].copy()
    tokens[:, 9] = (tokens[:, 9] + 1) % TINY.vocab_size
    (_, changed, _), _ = found(form, drawn_params(form), batch() | {"tokens": tokens})
    moved = np.abs(changed - logits).max((0, 2))
    assert moved[9] > 1e-2
    assert (moved[:9].max() < 1e-5) == (form != "capacity")


def test_gates_of_zero_and_one():
    """If no gate reaches the threshold the model is one repeat; with gates of 1 it is LN-CoTFormer.

    In a text of one token again and again all positions are equal, so that a router can give them any gate."""
    vector = drawn_params("lnmid")["depth_embedding"]
    learned = np.arange(TINY.depth - 1, -1, -1, dtype=np.float32)[:, None] * vector  # what is added with "linear"
    params = drawn_params("threshold") | {"depth_embedding": learned}
    its = batch() | {"tokens": np.full((ROWS, LENGTH), 7, np.int32)}
    rows = np.zeros_like(params["routers"]["row"])
    for logit in (-40.0, 40.0):
        for r in range(TINY.depth - 1):  # x_r depends on the gates before
            (_, _, states), _ = found("threshold", params | {"routers": {"row": rows}}, its)
            x = states.x[r, 0, 0]
            rows[r] = logit * x / (x @ x)
        (_, logits, states), _ = found("threshold", params | {"routers": {"row": rows}}, its)
        assert np.all(states.active[:-1] == (logit > 0))
        if logit < 0:
            (_, wanted, _), _ = found("threshold", params | {"routers": {"row": rows}}, its | {"depth": np.int32(1)})
        else:
            without = {name: leaf for name, leaf in params.items() if name != "routers"}
            (_, wanted, _), _ = found("lnmid", without | {"depth_embedding": vector}, its)
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_training_draws_how_many_go_on():
    """One draw a step for all rows, of the step's key; evaluation takes the threshold."""
    config = dataclasses.replace(FORMS["threshold"], begin_layers=0, end_layers=0)
    family, tokens = build(config), batch()["tokens"]
    params = drawn_params("threshold") | {"begin": {}, "end": {}}
    counts = jax.jit(lambda key: forward(family, params, {}, {"tokens": tokens}, key=key).counts["repeats"])
    numbers = np.array([counts(jax.random.key(seed)) for seed in range(12)])
    for seed, found in enumerate(numbers):
        f = drawn_capacities(jax.random.key(seed), 2)
        first = int(f[0] * LENGTH)
        assert found.tolist() == [ROWS * LENGTH, ROWS * first, ROWS * int(f[1] / f[0] * first + 1e-4)]
    assert len(np.unique(numbers[:, 1])) > 4 and numbers[:, 2].min() < ROWS * LENGTH / 2


# Counting, and what is refused; decoding is in tests/inference/test_cotformer.py.


@pytest.mark.parametrize("form", ["plain", "threshold"])
def test_both_counters_agree(form):
    config = dataclasses.replace(FORMS[form], depth=4, mlp_size=40, hidden_size=24, begin_layers=2)
    found = program.count(config, 12)
    assert found == program.expected(config, 12)
    h, f, layer = 24, 40, 4 * 24 * 24 + 2 * 24 * 40 + 2 * 24
    more = 0 if form == "plain" else h + 4 * h + 4 * h
    assert found.parameters == 64 * h + 5 * layer + h + more
    keys = 3 * 12 + 4 * 2 * (4 * 12)  # of the outer layers; of the middle ones all repeats at each
    products = (3 + 2 * 4) * 2 * (4 * h * h + 2 * h * f) + 4 * h * keys + 2 * 64 * h
    assert found.flops_per_token == products
    caches = {"begin cache": 2 * 10, "middle cache": 2 * 4 * 10, "end cache": 10}
    assert memory.caches(build(config), 10) == {name: n * 2 * h * 2 for name, n in caches.items()}


def test_attention_grows_with_the_repeats():
    """R (R + 1) / 2 times the scores of one pass, on average over causal rows."""

    def middle(depth):
        family = build(dataclasses.replace(TINY, depth=depth))
        return [analytic.matmul_flops(family, context)["middle"] for context in (100, 200)]

    once, often = (np.diff(middle(depth)) for depth in (1, 6))
    assert often == 21 * once


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 3}, "3 does not divide"),
        ({"hidden_size": 30}, "are odd"),
        ({"threshold": 1.5}, "can't be above 1"),
        ({"capacity": -0.5}, "zero or more"),
        ({"middle_layers": 0}, "more than zero"),
    ],
)
def test_what_it_refuses(changes, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(TINY, **changes)


def test_more_repeats_than_there_are_routers():
    assert build(TINY).check_depth(7) == 7
    for form in ("capacity", "threshold"):
        with pytest.raises(UserError, match="for 3 repeats; ask for at most 3"):
            build(FORMS[form]).check_depth(4)
