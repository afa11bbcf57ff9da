"""Experts that a depth may choose among: by hand, against NumPy, plain autodiff, and each other."""

import dataclasses
import functools
from collections import Counter
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.analysis.collection import add
from dreamer_jax.analysis.observation import observe_batch
from dreamer_jax.analysis.summary import summarise
from dreamer_jax.blocks.expert_subsets import eligible, even_share
from dreamer_jax.blocks.routing import balance, select
from dreamer_jax.blocks.usage import expert_use
from dreamer_jax.budget import analytic, memory, program
from dreamer_jax.config.expert_subsets import ExpertSubsets, Part
from dreamer_jax.config.values import Balancing
from dreamer_jax.errors import ConfigError
from dreamer_jax.families import build
from tests.families.cases import (
    PACKED,
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    apply,
    flying,
    jitted_forward,
    passed_whole,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward
from tests.families.test_gradients import assert_same, model_loss, unrolled_gradient

TOLERANCE = 1e-5
SAFE_MARGIN = 5e-6
SMALL: dict[str, Any] = {"depth": 4, "hidden_size": 12, "num_experts": 11, "da_heads": 2, "da_kv_heads": 1}
SLIDING = small_config("DR+DA", **SMALL, expert_subset="sliding", expert_subset_share=0.4)
HIERARCHICAL = small_config("DR", **SMALL, expert_subset="hierarchical")
BOTH = pytest.mark.parametrize("config", [SLIDING, HIERARCHICAL], ids=["sliding", "hierarchical"])


def size_of(config) -> int:
    """Experts of a depth."""
    subsets = config.expert_subsets
    assert subsets is not None
    return subsets.size


def test_a_window_over_the_list_by_hand():
    """Eight experts, four a depth, four depths: the window begins at places 0, 1, 2 and 4. Place p is expert 5 p."""
    subsets = ExpertSubsets("sliding", 8, 4, 0.5)
    listed = [0, 5, 2, 7, 4, 1, 6, 3]
    assert subsets.by_depth == tuple(tuple(listed[begin : begin + 4]) for begin in (0, 1, 2, 4))


def test_parts_of_the_list_by_hand():
    """Four depths: a third of twelve experts is every depth's, two are of each half, and every depth has one."""
    subsets = ExpertSubsets("hierarchical", 12, 4, 0.5)
    assert subsets.parts == (Part(0, 4, 4, 1), Part(4, 4, 2, 2), Part(8, 4, 1, 4))
    places = [[0, 1, 2, 3, *half, own] for half, own in (((4, 5), 8), ((4, 5), 9), ((6, 7), 10), ((6, 7), 11))]
    assert [sorted(p * 7 % 12 for p in own) for own in places] == [sorted(own) for own in subsets.by_depth]


@pytest.mark.parametrize("kind", ["sliding", "hierarchical"])
@pytest.mark.parametrize(("experts", "depth"), [(11, 4), (64, 8), (64, 12), (537, 16), (1097, 32), (3, 2), (2, 7)])
def test_every_expert_has_a_depth_and_every_depth_as_many(kind, experts, depth):
    subsets = ExpertSubsets(kind, experts, depth, 0.25 if depth > 3 else 0.5)
    assert {len(set(own)) for own in subsets.by_depth} == {subsets.size}
    assert {expert for own in subsets.by_depth for expert in own} == set(range(experts))


def test_shares_of_the_paper():
    """About a half of the experts may be chosen at eight depths of 32 or more, about a third at one or two."""
    depths = Counter(expert for own in ExpertSubsets("hierarchical", 1097, 32, 0.5).by_depth for expert in own)
    assert sum(n >= 8 for n in depths.values()) / 1097 == pytest.approx(1 / 2, abs=0.01)
    assert sum(n <= 2 for n in depths.values()) / 1097 == pytest.approx(1 / 3, abs=0.01)
    assert max(depths.values()) == 32


@pytest.mark.parametrize("kind", ["sliding", "hierarchical"])
def test_devices_have_equal_shares_of_every_subset(kind):
    """Experts divided in order over eight devices: at each depth, none has much more than an eighth."""
    subsets = ExpertSubsets(kind, 1097, 32, 0.25)
    for own in subsets.by_depth:
        busiest = max(Counter(expert // 138 for expert in own).values())
        assert busiest < 1.1 * subsets.size / 8


@BOTH
def test_equal_to_numpy(config):
    """Packed rows, at the trained depth, a shallower and a deeper one; nothing else is chosen."""
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for depth in (4, 3, 6):
        expected = forward(config, params, bias, tokens, *PACKED, depth=depth)
        assert expected.margin > SAFE_MARGIN, "near tie: choose another seed"
        found = jax.jit(functools.partial(apply, config, depth=depth))(params, bias, tokens, *PACKED)
        assert relative_error(np.asarray(found.logits)[REAL], expected.logits[REAL]) < TOLERANCE
        for name, counts in expected.counts.items():
            np.testing.assert_array_equal(found.counts[name], counts)
        chosen = np.asarray(found.counts["expert_attention"]) > 0
        assert not np.any(chosen & ~eligible(config.expert_subsets, depth))


@pytest.mark.slow_but("attention-hierarchical")
@BOTH
@pytest.mark.parametrize("remat", ["full", "attention"])
def test_gradients_are_those_of_an_unrolled_loop(config, remat):
    gradient = jax.jit(jax.value_and_grad(functools.partial(model_loss, config=config, remat=remat)))
    assert_same(gradient(*random_weights(config)), unrolled_gradient(config))


def test_all_experts_at_every_depth_change_nothing():
    plain = small_config("DR", **SMALL)
    whole = dataclasses.replace(plain, expert_subset="sliding", expert_subset_share=1.0)
    tokens = random_tokens(plain)
    found, expected = (jitted_forward(c)(*random_weights(plain), tokens, *PACKED, 4) for c in (whole, plain))
    assert relative_error(np.asarray(found.logits)[REAL], np.asarray(expected.logits)[REAL]) < 1e-6
    np.testing.assert_array_equal(found.counts["expert_attention"], expected.counts["expert_attention"])
    counts, bias = jnp.arange(44).reshape(4, 11) % 7, jnp.zeros(11)
    table = eligible(whole.expert_subsets, 4)
    for rule in get_args(Balancing):
        np.testing.assert_allclose(balance(bias, counts, 1.0, rule, table), balance(bias, counts, 1.0, rule), atol=1e-6)


@pytest.mark.slow_but("6-sliding", "None-hierarchical")
@BOTH
@pytest.mark.parametrize("depth", [None, 6])
def test_decoding_is_the_whole_pass(config, depth):
    """Every position at a depth of its own, where all experts are scored and some left out."""
    _, found = flying(config, depth)
    assert relative_error(found, passed_whole(config, depth)) < TOLERANCE


def test_selection_among_some():
    """The bias is each expert's own, wherever it stands among those that can be chosen."""
    logits, bias = jnp.array([[0.1, 0.2, 0.3]]), jnp.array([9.0, 0.0, 0.5, 9.0, 0.0, 0.25])
    indices, scores = select(logits, bias, 2, jnp.array([4, 2, 5]))  # 0.1, 0.7, 0.55
    np.testing.assert_array_equal(indices, [[2, 5]])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp([[-0.2, -0.3]])), rtol=1e-6)


TABLE = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 0]], bool)
USED = jnp.array([[4, 3, 5, 0, 0], [7, 0, 0, 5, 0], [0, 0, 0, 0, 0]], jnp.int32)
"""Even use at each depth would give experts 4 + 6, 4, 4, 6 and 0 of the 24; they have 11, 3, 5, 5, 0."""


