"""Counting who selected whom, and the update of the balancing biases, by hand."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.routing import balance, select, usage
from dreamer_jax.config.values import Balancing
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    VARIANTS,
    jitted_forward,
    random_tokens,
    random_weights,
    small_config,
)


def update_balancing(bias, counts, config):
    """The family's update, of its balancing biases alone."""
    return build(config).update({"balancing": bias}, counts, jnp.int32(0))["balancing"]


def test_median_rule_by_hand():
    """Above the median down, below it up, at it not at all; the rates are 1e-3 and 1e-2."""
    config = small_config("DR", num_experts=5)
    bias = {"expert_attention": jnp.array([0.0, 0.1, -0.2, 0.0, 0.5]), "sequence_attention": jnp.zeros(3)}
    counts = {
        "expert_attention": jnp.array([[4, 0, 9, 4, 0], [0, 0, 0, 0, 5], [0, 1, 0, 0, 0]], jnp.int32),  # 4 1 9 4 5
        "sequence_attention": jnp.array([[6, 0, 0], [0, 6, 0], [5, 0, 1]], jnp.int32),  # 11 6 1
    }
    updated = update_balancing(bias, counts, config)
    expected = [0.0, 0.1 + 1e-3, -0.2 - 1e-3, 0.0, 0.5 - 1e-3]  # the median is 4
    np.testing.assert_allclose(updated["expert_attention"], expected, atol=1e-7)
    np.testing.assert_allclose(updated["sequence_attention"], [-1e-2, 0.0, 1e-2], atol=1e-7)


def test_depths_are_summed_before_the_median_not_after():
    """Every depth alone would push expert 0 down; over all depths it is the median expert and stays."""
    counts = {"expert_attention": jnp.array([[3, 0, 2], [3, 2, 0], [0, 9, 2]], jnp.int32)}  # 6 11 4
    bias = {"expert_attention": jnp.zeros(3)}
    updated = update_balancing(bias, counts, small_config("DR", num_experts=3))["expert_attention"]
    np.testing.assert_allclose(updated, [0.0, -1e-3, 1e-3], atol=1e-9)


def test_even_number_of_experts():
    """The median of an even number is the mean of the two middle counts: nobody is at it unless they are equal."""
    config = small_config("DR", num_experts=4)
    bias = {"expert_attention": jnp.zeros(4)}
    for counts, signs in (([1, 2, 3, 9], [1, 1, -1, -1]), ([1, 3, 3, 9], [1, 0, 0, -1]), ([0, 0, 0, 8], [0, 0, 0, -1])):
        n = {"expert_attention": jnp.array([counts, [0] * 4], jnp.int32)}
        updated = update_balancing(bias, n, config)["expert_attention"]
        np.testing.assert_allclose(updated, 1e-3 * np.array(signs), atol=1e-9)


def test_la_has_one_bias_a_layer():
    """Each layer's bias moves by that layer's counts alone."""
    bias = {"expert_attention": jnp.zeros((2, 3))}
    counts = {"expert_attention": jnp.array([[5, 1, 3], [0, 9, 2]], jnp.int32)}
    updated = update_balancing(bias, counts, small_config("LA", num_experts=3))["expert_attention"]
    np.testing.assert_allclose(updated, [[-1e-3, 1e-3, 0.0], [1e-3, -1e-3, 0.0]], atol=1e-9)


def test_rates_come_from_the_configuration():
    """Each kind of router its own rate."""
    config = small_config("DR+DA", expert_bias_rate=0.25, attention_bias_rate=0.5)
    names = ("expert_attention", "sequence_attention", "depth_attention")
    counts = {name: jnp.array([[5, 1, 3]], jnp.int32) for name in names}
    updated = update_balancing({name: jnp.zeros(3) for name in names}, counts, config)
    for name, rate in zip(names, (0.25, 0.5, 0.5), strict=True):
        np.testing.assert_allclose(updated[name], [-rate, rate, 0.0], atol=1e-9, err_msg=name)


