"""Eq. 2-3: routers' logits, selection, weights, usage counts and the balancing bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.expert_subsets import even_share, only_eligible
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import Depth, DepthCode, tell_depth
from dreamer_jax.config.expert_subsets import ExpertSubsets
from dreamer_jax.config.values import Balancing
from pallas_kernels.kept import keep
from pallas_kernels.weights import Stacked, own

BINS = 20
"""Equal bins of [0, 1] that the scores of selected experts are counted in."""
MOST_ABOVE = 5.0
"""Of a proportional update: an expert with six times the mean or more is pushed down so much."""
HIGHEST = 6
"""Passes of a float32 matrix product at highest precision on a matrix unit."""


class Router(Block):
    """Attention logits of tokens over experts: low-rank queries, encoded by depth, and learned keys (section 3.5).

    Attributes:
        hidden_size: h.
        num_experts: E.
        size: r, of queries and keys; divisible by 4.
        selected: k, experts that a token selects; for counting.
        depth_code: how queries are told their depth; None: they aren't.
        std: of the initial matrices.
        subsets: which experts a depth may choose among; None: all.
    """

    hidden_size: int
    num_experts: int
    size: int
    selected: int
    depth_code: DepthCode | None
    std: float
    subsets: ExpertSubsets | None = None

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, among: jax.Array | None = None) -> jax.Array:
        """[T, h] -> [T, E] float32, minus infinity for experts that can't be chosen; `depth` flat. With `among` [n],
        which has all that can be, [T, n]: of these."""
        init = normal(self.std)
        query_weight = self.weight("query", init, (self.hidden_size, self.size), ("hidden", "router"))
        shape = (self.num_experts, self.size)
        keys = own(self.weight("keys", init, shape, ("expert_keys", "router"), "router_key"))

        # Routing is float32: the product of compute-dtype factors is accumulated and kept in float32.
        query = RMSNorm(name="query_norm")(_project(x, query_weight))
        (query,) = tell_depth(self, self.depth_code, depth, query)
        if not self.folded("keys_norm"):
            keys = RMSNorm(name="keys_norm")(keys)
        if among is not None:
            keys = keys[among]
        letters = "tr,ter->te" if keys.ndim == 3 else "tr,er->te"
        logits = jnp.einsum(letters, query, keys, precision="highest") * self.size**-0.5
        return logits if among is not None else only_eligible(logits, self.subsets, depth)

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them: the keys normalised once and for all, in float32."""
        keys = rms_norm(weights["keys"], jnp.expand_dims(weights["keys_norm"]["scale"], -2))
        kept = {name: leaf for name, leaf in weights.items() if name != "keys_norm"}
        return {**kept, "query": weights["query"].astype(dtype), "keys": keys}

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Query projection, keys, the norms of both, and what is learned of depths."""
        told = self.depth_code.rows if self.depth_code else 0
        return (self.hidden_size + self.num_experts + 2 + told) * self.size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """The query and its product with the keys of all experts that a depth may choose among."""
        return 2 * (self.hidden_size + self.choices) * self.size

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Norm and rotation of the query; sigmoid and bias; k comparisons an expert; normalisation.

        Norms of the keys belong to no token and aren't counted.
        """
        normalise = 2 * self.selected if self.selected > 1 else 0
        query = self.size if self.depth_code is None else 2 * self.size
        return query + (2 + self.selected) * self.choices + normalise

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Query before and after its norm, and the logits."""
        return 2 * self.size + self.choices

    @property
    def choices(self) -> int:
        """Experts that a depth may choose among."""
        return self.subsets.size if self.subsets else self.num_experts

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Logits are written, and read for the selection; remat "attention" keeps what was selected of them."""
        size, experts = tiled(self.size), tiled(self.choices)
        passes, logits = 1 + on.again.cheap + 2, 1 + on.again.products
        flops = 2 * on.tokens * (passes * self.hidden_size * size + (logits + 2) * HIGHEST * size * experts)
        traffic = passes * on.tokens * (self.hidden_size * BFLOAT16_BYTES + 2 * self.size * FLOAT32_BYTES)
        traffic += (2 * logits + 2) * on.tokens * experts * FLOAT32_BYTES
        yield Operation("routers", flops, traffic)


def _project(x: jax.Array, weight: Any) -> jax.Array:
    """x times a matrix [h, r] that may be stacked; accumulated and kept in float32."""
    matrix = own(weight)
    if matrix.ndim == 2:
        return jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
    return jnp.einsum("th,thr->tr", x, matrix, preferred_element_type=jnp.float32)