def test_even_shares_by_hand():
    np.testing.assert_allclose(even_share(USED.astype(jnp.float32), TABLE), [10, 4, 4, 6, 0])


@pytest.mark.parametrize(
    ("rule", "moved"),
    [
        ("sign_median", [-1, 1, -1, 1, 0]),  # 1.1, 0.75, 1.25, 0.83 of their shares
        ("sign_mean", [-1, 1, -1, 1, 0]),
        ("proportional", [-0.1, 0.25, -0.25, 1 / 6, 0]),
        ("tanh", [*(np.tanh([-0.1, 0.25, -0.25, 1 / 6]) - np.mean(np.tanh([-0.1, 0.25, -0.25, 1 / 6]))), 0]),
    ],
)
def test_an_expert_is_compared_with_its_own_share(rule, moved):
    """By counts alone the first would have to fall and the second to rise by far more; the last no depth could have."""
    np.testing.assert_allclose(balance(jnp.ones(5), USED, 0.5, rule, TABLE), 1 + 0.5 * np.array(moved), atol=1e-6)


def test_in_groups_of_depths_it_is_compared_with_its_share_of_the_group():
    """By hand: 4 3 5 of 4 each at the first depth, 7 and 5 of 6 at the second; nothing at the third."""
    moved = balance(jnp.zeros(5), USED, 1.0, "proportional", TABLE, groups=3)
    np.testing.assert_allclose(moved, [-1 / 6, 0.25, -0.25, 1 / 6, 0], atol=1e-6)


