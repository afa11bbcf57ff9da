"""The feed-forward network of MoEUT, sigma-MoE (Csordas et al., 2023), and the selection of its experts.

A token's scores are s = sigmoid(W_s z), the k largest are taken as they are, not normalised:

    out = sum over the selected e of  s_e relu(x K_e) V_e

`operations.expert_mlp` doesn't fit, since its experts are SwiGLU. Here each (token, choice) pair is a row of its own,
which goes through two maps of `operations.expert_linear`: the kernels of the attention MoE compute them, with their
tape. Those have no expert parallelism: every device of a mesh has all experts in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, Filled, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer
from dreamer_jax.blocks.routing import select
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tapes
from pallas_kernels.weights import Arranged

SMALLEST = jnp.finfo(jnp.float32).tiny


class Selection(NamedTuple):
    """The experts of every token; with heads, each head selects among its own.

    Attributes:
        logits: [T, E] or [T, n, E], float32.
        indices: [T, k] or [T, n, k] int32.
        scores: likewise, float32: sigmoids of the selected logits.
    """

    logits: jax.Array
    indices: jax.Array
    scores: jax.Array

    @property
    def experts(self) -> jax.Array:
        """The indices with the experts of all heads numbered in a row, those of head i from i E on; [T, k or n k]."""
        if self.indices.ndim == 2:
            return self.indices
        first = jnp.arange(self.logits.shape[1])[:, None] * self.logits.shape[2]
        return (self.indices + first).reshape(len(self.indices), -1)

    def probabilities(self, real: jax.Array) -> jax.Array:
        """Sum over the real tokens of a row of softmax(logits), [B, E] or [B, n, E]; `real` is [B, P]."""
        shares = jax.nn.softmax(self.logits).reshape(*real.shape, *self.logits.shape[1:])
        return jnp.einsum("bt...,bt->b...", shares, real * 1.0)


def expert_logits(x: jax.Array, keys: jax.Array) -> jax.Array:
    """x [T, h] times keys [E, h] -> [T, E], in float32."""
    return jnp.einsum("th,eh->te", x.astype(jnp.float32), keys, precision="highest")


def select_experts(x: jax.Array, keys: jax.Array, selected: int, heads: int = 0) -> Selection:
    """The `selected` experts of largest logit: of keys [E, h], or with n heads of each head's among [n E, h]."""
    logits = expert_logits(x, keys)
    if heads:
        logits = logits.reshape(len(x), heads, -1)
    return Selection(logits, *select(logits, jnp.float32(0), selected))


def negative_entropy(mean: jax.Array) -> jax.Array:
    """sum_e p_e log p_e over the last axis; 0 where everything is 0."""
    return jnp.sum(mean * jnp.log(jnp.maximum(mean, SMALLEST)), axis=-1)


def equal_rows(std: float, by_row: bool = False) -> Initializer:
    """N(0, std^2) with rows of equal length, scaled back to the standard deviation that was drawn.

    Args:
        std: of the draw.
        by_row: scale each row back to its own standard deviation, as the official code does for the attention.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        drawn = std * jax.random.normal(key, shape, dtype)
        unit = drawn / jnp.linalg.norm(drawn, axis=-1, keepdims=True)
        spread = jnp.std(drawn, axis=-1 if by_row else None, keepdims=True, ddof=1)
        return unit * spread / jnp.std(unit, ddof=1)

    return init


class ExpertTapes(flax.struct.PyTreeNode, Tapes):
    """The tapes of a module's expert maps, by the names of their matrices."""

    maps: dict[str, Any]

    def gradients(self) -> dict[str, Any]:
        """The totals of every map."""
        return {name: tape.totals for name, tape in self.maps.items()}


def start_expert_tapes(operations: Operations, weights: dict[str, Any], pairs: int, dtype: str) -> dict[str, Any]:
    """The empty tapes of expert matrices for so many (token, choice) pairs; nothing where the operation has none."""
    tapes = {name: operations.expert_linear.start_tape(pairs, its.shape, dtype) for name, its in weights.items()}
    return {} if None in tapes.values() else {"experts": ExpertTapes(tapes)}


def expert_map(
    operations: Operations,
    rows: jax.Array,
    experts: jax.Array,
    scores: jax.Array | None,
    weights: dict[str, Any],
    name: str,
    tape: dict[str, Any] | None,
) -> jax.Array:
    """s x W_e of (token, choice) pairs: rows [N, a], experts [N], scores [N] or None, weights[name] [E, a, b]."""
    matrix = weights[name]
    matrix = matrix if isinstance(matrix, Arranged) else matrix.astype(rows.dtype)
    its = None if not tape else tape["experts"].maps[name]
    return operations.expert_linear(rows, experts, scores, matrix, None, tape=its)