IDLE = [6, 2, 0, 0]
"""A median of one and a mean of two; v = 1 - N / mean = -2, 0, 1, 1."""


@pytest.mark.parametrize(
    ("rule", "moved"),
    [
        ("sign_median", [-1, -1, 1, 1]),
        ("sign_mean", [-1, 0, 1, 1]),
        ("proportional", [-2, 0, 1, 1]),
        ("tanh", np.tanh([-2, 0, 1, 1]) - np.mean(np.tanh([-2, 0, 1, 1]))),
    ],
)
def test_other_rules_by_hand(rule, moved):
    config = small_config("DR", num_experts=4, balancing=rule, expert_bias_rate=0.5)
    counts = {"expert_attention": jnp.array([IDLE], jnp.int32)}
    updated = update_balancing({"expert_attention": jnp.ones(4)}, counts, config)["expert_attention"]
    np.testing.assert_allclose(updated, 1 + 0.5 * np.array(moved), atol=1e-6)


def test_where_half_are_idle_the_median_leaves_them_and_the_mean_does_not():
    counts = jnp.array([[12, 0, 0, 0]], jnp.int32)
    moved = {rule: np.asarray(balance(jnp.zeros(4), counts, 1.0, rule)) for rule in get_args(Balancing)}
    assert (moved.pop("sign_median")[1:] == 0).all()
    assert all((its[1:] > 0).all() and its[0] < 0 for its in moved.values())
    assert abs(moved["tanh"].sum()) < 1e-6  # centred
    crowded = jnp.array([[100] + [0] * 19], jnp.int32)  # twenty times the mean
    assert balance(jnp.zeros(20), crowded, 1.0, "proportional")[0] == -5


@pytest.mark.parametrize("rule", get_args(Balancing))
def test_no_selections_move_nothing_that_is_not_finite(rule):
    assert np.isfinite(balance(jnp.zeros(3), jnp.zeros((2, 3), jnp.int32), 1.0, rule)).all()


@pytest.mark.parametrize("rule", get_args(Balancing))
def test_layers_that_a_shallow_step_did_not_reach_rest(rule):
    """Of four layers that go two deep each of the two moves by what it counted itself."""
    counts, start = jnp.array([[12, 0, 3], [1, 7, 2]], jnp.int32), jnp.arange(12.0).reshape(4, 3)
    moved = np.asarray(balance(start, counts, 0.5, rule))
    np.testing.assert_array_equal(moved[2:], start[2:])
    for layer in (0, 1):
        alone = balance(start[layer : layer + 1], counts[layer : layer + 1], 0.5, rule)[0]
        np.testing.assert_array_equal(moved[layer], alone)
    assert (moved[0] != start[0]).any() and (moved[0] - start[0] != moved[1] - start[1]).any()
    np.testing.assert_array_equal(balance(start, counts[:1], 0.5, rule)[1:], start[1:])


def test_a_boost_falls_in_a_line_to_the_rates_themselves():
    config = small_config("DR", num_experts=3, balancing_boost=5.0, balancing_boost_steps=10)
    counts = {"expert_attention": jnp.array([[9, 4, 1]], jnp.int32)}
    bias = {"expert_attention": jnp.zeros(3)}
    for step, times in ((0, 5.0), (5, 3.0), (10, 1.0), (99, 1.0)):
        updated = build(config).update({"balancing": bias}, counts, jnp.int32(step))["balancing"]["expert_attention"]
        np.testing.assert_allclose(updated, [-1e-3 * times, 0, 1e-3 * times], rtol=1e-6)


def test_groups_of_depths_move_the_biases_one_after_another():
    """By hand: all depths together have 6 2 11, two groups of them 6 2 2 and 0 0 9."""
    counts = {"expert_attention": jnp.array([[3, 0, 2], [3, 2, 0], [0, 0, 9]], jnp.int32)}
    for groups, moved in ((1, [0, 1, -1]), (2, [-1, 0, -1]), (3, [-2, 1, 0])):
        config = small_config("DR", depth=3, num_experts=3, balancing_groups=groups)
        updated = update_balancing({"expert_attention": jnp.zeros(3)}, counts, config)["expert_attention"]
        np.testing.assert_allclose(updated, 1e-3 * np.array(moved), atol=1e-9, err_msg=str(groups))


