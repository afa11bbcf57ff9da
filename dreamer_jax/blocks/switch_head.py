"""SwitchHead: attention whose heads have experts for values and outputs (Csordas et al., 2023), as MoEUT has it.

    q, k    from z, dense; the first half of each head is rotated by its position
    v_h     = sum over the selected e of  sigmoid(z W^v)_{h,e}  x V_{h,e}
    out     = sum over the heads and the selected e of  sigmoid(z W^o)_{h,e}  a_h O_{h,e}

a_h is what head h attends to, z the normed input, x the input as it is. With one expert V and O are plain matrices and
W^v is absent: each head's output is multiplied by its sigmoid(z W^o)_h.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import OnChip, Operation, Reach
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, Initializer
from dreamer_jax.blocks.positions import Depth, rope
from dreamer_jax.blocks.self_attention import scores_cost
from dreamer_jax.blocks.sigma_moe import (
    Selection,
    expert_logits,
    expert_map,
    pairs_cost,
    select_experts,
    selection_cost,
    start_expert_tapes,
)
from pallas_kernels.kept import keep


class Switched(NamedTuple):
    """What the attention returns.

    Attributes:
        out: [B, P, h].
        memory: with these keys and values.
        selections: of values and of outputs; empty with one expert.
    """

    out: jax.Array
    memory: Any
    selections: dict[str, Selection]


class SwitchHead(Block):
    """See the module.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        heads, head_size: n and d.
        experts, selected: E and k, of every head.
        rope_base: of the rotation.
        inward, outward, keys: draw q, k and V; O; and the selectors.
    """

    operations: Operations
    hidden_size: int
    heads: int
    head_size: int
    experts: int
    selected: int
    rope_base: float
    inward: Initializer
    outward: Initializer
    keys: Initializer

    # The names of the parameters are those of the published checkpoints.

    def setup(self) -> None:
        h, n, d, e = self.hidden_size, self.heads, self.head_size, self.experts
        matrix, back = ("hidden", "heads"), ("heads", "hidden")
        self.q, self.k = (self.weight(name, self.inward, (h, n * d), matrix) for name in "qk")
        if e == 1:
            self.v = self.weight("v", self.inward, (h, n * d), matrix)
            self.o = self.weight("o", self.outward, (n * d, h), back)
        else:
            self.v = self.weight("v", self.inward, (n * e, h, d), ("linear_expert", *matrix))
            self.o = self.weight("o", self.outward, (n * e, d, h), ("linear_expert", *back))
            self.sel_v = self.weight("sel_v", self.keys, (n * e, h), ("expert_keys", "hidden"), "router_key")
        self.sel_o = self.weight("sel_o", self.keys, (n * e, h), ("expert_keys", "hidden"), "router_key")

    def __call__(
        self,
        x: jax.Array,
        normed: jax.Array,
        depth: Depth,
        memory: Any,
        context: Context,
        tape: dict[str, Any] | None = None,
    ) -> Switched:
        """One application.

        Args:
            x, normed: [B, P, h] each, x and z.
            depth: of the positions.
            memory: of the sequence, such as `Fresh` or `SharedSlots`.
            context: see Context.
            tape: in the backward pass of the depth scan, what `start_tape` made.
        """
        heads = *x.shape[:2], self.heads, self.head_size
        q, k = (keep(normed @ matrix.astype(x.dtype)).reshape(heads) for matrix in (self.q, self.k))
        q, k = (self._rotate(each, context.positions) for each in (q, k))
        flat = normed.reshape(-1, x.shape[-1])
        if self.experts == 1:
            v = keep(x @ self.v.astype(x.dtype)).reshape(heads)
            attended, memory = memory.attend(q, k, v, depth, context, self.operations)
            gate = jax.nn.sigmoid(expert_logits(flat, self.sel_o))  # [T, n]
            gated = attended * gate.reshape(*heads[:3], 1).astype(x.dtype)
            return Switched(gated.reshape(*heads[:2], -1) @ self.o.astype(x.dtype), memory, {})
        of_v, of_o = (select_experts(flat, keys, self.selected, self.heads) for keys in (self.sel_v, self.sel_o))
        v = self._map("v", jnp.repeat(x.reshape(flat.shape), self.heads * self.selected, axis=0), of_v, tape)
        v = keep(jnp.sum(v.reshape(*heads[:3], self.selected, -1), axis=3))
        attended, memory = memory.attend(q, k, v, depth, context, self.operations)
        rows = jnp.repeat(attended.reshape(-1, self.head_size), self.selected, axis=0)
        out = self._map("o", rows, of_o, tape).reshape(len(flat), -1, x.shape[-1])
        return Switched(jnp.sum(out, axis=1).reshape(x.shape), memory, {"values": of_v, "outputs": of_o})

    def _map(self, name: str, rows: jax.Array, chosen: Selection, tape: Any) -> jax.Array:
        """V or O of every (token, head, choice)."""
        experts, scores, weights = chosen.experts.reshape(-1), chosen.scores.reshape(-1), {"v": self.v, "o": self.o}
        return expert_map(self.operations, rows, experts, scores, weights, name, tape)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """RoPE on the first half of each head, itself in halves; the second half knows no positions."""
        half = self.head_size // 2
        return jnp.concatenate([rope(x[..., :half], positions[..., None], self.rope_base), x[..., half:]], axis=-1)

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str) -> dict[str, Any]:
        """The empty tapes of V and O, where there are experts and the operation has one."""
        if self.experts == 1:
            return {}
        pairs = tokens * self.heads * self.selected
        return start_expert_tapes(self.operations, {name: weights[name] for name in "vo"}, pairs, dtype)

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them."""
        if self.experts == 1:
            return weights
        arrange = self.operations.expert_linear.arrange
        return {**weights, **{name: arrange(weights[name].astype(dtype)) for name in "vo"}}

    @property
    def _map_size(self) -> int:
        """Elements of one head's matrix of one expert, and of one head's share of q or k."""
        return self.hidden_size * self.head_size

    @property
    def _selectors(self) -> int:
        """Elements of the selectors: of values and outputs, or of outputs alone."""
        return (1 if self.experts == 1 else 2) * self.heads * self.experts * self.hidden_size

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """q and k, all experts of v and o, and the selectors."""
        return 2 * self.heads * (1 + self.experts) * self._map_size + self._selectors

    @nn.nowrap
    def active_parameters(self, applications: int) -> int:
        """Different depths are taken to select different experts as far as there are enough."""
        met = min(self.experts, self.selected * applications)
        return 2 * self.heads * (1 + met) * self._map_size + self._selectors

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """q and k, k experts of v and o, the selectors, scores and values."""
        maps = 2 * self.heads * (1 + min(self.selected, self.experts)) * self._map_size
        return 2 * (maps + self._selectors + 2 * reach.context * self.heads * self.head_size)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Rotation of half of q and k, softmax, the selectors' sigmoids, weighted sums."""
        pairs = self.heads * min(self.selected, self.experts)
        gates = self._selectors // self.hidden_size
        return self.heads * self.head_size + reach.context * self.heads + gates + 2 * pairs * self.head_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Both inputs; q and k before and after the rotation, v, attended heads; rows of the pairs and what they give;
        logits."""
        pairs = 0 if self.experts == 1 else self.heads * self.selected
        heads, rows = 6 * self.heads * self.head_size, 2 * pairs * (self.hidden_size + self.head_size)
        return 2 * self.hidden_size + heads + rows + 2 * self.heads * self.experts

    @nn.nowrap
    def kept_elements(self) -> int:
        """q, k, v and the attended heads."""
        return 4 * self.heads * self.head_size

    @nn.nowrap
    def cache_elements(self) -> int:
        """Keys and values."""
        return 2 * self.heads * self.head_size

    @nn.nowrap
    def score_elements(self, length: int) -> int:
        """Of every head over the row; a kernel computes them again and keeps none."""
        kernel = getattr(self.operations.sequence_attention, "implementation", "xla") == "pallas"
        return 0 if kernel else self.heads * length

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections, scores and the selection."""
        h, n, d = self.hidden_size, self.heads, self.head_size
        yield pairs_cost("attention: q and k", 1, 1, h, 2 * n * d, on)
        pairs, experts = (n * self.selected, n * self.experts) if self.experts > 1 else (n, n)
        yield pairs_cost("attention: values", pairs, experts, h, d, on)
        yield pairs_cost("attention: outputs", pairs, experts, d, h, on)
        yield scores_cost(n, n, d, on)
        yield selection_cost(self._selectors // h, h, on)
