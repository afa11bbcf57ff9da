"""Small models, weights and packed batches that the tests of the model share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.config.models.algoformer import AlgoformerConfig
from dreamer_jax.config.models.cotformer import CotformerConfig
from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.models.dreamer_classifier import DreamerClassifierConfig
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.huginn_classifier import HuginnClassifierConfig
from dreamer_jax.config.models.moeut import MoeutConfig
from dreamer_jax.config.models.ouro import OuroConfig
from dreamer_jax.config.models.ponder import PonderConfig
from dreamer_jax.config.models.recursive import RecursiveConfig
from dreamer_jax.config.models.universal import UniversalConfig
from dreamer_jax.families import build, forward, initialise
from dreamer_jax.inference.model import FoldedModel, fold
from dreamer_jax.inference.samplers import adaptive, one_by_one
from dreamer_jax.inference.samplers.contract import Asked, Choosing, Progress
from dreamer_jax.inference.sampling import Sampling

VARIANTS = [
    "LA",
    "DR+DA",
    pytest.param("LA+DA", marks=pytest.mark.slow),
    pytest.param("DR", marks=pytest.mark.slow),
]
"""Of tests that compile each: LA and DR+DA have every part of the other two."""
MIXINGS = ("sequential", "parallel_attention", "parallel")

# One row a list of document lengths, negative for padding: several documents, single ones, padding on every side.
ROWS = ((5, 4, -3), (12,), (-1, 2, 1, 6, -2))
SEGMENT_IDS = np.array(
    [[n * (size > 0) for n, size in enumerate(row, 1) for _ in range(abs(size))] for row in ROWS], np.int32
)
POSITIONS = np.array([[i for size in row for i in range(abs(size))] for row in ROWS], np.int32)
REAL = SEGMENT_IDS > 0
PACKED = (SEGMENT_IDS, POSITIONS)

OUTSIDE = 999
"""A place behind all rows: a position there leaves nothing."""


_SIZES: dict[str, Any] = {"depth": 2, "hidden_size": 16, "vocab_size": 23, "dtype": "float32"}
_DREAMER: dict[str, Any] = {
    "sa_heads": 2,
    "sa_kv_heads": 1,
    "sa_head_size": 8,
    "da_heads": 1,
    "da_kv_heads": 1,
    "da_head_size": 8,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 8,
    "router_size": 8,
}
_HUGINN: dict[str, Any] = {
    "heads": 2,
    "kv_heads": 2,
    "head_size": 8,
    "mlp_size": 22,
    "core_layers": 1,
    "coda_layers": 0,
    "gradient_recurrences": 1,
}
_MOEUT: dict[str, Any] = {
    "heads": 2,
    "head_size": 8,
    "attention_experts": 2,
    "attention_experts_per_token": 1,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 8,
}
_OURO: dict[str, Any] = {"layers": 2, "heads": 2, "kv_heads": 2, "head_size": 8, "mlp_size": 22}
TINY_MODELS: dict[str, Any] = {
    "algoformer": AlgoformerConfig(**_SIZES, heads=2, head_size=8, mlp_size=22, scored=2),
    "cotformer": CotformerConfig(
        **_SIZES, begin_layers=0, middle_layers=1, end_layers=0, heads=2, mlp_size=20, adaptive=True
    ),
    "depth_recurrent": DepthRecurrentConfig(**_SIZES, depth_min=1, max_depth=4, heads=2, mlp_size=20, dropout=0.2),
    "dreamer": DreamerConfig(**_SIZES, **_DREAMER, variant="DR"),
    "dreamer_classifier": DreamerClassifierConfig(**_SIZES, **_DREAMER, variant="LA"),
    "huginn": HuginnConfig(**_SIZES, **_HUGINN, prelude_layers=1),
    "huginn_classifier": HuginnClassifierConfig(**_SIZES, **_HUGINN, prelude_layers=0),
    "moeut": MoeutConfig(**_SIZES, **_MOEUT, layers=1),
    "ouro": OuroConfig(**_SIZES, **_OURO),
    "ponder": PonderConfig(**_SIZES, **_OURO),
    "recursive": RecursiveConfig(**_SIZES, **{**_OURO, "layers": 1}, rank=2, share_norms=False),
    "universal": UniversalConfig(**_SIZES, heads=2, mlp_size=20, halting_bias=0.0),
}
"""Family -> its smallest model, for what has to hold of every family (test_registry.py); meshes have tests of their own
for what else Dreamer and Huginn have."""


def small_config(variant: str = "DR+DA", mixing: str = "parallel_attention", **changes: Any) -> DreamerConfig:
    """Three depths with grouped queries in both attentions; every size differs, so that no mix-up goes unnoticed."""
    sizes: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 16,
        "vocab_size": 23,
        "sa_heads": 4,
        "sa_kv_heads": 2,
        "sa_head_size": 6,
        "da_heads": 4,
        "da_kv_heads": 2,
        "da_head_size": 8,
        "num_experts": 7,
        "experts_per_token": 2,
        "expert_size": 5,
        "router_size": 12,
        "dtype": "float32",
        "implementation": "xla",
    }
    return DreamerConfig(variant=variant, mixing=mixing, **{**sizes, **changes})  # type: ignore[arg-type]


@functools.cache
def random_weights(config: DreamerConfig, seed: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """(params, bias) far from the initialisation: larger matrices, uneven norm scales, a bias that decides."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[-1].key == "scale":
            values = rng.uniform(0.5, 1.5, leaf.shape)
        elif path[-1].key == "embedding":
            values = rng.normal(size=leaf.shape)
        else:
            values = rng.normal(size=leaf.shape) * 0.3
        return values.astype(np.float32)

    params, state = jax.eval_shape(lambda: initialise(build(config), jax.random.key(0)))
    bias = state["balancing"]
    params = jax.tree_util.tree_map_with_path(draw, params)
    bias = {name: (rng.normal(size=b.shape) * 0.3).astype(np.float32) for name, b in bias.items()}
    return params, bias