def test_use_is_told_by_shares():
    even = np.array([[4, 4, 4, 0, 0], [6, 0, 0, 6, 0], [0, 0, 0, 0, 0]])
    told = expert_use({"a": even}, True, {"a": TABLE})
    assert told == {"experts/a/used": 1, "experts/a/gini": pytest.approx(0), "experts/a/max_over_median": 1}
    assert expert_use({"a": even}, True)["experts/a/gini"] > 0.3
    assert expert_use({"a": 0 * even}, True, {"a": TABLE})["experts/a/used"] == 0


def test_updates_bring_use_nearer_to_the_shares():
    config = dataclasses.replace(SLIDING, expert_bias_rate=0.05)
    params, bias = random_weights(config)
    family, batch, spread = build(config), (random_tokens(config), *PACKED, 4), []
    update = jax.jit(lambda bias, counts: family.update({"balancing": bias}, counts, jnp.int32(0))["balancing"])
    for _ in range(40):
        counts = jitted_forward(config)(params, bias, *batch).counts
        spread.append(family.log({"balancing": bias}, jax.device_get(counts))["experts/expert_attention/gini"])
        bias = update(bias, counts)
    assert min(spread[-10:]) < 0.6 * spread[0]


@BOTH
def test_the_program_has_the_products_that_are_counted(config):
    assert program.count(config, 6) == program.expected(config, 6)


def test_budgets_count_scored_experts():
    """Routers score five of eleven experts; parameters and caches are what they were."""
    plain, family = build(dataclasses.replace(SLIDING, expert_subset="all", expert_subset_share=0.5)), build(SLIDING)
    assert size_of(SLIDING) == 5
    saved = analytic.matmul_flops(plain, 9)["routers"] - analytic.matmul_flops(family, 9)["routers"]
    assert saved == pytest.approx(4 * 2 * (11 - 5) * 12)  # of the depths, of size r
    assert analytic.matmul_flops(family, 9)["EA"] == analytic.matmul_flops(plain, 9)["EA"]
    assert analytic.parameters(family) == analytic.parameters(plain)
    assert memory.caches(family, 9) == memory.caches(plain, 9)


def test_a_search_begins_where_depths_have_enough():
    fewest = build(SLIDING).knobs()[1].smallest
    assert size_of(dataclasses.replace(SLIDING, num_experts=fewest)) == 2
    with pytest.raises(ConfigError):
        dataclasses.replace(SLIDING, num_experts=fewest - 1)


def test_analysis_tells_use_and_entropy_by_depth():
    params, bias = random_weights(HIERARCHICAL)
    batch = {
        "tokens": random_tokens(HIERARCHICAL),
        "segment_ids": SEGMENT_IDS,
        "positions": POSITIONS,
        "targets": np.roll(random_tokens(HIERARCHICAL), -1, 1),
        "loss_mask": REAL,
        "answer_mask": REAL,
    }
    sums = add(None, jax.jit(functools.partial(observe_batch, HIERARCHICAL))(params, {"balancing": bias}, batch))
    told = summarise(HIERARCHICAL, sums, {"balancing": bias})["routers"]["expert_attention"]
    expected = jitted_forward(HIERARCHICAL)(params, bias, batch["tokens"], *PACKED, 4).counts["expert_attention"]
    np.testing.assert_array_equal(told["counts"], expected)
    assert told["largest_entropy"] == pytest.approx(np.log(size_of(HIERARCHICAL)))
    assert 0 < min(told["entropy"]) <= max(told["entropy"]) <= told["largest_entropy"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"variant": "LA", "expert_subset": "sliding"},
            "model.expert_subset: sliding is for DR and DR+DA; layers of LA",
        ),
        (
            {"depth": 1, "expert_subset": "hierarchical"},
            "model.expert_subset: hierarchical has no meaning at model.depth",
        ),
        (
            {"expert_subset": "hierarchical", "expert_subset_share": 0.3},
            "model.expert_subset_share: 0.3 is for sliding",
        ),
        ({"expert_subset_share": 0.3}, "model.expert_subset_share: 0.3 is for sliding, and model.expert_subset is all"),
        ({"expert_subset": "sliding", "expert_subset_share": 1.5}, "model.expert_subset_share: 1.5 is more than all"),
        (
            {"expert_subset": "sliding", "expert_subset_share": 0.2},
            "model.expert_subset_share: 0.2 leaves experts that",
        ),
        ({"expert_subset": "sliding", "num_experts": 2}, "model.expert_subset: sliding leaves a depth 1 of 2 experts"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, line):
    with pytest.raises(ConfigError) as caught:
        small_config(**{"variant": "DR", **SMALL, **changes})
    assert str(caught.value).startswith(line)


def test_a_summary_says_so():
    assert HIERARCHICAL.summary.endswith("hierarchical subsets of 6 experts")
