"""The statistics equal brute force, on one device and on eight; padding and batching don't show."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from dreamer_jax.analysis import observation
from dreamer_jax.analysis.collection import add, collect, make_observer
from dreamer_jax.analysis.distributions import depth_map
from dreamer_jax.analysis.drawing import LIGHT
from dreamer_jax.analysis.figures import make_figures
from dreamer_jax.analysis.report import numbers
from dreamer_jax.analysis.summary import scalars, summarise
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.parallel import make_mesh
from tests.analysis.brute_force import statistics
from tests.families.cases import (
    POSITIONS,
    SEGMENT_IDS,
    TINY_MODELS,
    apply,
    random_tokens,
    random_weights,
    small_config,
)

ONE, EIGHT = make_mesh(MeshConfig(data=(1,))), make_mesh(MeshConfig(data=(8,)))


def make_batch(config, seed: int = 0) -> dict[str, np.ndarray]:
    """[3, 12], packed, with padding on every side; half of the targets count."""
    rng = np.random.default_rng(seed)
    loss_mask = (SEGMENT_IDS > 0) & (rng.random(SEGMENT_IDS.shape) < 0.6)
    return {
        "tokens": random_tokens(config, seed),
        "targets": random_tokens(config, seed + 1),
        "segment_ids": SEGMENT_IDS,
        "positions": POSITIONS,
        "loss_mask": loss_mask,
        "answer_mask": loss_mask & (rng.random(SEGMENT_IDS.shape) < 0.5),
    }


def chosen_targets(batch: dict[str, np.ndarray]) -> np.ndarray:
    rows, columns, lens = observation.choose_targets(batch["loss_mask"], batch["answer_mask"])
    chosen = np.zeros(batch["tokens"].shape, bool)
    chosen[np.asarray(rows)[lens["counted"]], np.asarray(columns)[lens["counted"]]] = True
    return chosen


def assert_equal(actual: Any, expected: Any, tokens: int) -> None:
    """Integers are equal, averages over the tokens equal to 1e-6 of the largest."""
    for name, value in expected.items():
        if isinstance(value, dict):
            assert actual[name].keys() == value.keys()
            assert_equal(actual[name], value, tokens)
            continue
        got = np.asarray(actual[name])
        if np.issubdtype(got.dtype, np.integer):
            np.testing.assert_array_equal(got, value, err_msg=name)
        else:
            scale = max(1.0, np.abs(value).max() / tokens)
            np.testing.assert_allclose(got / tokens, value / tokens, rtol=0, atol=1e-6 * scale, err_msg=name)


CASES = "LA/parallel_attention", "LA+DA/sequential", "DR/parallel", "DR+DA/parallel_attention", "DR+DA/sequential"


@pytest.mark.slow_but("DR+DA/parallel_attention", "LA+DA")
@pytest.mark.parametrize("case", CASES)
def test_equal_to_brute_force(case):
    config = small_config(*case.split("/"))
    params, bias = random_weights(config)
    batch = make_batch(config)
    chosen = chosen_targets(batch)
    expected, margin = statistics(config, params, bias, batch, chosen)
    assert margin > 1e-5  # no selection hangs on rounding
    sums = make_observer(config, ONE)(params, {"balancing": bias}, batch)
    tokens = int((SEGMENT_IDS > 0).sum())
    assert int(sums["tokens"]) == tokens
    assert int(sums["lens_targets"]) == chosen.sum() == batch["loss_mask"].sum()
    assert int(sums["lens_answers"]) == (chosen & batch["answer_mask"]).sum()
    assert ("depth_scores" in sums) == config.depth_attention
    assert_equal(sums, expected, tokens)


@pytest.mark.slow_but("DR")
@pytest.mark.parametrize("variant", ["LA", "DR"])
def test_slots_that_are_read(variant):
    """By depth, head and slot; and which text is read most."""
    slots = {"pa_slots": 5, "pa_heads": 2, "pa_head_size": 8, "pa_source": "texts", "pa_embedding_size": 6}
    config = small_config(variant, **slots)
    (params, bias), batch = random_weights(config), make_batch(config)
    texts = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    expected, margin = statistics(config, params, bias, batch, chosen_targets(batch), texts.astype(np.float64))
    assert margin > 1e-5
    state = {"balancing": bias, "knowledge": {"texts": texts}}
    sums = collect(config, params, state, [batch], ONE)
    assert sums["slot_scores"].shape == (3, 2, 5)
    assert_equal(sums, expected, int(sums["tokens"]))
    its = summarise(config, sums, state)["slots"]
    mean = expected["slot_scores"].mean(axis=1) / int(sums["tokens"])
    assert its["count"] == 5 and its["read"] == (mean > 0.2).sum(axis=1).tolist()
    for most, row in zip(its["most"], mean, strict=True):
        assert [each["slot"] for each in most] == np.argsort(-row).tolist()
        np.testing.assert_allclose([each["weight"] for each in most], np.sort(row)[::-1], rtol=1e-5)


def test_depths_without_an_attention_have_no_numbers_of_it():
    """Its router there isn't decided, and nobody looks back; nor is slot 0 read most where none is read."""
    config = small_config("DR+DA", depth=5, da_every=3, sa_every=2, pa_slots=4, pa_head_size=8, pa_every=3)
    params, bias = random_weights(config)
    summary = summarise(config, collect(config, params, {"balancing": bias}, [make_batch(config)], ONE), {})
    entropies = {name: [its is not None for its in router["entropy"]] for name, router in summary["routers"].items()}
    every = {"expert_attention": 1, "sequence_attention": 2, "depth_attention": 3}
    assert entropies == {name: [l % each == 0 for l in range(5)] for name, each in every.items()}
    empty = np.isnan(depth_map(np.array(summary["depth_attention"]["scores"]))).all(axis=1)
    assert empty.tolist() == [False, True, True, False, True]
    values = scalars(summary)
    for name in ("entropy/depth_attention", "score/depth_attention", "depth_attention/depths_back"):
        assert [f"analysis/{name}/{l}" in values for l in range(5)] == [True, False, False, True, False]
    assert np.isfinite(list(values.values())).all()
    said = [label for label, _, _ in numbers(summary) if "read most" in label]
    assert [label.split(",")[0] for label in said] == ["read most at depth 0", "read most at depth 3"]
    for figure in make_figures(summary):
        canvas = Canvas()
        figure.draw(canvas, LIGHT)
        if figure.name == "routers":
            assert sorted(len(line.get_xdata()) for line in canvas.axes[0].lines) == [2, 3, 5]


