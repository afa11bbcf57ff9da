"""Initialisation against Table 3's formulas, and the logical axis names of every parameter."""

import math

import jax
import numpy as np
import pytest

from dreamer_jax.blocks.parameters import Parameter, is_box
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.families import build, initialise
from tests.families.cases import VARIANTS, small_config

OUTPUT_NAMES = ("out", "out_shared", "down")
AXIS_NAMES = {
    *("vocab", "hidden", "heads", "router", "expert_keys", "expert", "mlp", "attention_expert", "norm", "layer")
}
ROLES = {"scale": "norm", "keys": "router_key", "embedding": "embedding", "head": "embedding"}


def wide(variant):
    """Large enough for an empirical standard deviation; depth 5 so that L, n and h can't be mistaken."""
    return small_config(variant, depth=5, hidden_size=64, num_experts=24, expert_size=20, vocab_size=130)


@pytest.mark.parametrize("variant", VARIANTS)
def test_standard_deviations(variant):
    """sqrt(1/(5h)), and sqrt(1/(2.5 h L n)) for the output and down projections; norms one, biases zero."""
    config = wide(variant)
    params, state = initialise(build(config), jax.random.key(1))
    attentions = 3 if config.depth_attention else 2
    ordinary = math.sqrt(1 / (5 * config.hidden_size))
    output = math.sqrt(1 / (2.5 * config.hidden_size * config.depth * attentions))
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, values = path[-1].key, np.asarray(leaf)
        where = jax.tree_util.keystr(path)
        assert values.dtype == np.float32, where
        seen.add(name)
        if name == "scale":
            assert np.all(values == 1), where
            continue
        expected = output if name in OUTPUT_NAMES else ordinary
        sampling_error = 1 / math.sqrt(2 * values.size)  # relative standard error of a standard deviation
        assert values.std() == pytest.approx(expected, rel=4.5 * sampling_error), where
        assert abs(values.mean()) < 4.5 * expected / math.sqrt(values.size), where
        if values.size >= 1000:
            assert np.abs(values).max() > 2.8 * expected, f"{where} looks truncated or uniform"
    assert {"embedding", "head", "qkv", "out", "gate_up", "down", "query", "keys", "scale"} <= seen
    assert (("qkv_shared" in seen) and ("out_shared" in seen)) == config.recurrent
    assert all(not np.any(b) for b in state["balancing"].values())


@pytest.mark.slow
def test_same_key_same_weights_and_no_two_alike():
    """Deterministic in the key; no two matrices, layers or experts are copies."""
    config = small_config("LA+DA", depth=2)
    first, again, other = (initialise(build(config), jax.random.key(seed))[0] for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    matrices = [leaf for leaf in jax.tree.leaves(first) if leaf.ndim > 1 and not np.all(leaf == 1)]
    starts = [row[:8].tobytes() for leaf in matrices for row in np.asarray(leaf).reshape(-1, leaf.shape[-1])]
    assert len(set(starts)) == len(starts)
    assert not np.array_equal(first["embedding"], other["embedding"])


@pytest.mark.parametrize("variant", ["LA+DA", "DR+DA"])
def test_logical_axes(variant):
    """Every parameter is boxed with one known axis name a dimension, and a role that its place tells."""
    config = small_config(variant)
    axes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(build(config).boxed, is_leaf=is_box):
        where = jax.tree_util.keystr(path)
        assert isinstance(leaf, Parameter), f"{where} has no axis names"
        assert len(leaf.axes) == leaf.value.ndim, where
        assert set(leaf.axes) <= AXIS_NAMES, (where, leaf.axes)
        assert leaf.role == ROLES.get(path[-1].key, "matrix"), where
        axes[where] = leaf.axes
    layer, lead = ("layer", ()) if config.recurrent else ("layers", ("layer",))
    assert axes["['embedding']"] == ("vocab", "hidden")
    assert axes[f"['{layer}']['expert_attention']['gate_up']"] == (*lead, "expert", "mlp", "hidden")
    experts = ("attention_expert",) if config.recurrent else ("layer",)
    assert axes[f"['{layer}']['sequence_attention']['projections']['out']"] == (*experts, "heads", "hidden")


@pytest.mark.parametrize(
    ("variant", "experts", "size", "billions"),
    [("LA", 32, 512, 1.1708), ("DR", 517, 504, 1.1704), ("DR+DA", 537, 480, 1.1708)],
)
def test_parameters_of_the_papers_models(variant, experts, size, billions):
    """Table 3's sizes at depth 16 give Table 1's parameter counts (shapes only, nothing is allocated)."""
    config = DreamerConfig(
        variant=variant,
        depth=16,
        hidden_size=1024,
        vocab_size=128_256,
        sa_heads=16,
        sa_kv_heads=8,
        sa_head_size=128,
        da_head_size=128,
        num_experts=experts,
        experts_per_token=8,
        expert_size=size,
        router_size=128,
    )
    params, _ = jax.eval_shape(lambda: initialise(build(config), jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / 1e9 == pytest.approx(billions, abs=5e-5)