def select(
    logits: jax.Array, bias: jax.Array | Stacked, experts_per_token: int, among: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k experts of largest logit + b, and the sigmoid of their logits: the bias steers, it never weighs (Eq. 2).

    Args:
        logits: [T, E] float32; or [T, n], of the experts `among` [n] int32.
        bias: [E] float32; of a layered model perhaps stacked.

    Returns:
        indices [T, k] int32 and scores [T, k] float32.
    """
    b = own(bias) if among is None else own(bias)[among]
    # Kept under remat "attention": little, and all that the backward pass needs of the logits.
    places = keep(jax.lax.top_k(jax.lax.stop_gradient(logits) + b, experts_per_token)[1])
    scores = jax.nn.sigmoid(keep(jnp.take_along_axis(logits, places, axis=-1)))
    return places if among is None else among[places], scores


def usage(indices: jax.Array, num_experts: int, real: jax.Array) -> jax.Array:
    """N of Eq. 3: how often each expert was selected by tokens that are not padding.

    Args:
        indices: [T, k] int32.
        real: [T] bool, False for padding.

    Returns:
        [E] int32.
    """
    ones = jnp.broadcast_to(real[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(num_experts, jnp.int32).at[indices].add(ones)


def observe_routing(logits: jax.Array, scores: jax.Array, real: jax.Array) -> dict[str, jax.Array]:
    """What analysis wants to know of a router: sums over the tokens that are not padding.

    Args:
        logits: [T, E] float32.
        scores: [T, k] float32, sigmoid scores of the selected experts.
        real: [T] bool.

    Returns:
        `entropy` float32: of the sigmoid scores of all experts, normalised; in nats. `scores` [BINS] int32: selections
        by score.
    """
    share = jax.nn.sigmoid(logits) / jnp.sum(jax.nn.sigmoid(logits), axis=-1, keepdims=True)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    bins = jnp.clip((scores * BINS).astype(jnp.int32), 0, BINS - 1)
    ones = jnp.broadcast_to(real[:, None], bins.shape).astype(jnp.int32)
    return {
        "entropy": jnp.sum(jnp.where(real, entropy, 0)),
        "scores": jnp.zeros(BINS, jnp.int32).at[bins].add(ones),
    }


def balance(
    bias: jax.Array,
    counts: jax.Array,
    rate: float | jax.Array,
    rule: Balancing = "sign_median",
    eligible: np.ndarray | None = None,
    groups: int = 1,
) -> jax.Array:
    """The update of a balancing bias after what depths have counted.

    sign_median is Eq. 3, b += rate * sign(median(N) - N). It stalls where half of the experts are idle: the median is
    zero then, and idle ones stay as they are. The others compare with the mean, v = 1 - N / mean(N): sign_mean adds
    rate * sign(v) (Wang et al., 2024), tanh adds rate * (tanh(v) - mean(tanh(v))), which moves the biases apart but
    not all together, and proportional adds rate * v, at least -`MOST_ABOVE` times the rate.

    Where depths have subsets of the experts, an expert of few depths can't be selected as often as one of many. N is
    then divided by what even use at each depth would have given it, times the mean of that; what no depth of the update
    could select stays where it is.

    Args:
        bias: [E], of depths that share one router; or [L, E], one of each layer.
        counts: N of every depth, [L, E] int32, summed over the global batch and all microbatches. Depths that share a
            router are summed first. There may be fewer than layers: the biases of those that counted nothing rest.
        rate: of the update.
        rule: see above.
        eligible: [L, E] bool, whether an expert could be selected at a depth; None: all could.
        groups: of successive depths that share a router, as near to one size as can be; each moves the bias by what
            it alone counted.
    """
    if bias.ndim == counts.ndim:
        counts = jnp.pad(counts, ((0, len(bias) - len(counts)), (0, 0)))
        return bias + rate * _moved_by(counts, rule, None)
    for part in np.array_split(np.arange(len(counts)), min(groups, len(counts))):
        its = slice(int(part[0]), int(part[-1]) + 1)
        bias = bias + rate * _moved_by(counts[its], rule, None if eligible is None else eligible[its], together=True)
    return bias


def _moved_by(counts: jax.Array, rule: Balancing, eligible: np.ndarray | None, together: bool = False) -> jax.Array:
    """By how much counts [L, E] move biases at a rate of one: [L, E], or of all depths `together` [E]."""
    n = (jnp.sum(counts, axis=0) if together else counts).astype(jnp.float32)
    mean = jnp.mean(n, axis=-1, keepdims=True)
    if eligible is None:
        return _moved(n, mean, rule, jnp.median, jnp.mean)
    even = even_share(counts.astype(jnp.float32), eligible)
    moved = _moved(jnp.where(even > 0, n * mean / even, jnp.nan), mean, rule, jnp.nanmedian, jnp.nanmean)
    return jnp.where(even > 0, moved, 0)


def _moved(n: jax.Array, mean: jax.Array, rule: Balancing, median: Any, average: Any) -> jax.Array:
    """By how much a rule moves biases [..., E] at a rate of one."""
    if rule == "sign_median":
        return jnp.sign(median(n, axis=-1, keepdims=True) - n)
    if rule == "sign_mean":
        return jnp.sign(mean - n)
    violation = (mean - n) / jnp.maximum(mean, 1.0)
    if rule == "proportional":
        return jnp.maximum(violation, -MOST_ABOVE)
    pushed = jnp.tanh(violation)
    return pushed - average(pushed, axis=-1, keepdims=True)