@pytest.mark.slow
def test_model_is_not_changed_by_being_observed():
    config = small_config()
    params, bias = random_weights(config)
    batch = make_batch(config)
    sums = make_observer(config, ONE)(params, {"balancing": bias}, batch)
    output = jax.jit(functools.partial(apply, config))(params, bias, batch["tokens"], SEGMENT_IDS, POSITIONS)
    for name, counts in output.counts.items():
        np.testing.assert_array_equal(sums["counts"][name], counts)


def test_a_model_forced_to_look_at_depth_0_has_a_map_of_one_column():
    config = small_config("LA+DA")
    params, bias = random_weights(config)
    params = jax.tree.map(np.copy, params)
    layers, size = params["layers"], config.da_head_size
    # Feature 0 of the stream is positive and nothing changes it. Queries read it alone, and so do the keys of depth 0;
    # the keys of the other depths are zero. Dimension 1 of a head is one that the rotation hardly turns.
    params["embedding"][:, 0] = 9
    for attention in ("sequence_attention", "depth_attention"):
        layers[attention]["projections"]["out"][..., 0] = 0
    layers["expert_attention"]["down"][..., 0] = 0
    qkv = layers["depth_attention"]["projections"]["qkv"]  # [L, h, (n + 2 kv) d]
    keys = slice(config.da_heads * size, (config.da_heads + config.da_kv_heads) * size)
    qkv[:, :, : keys.stop] = 0
    qkv[:, 0, 1 : keys.start : size] = 1
    qkv[0, 0, keys.start + 1 : keys.stop : size] = 1
    layers["depth_attention"]["q_norm"]["scale"][:] = 20
    state = {"balancing": bias}
    sums = collect(config, params, state, [make_batch(config)], ONE)
    scores = summarise(config, sums, state)["depth_attention"]["scores"]
    nan = np.nan
    expected = [[1, nan, nan], [1, 0, nan], [1, 0, 0]]
    np.testing.assert_allclose(depth_map(np.array(scores)), expected, atol=1e-6)