def pairs_cost(name: str, pairs: float, experts: int, inward: int, outward: int, on: OnChip) -> Operation:
    """A map [E, a, b] of `pairs` rows a token."""
    filled = Filled.by(on.tokens * pairs, experts)
    weights, passes = experts * inward * outward, 3 + on.again.products
    moved = filled.rows * (inward + outward) * BFLOAT16_BYTES + weights * BFLOAT16_BYTES
    totals = weights * FLOAT32_BYTES * (2 if on.depths > 1 else 1)
    products = filled.computed * (passes - 1) + filled.summed
    return Operation(name, 2 * products * tiled(inward) * tiled(outward), moved * passes + totals)


class SigmaMoE(Block):
    """See the module.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        expert_size: F.
        experts, selected: E and k.
        inward, outward, keys: draw K, V and W_s.
    """

    operations: Operations
    hidden_size: int
    expert_size: int
    experts: int
    selected: int
    inward: Initializer
    outward: Initializer
    keys: Initializer

    # The names of the parameters are those of the published checkpoints.

    def setup(self) -> None:
        e, h, size = self.experts, self.hidden_size, self.expert_size
        self.maps = {
            "keys": self.weight("keys", self.inward, (e, h, size), ("linear_expert", "hidden", "mlp")),
            "values": self.weight("values", self.outward, (e, size, h), ("linear_expert", "mlp", "hidden")),
        }
        self.expert_sel = self.weight("expert_sel", self.keys, (e, h), ("expert_keys", "hidden"), "router_key")

    def __call__(
        self, x: jax.Array, normed: jax.Array, tape: dict[str, Any] | None = None
    ) -> tuple[jax.Array, Selection]:
        """What experts make of x [B, P, h], selected by z = `normed` of the same shape."""
        flat = x.reshape(-1, x.shape[-1])
        chosen = select_experts(normed.reshape(flat.shape), self.expert_sel, self.selected)
        experts, scores = chosen.experts.reshape(-1), chosen.scores.reshape(-1)
        rows = jnp.repeat(flat, self.selected, axis=0)
        inner = keep(expert_map(self.operations, rows, experts, None, self.maps, "keys", tape))
        out = expert_map(self.operations, jax.nn.relu(inner), experts, scores, self.maps, "values", tape)
        return jnp.sum(out.reshape(-1, self.selected, x.shape[-1]), axis=1).reshape(x.shape), chosen

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str) -> dict[str, Any]:
        """The empty tape of the experts' matrices, where the operation has one."""
        maps = {name: weights[name] for name in ("keys", "values")}
        return start_expert_tapes(self.operations, maps, tokens * self.selected, dtype)

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them."""
        arrange = self.operations.expert_linear.arrange
        return {**weights, **{name: arrange(weights[name].astype(dtype)) for name in ("keys", "values")}}

    @property
    def _expert(self) -> int:
        """Parameters of one expert."""
        return 2 * self.hidden_size * self.expert_size

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The experts and W_s."""
        return self.experts * (self._expert + self.hidden_size)

    @nn.nowrap
    def active_parameters(self, applications: int) -> int:
        """Different depths are taken to select different experts as far as there are enough."""
        met = min(self.experts, self.selected * applications)
        return met * self._expert + self.experts * self.hidden_size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """k experts, and all logits."""
        return 2 * (self.selected * self._expert + self.experts * self.hidden_size)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Sigmoid and k comparisons an expert, ReLU, weighted sum."""
        k = self.selected
        return (1 + k) * self.experts + k * self.expert_size + (2 * k - 1) * self.hidden_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Both inputs; of each expert its input, what is between its maps before and after ReLU, its output."""
        return 2 * self.hidden_size + self.experts + 2 * self.selected * (self.hidden_size + self.expert_size)

    @nn.nowrap
    def kept_elements(self) -> int:
        """What is between the maps."""
        return self.selected * self.expert_size

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Both maps, and the selection."""
        h, size = self.hidden_size, self.expert_size
        yield pairs_cost("experts: keys", self.selected, self.experts, h, size, on)
        yield pairs_cost("experts: values", self.selected, self.experts, size, h, on)
        yield selection_cost(self.experts, h, on)


def selection_cost(experts: int, hidden: int, on: OnChip) -> Operation:
    """Logits in float32: written, and read for the selection."""
    passes = 3 + on.again.cheap
    traffic = passes * on.tokens * (hidden * BFLOAT16_BYTES + 2 * experts * FLOAT32_BYTES)
    return Operation("routers", passes * 2 * on.tokens * hidden * tiled(experts), traffic)