@pytest.mark.parametrize(("variant", "groups"), [("DR+DA", 5), ("LA", 2)])
def test_groups_that_there_are_not_are_refused(variant, groups):
    with pytest.raises(ConfigError, match=f"model.balancing_groups: {groups}"):
        small_config(variant, depth=4, balancing_groups=groups)


def test_usage_excludes_padding():
    """By hand: token 1 is padding."""
    indices = jnp.array([[0, 2], [2, 3], [2, 0]], jnp.int32)
    np.testing.assert_array_equal(usage(indices, 5, jnp.array([True, False, True])), [2, 0, 2, 0, 0])


def test_selection_uses_the_bias_and_weights_do_not():
    """Eq. 2: top-k of logits + b, sigmoid of the logits alone, and no gradient through the selection."""
    logits, bias = jnp.array([[1.0, 0.5, 0.0, -1.0]]), jnp.array([0.0, 0.0, 0.9, 2.4])
    indices, scores = select(logits, bias, 2)
    assert sorted(indices[0].tolist()) == [0, 3]  # 1.0, 0.5, 0.9, 1.4
    expected = {0: 1 / (1 + np.exp(-1.0)), 3: 1 / (1 + np.exp(1.0))}
    for index, score in zip(indices[0].tolist(), scores[0].tolist(), strict=True):
        assert score == pytest.approx(expected[index], rel=1e-6)
    gradient = jax.grad(lambda b: select(logits, b, 2)[1].sum())(bias)
    assert not np.any(gradient)


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_of_a_pass_add_up(variant):
    """A row a depth: k for every real token in expert attention, one in the attention MoEs, none for padding."""
    config = small_config(variant)
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    forward = jitted_forward(config)
    counts = forward(params, bias, tokens, SEGMENT_IDS, POSITIONS, 3).counts
    attentions = {"LA": (), "LA+DA": (), "DR": ("sequence_attention",)}
    expected = dict.fromkeys(attentions.get(variant, ("sequence_attention", "depth_attention")), 1)
    for name, per_token in {"expert_attention": config.experts_per_token, **expected}.items():
        assert counts[name].dtype == jnp.int32
        np.testing.assert_array_equal(counts[name].sum(-1), [per_token * REAL.sum()] * 3)
    assert set(counts) == {"expert_attention", *expected} == set(bias)

    # Two microbatches count what the whole batch counts: rows 0 and 1, 2 turned into padding and back.
    parts = []
    for rows in ([0], [1, 2]):
        keep = np.isin(np.arange(3), rows)[:, None]
        parts.append(forward(params, bias, tokens, SEGMENT_IDS * keep, POSITIONS, 3).counts)
    for name, whole in counts.items():
        np.testing.assert_array_equal(parts[0][name] + parts[1][name], whole)


def test_updating_balances():
    """Repeated updates on one batch spread a skewed selection, though no weight changes."""
    config = small_config("DR+DA", expert_bias_rate=0.05, attention_bias_rate=0.05)
    params, bias = random_weights(config)
    bias = {name: jnp.asarray(b) for name, b in bias.items()}
    batch = (random_tokens(config), SEGMENT_IDS, POSITIONS, 3)
    update = jax.jit(lambda b, n: update_balancing(b, n, config))
    spread = []
    for _ in range(60):
        counts = jitted_forward(config)(params, bias, *batch).counts
        spread.append({name: float(n.sum(0).std()) for name, n in counts.items()})
        bias = update(bias, counts)
    for name, before in spread[0].items():
        assert min(s[name] for s in spread[-10:]) < 0.6 * before, (name, before, spread[-1][name])