@pytest.mark.slow
def test_eight_devices_equal_one():
    config = small_config()
    params, bias = random_weights(config)
    parts = [make_batch(config, seed) for seed in range(3)]
    batch = {name: np.concatenate([part[name] for part in parts])[:8] for name in parts[0]}
    state = {"balancing": bias}
    one = collect(config, params, state, [batch], ONE)
    eight = collect(config, params, state, [batch], EIGHT)
    assert_equal(eight, one, int(one["tokens"]))
    halves = [{name: values[half] for name, values in batch.items()} for half in (slice(0, 4), slice(4, 8))]
    assert_equal(collect(config, params, state, halves, ONE), one, int(one["tokens"]))


def test_sums_are_kept_wide():
    big = {"n": np.array([2**31 - 1], np.int32), "x": np.array([2.0**24], np.float32)}
    total = add(add(None, big), {"n": np.array([1], np.int32), "x": np.array([1.0], np.float32)})
    assert total["n"][0] == 2**31 and total["x"][0] == 2**24 + 1


def test_no_batch_is_a_clear_error():
    config = small_config()
    params, bias = random_weights(config)
    with pytest.raises(UserError, match="--data"):
        collect(config, params, {"balancing": bias}, [], ONE)


def test_lens_targets_are_spread_over_a_row(monkeypatch):
    monkeypatch.setattr(observation, "LENS_TARGETS", 3)
    loss = np.zeros((3, 10), bool)
    loss[0] = True  # ten targets, three taken
    loss[1, [2, 7]] = True  # fewer than three: all taken
    rows, columns, lens = observation.choose_targets(loss, loss)
    counted = np.asarray(lens["counted"])
    found = list(zip(np.asarray(rows)[counted].tolist(), np.asarray(columns)[counted].tolist(), strict=True))
    assert found == [(0, 3), (0, 6), (0, 9), (1, 2), (1, 7)]
    assert len(counted) == 9


def test_gates_are_averaged_over_who_goes_on():
    """Universal Transformer and CoTFormer: over the positions that a depth is computed for, not over all."""
    for name, going_on, asked, changes in (
        ("universal", "running", "halting_probability", {"halting_bias": 1.0}),
        ("cotformer", "repeats", "gate", {"adaptive": True, "decide": "capacity"}),
    ):
        config = dataclasses.replace(TINY_MODELS[name], **changes)
        family = build(config)
        params, batch = initialise(family, jax.random.key(1))[0], make_batch(config)

        def observe(step, family=family, name=name):
            def seen(weights, state, inputs, depth, memory, context):
                stepped = step(weights, state, inputs, depth, memory, context)
                if name == "cotformer":
                    return stepped._replace(counts=(state.active, stepped.state.gate))
                x = family.signals(state.x, context.positions, depth)
                gate = family.unit.apply({"params": weights.shared["halting"]}, x)
                return stepped._replace(counts=(state.pondered.running, gate))

            return seen

        going, gates = map(np.asarray, forward(family, params, {}, batch, observe=observe).counts)
        going = going & (SEGMENT_IDS > 0)
        found = summarise(config, make_observer(config, ONE)(params, {}, batch), {})["observed"]
        share, gate = found[going_on], found[asked]
        np.testing.assert_allclose(
            share, going.mean(axis=(1, 2)) * SEGMENT_IDS.size / (SEGMENT_IDS > 0).sum(), rtol=1e-6
        )
        for of_depth, its, all_gates in zip(gate, going, gates, strict=True):
            if its.any():
                assert of_depth == pytest.approx(all_gates[its].mean(), rel=1e-5)
            else:
                assert of_depth is None
        assert any(0 < its.mean() < 1 for its in going)