@functools.cache
def drawn_params(config: Any) -> Any:
    """Parameters in which nothing is one or zero: scales of norms around one, the rest around zero."""
    rng = np.random.default_rng(1)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        norm = path[-1].key in ("scale", "final_norm")
        return (norm + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(build(config).shapes[0]))


def random_tokens(config: DreamerConfig, seed: int = 0, shape: tuple[int, ...] = SEGMENT_IDS.shape) -> np.ndarray:
    """[B, S] int32."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


class Output(NamedTuple):
    """Logits [B, S, V] float32, and counts, router name -> [L, E] int32."""

    logits: jax.Array
    counts: dict[str, jax.Array]


def apply(
    config, params, bias, tokens, segment_ids=None, positions=None, depth=None, remat="full", operations=None
) -> Output:
    """A pass of the model over whole rows."""
    family = build(config, operations)
    batch = {"tokens": jnp.asarray(tokens), "segment_ids": segment_ids, "positions": positions}
    passed = forward(family, params, {"balancing": bias}, batch, depth, remat)
    hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
    return Output(family.logits(params, hidden), passed.counts)


@functools.cache
def jitted_forward(config: DreamerConfig, remat: str = "full") -> Any:
    """(params, bias, tokens, segment_ids, positions, depth) -> Output, with the depth traced."""

    def run(params, bias, tokens, segment_ids, positions, depth):
        return apply(config, params, bias, tokens, segment_ids, positions, depth, remat)

    return jax.jit(run)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def logits_in_flight(model: FoldedModel, tokens: jax.Array, places: jax.Array, slots: Any) -> jax.Array:
    """Logits [B, P, V] of positions that follow each other, when the i-th is at depth t - i at time t: what decoding of
    positions at different depths comes to."""
    behind, depth = places - places[:, :1], model.total_depth

    def at(time: jax.Array, carry: Any) -> Any:
        flight, slots = carry
        depths = time - behind
        flying = (depths >= 0) & (depths < depth)
        new, slots = model.step(flight, jnp.where(flying, places, OUTSIDE), jnp.clip(depths, 0, depth - 1), slots)

        def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(flying.reshape(*flying.shape, *[1] * (a.ndim - 2)), a, b)

        return new._replace(state=jax.tree.map(chosen, new.state, flight.state)), slots

    entered = model.enter(tokens, places, slots)
    flight, slots = jax.lax.fori_loop(0, places.shape[1] + depth - 1, at, entered)
    return model.logits(model.leave(flight, places, slots)[0])


@functools.partial(jax.jit, static_argnames="criterion")
def until_stopped(
    model: FoldedModel, tokens: jax.Array, places: jax.Array, slots: Any, criterion: Any = None, *numbers
):
    """Tokens [B, 1] at these places through the depths until they stop: logarithms of the probabilities of what follows
    [B, V], the slots, and depths taken [B]. `criterion` of `Adaptive`, with its numbers; None: the family decides."""
    rows, vocabulary = tokens.shape[0], model.config.vocab_size
    its = one_by_one.NEVER if criterion is None else adaptive.rule(criterion, *numbers)
    none, last = jnp.zeros(rows, jnp.int32), tokens[:, 0].astype(jnp.int32)
    progress = Progress(last, places[:, 0], none > 0, none, none + OUTSIDE, none + model.total_depth)
    asked = Asked(jnp.int32(1), jnp.array([-1]), Sampling().numbers(), ())
    carried = one_by_one.carry(model, rows, its)
    block = one_by_one.decode(
        Choosing(logprobs=vocabulary), model, progress, slots, carried, asked, lambda settings: its
    )
    logs = jnp.zeros((rows, vocabulary)).at[jnp.arange(rows)[:, None], block.logprobs.ids[:, 0]]
    return logs.set(block.logprobs.values[:, 0]), block.slots, block.depths[:, 0]


def relative_error(actual: Any, expected: Any) -> float:
    """Largest difference over the largest expected magnitude."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def cross_entropy(logits: jax.Array, targets: jax.Array, real: jax.Array) -> jax.Array:
    """Mean over real targets; any scalar loss would do, this one weighs every real token."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * real) / jnp.sum(real)


@functools.cache
def flying(config: DreamerConfig, depth: int | None = None) -> tuple[FoldedModel, np.ndarray]:
    """A folded model, and its logits [2, 6, V] of positions behind one another, each at a depth of its own."""
    params, bias = random_weights(config)
    model = fold(config, params, {"balancing": bias}, depth=depth)
    tokens = random_tokens(config, 1, (2, 6))
    places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
    return model, np.asarray(logits_in_flight(model, jnp.asarray(tokens), places, model.empty_slots(2, 6)))


def passed_whole(config: DreamerConfig, depth: int | None = None) -> jax.Array:
    """Logits of the same tokens in a pass over whole rows, by a static depth, which may exceed the trained one."""
    tokens, ones = random_tokens(config, 1, (2, 6)), np.ones((2, 6), np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    whole = jax.jit(functools.partial(apply, config, depth=depth))
    return whole(*random_weights(config), tokens, ones, positions).logits
