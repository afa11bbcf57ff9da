"""DA with a state of one size in place of a cache over depths: what a token was before is folded into it.

The state is carried by the depth scan beside the residual stream, so the scan differentiates it, and positions in
flight take it along in decoding. It is float32 whatever the stream is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.attention import Attended, Attention
from dreamer_jax.blocks.counting import FLOAT32_BYTES, OnChip, Operation, Reach
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.positions import Depth, tell_depth
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape
from pallas_kernels.weights import own

REMEMBERED = 16.0
"""Depths after which a fresh state has fallen to 1/e by itself."""
TAKEN = 0.25
"""Of a fresh gate, what a depth replaces of the state."""


class Carried(NamedTuple):
    """What goes from depth to depth.

    Attributes:
        stream: [B, P, h].
        depths: [B, P, kv, ...] float32, what the depths so far have left.
    """

    stream: jax.Array
    depths: jax.Array


class DepthState(Attention):
    """What both forms share; `code` is a `DepthCode` or nothing."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: Depth,
        memory: jax.Array,
        bias: Any,
        context: Context,
        tape: dict[str, Tape] | None = None,
    ) -> Attended:
        """One depth; arguments as of `DepthAttention`, `memory` being the state [B, P, kv, ...]."""
        project = self.projections(name="projections")
        maps: Any = (tape or {}).get("projections")
        flat, depth = x.reshape(-1, x.shape[-1]), depth.flat()  # [T, h]
        choice, counts, seen = project.route(flat, depth, bias, context.real)
        qkv = keep(project.qkv(flat, choice, maps))
        out, state = self.advance(flat, qkv, depth, memory.reshape(-1, *memory.shape[2:]))
        out = project.out(out.reshape(flat.shape[0], -1).astype(x.dtype), choice, maps)
        return Attended(out.reshape(x.shape), state.reshape(memory.shape), counts, seen)

    @nn.nowrap
    def advance(self, x: jax.Array, qkv: jax.Array, depth: Depth, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, h], its projection, and the state [T, kv, ...] -> what is read [T, n, d], and the state after it."""
        raise NotImplementedError

    @nn.nowrap
    def state_shape(self) -> tuple[int, ...]:
        """Of one token's state."""
        raise NotImplementedError

    @nn.nowrap
    def memory(self, slots: int, tokens: int, dtype: str) -> None:
        """There is no cache."""

    @nn.nowrap
    def newest(self, slots: int, tokens: int, dtype: str) -> None:
        """There is no cache."""

    @nn.nowrap
    def start(self, rows: int, positions: int) -> jax.Array:
        """The state before depth 0: nothing."""
        return jnp.zeros((rows, positions, *self.state_shape()))

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str, slots: int = 1) -> dict[str, Tape]:
        """The empty tapes of the projections."""
        return super().start_tape(weights, tokens, dtype)

    @nn.nowrap
    def cached_depths(self, depths: int) -> int:
        """One state."""
        return 1

    @nn.nowrap
    def keys_met(self, reach: Reach) -> float:
        """None: a state is read."""
        return 0.0

    @nn.nowrap
    def flight_elements(self) -> int:
        """The state, as numbers of two bytes."""
        return 2 * math.prod(self.state_shape())

    @nn.nowrap
    def flight_read(self, reach: Reach) -> float:
        """The state, whatever the depth."""
        return self.flight_elements()

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections, and the state's traffic."""
        yield self._projecting("depth attention", on)
        passes = 2 * (1 + on.again.products) + 3
        yield Operation("depth attention: state", 0, passes * on.tokens * math.prod(self.state_shape()) * FLOAT32_BYTES)


class GatedDelta(DepthState):
    """S_l = a S_{l-1} (I - b k k^T) + b v k^T, read as S_l q (Yang et al., 2024, Eq. 10, along depth).

    S [d, d] maps keys to values, for each key/value head. b = sigmoid(w_b x) is how much of what stood at k is replaced
    by v, a = exp(-exp(A) softplus(w_a x + dt)) how much is kept of everything. Keys and queries have length 1, so that
    what is replaced never overshoots; both are told their depth as in the softmax.
    """

    @nn.nowrap
    def state_shape(self) -> tuple[int, ...]:
        """[kv, d of values, d of keys]."""
        return self.kv_heads, self.head_size, self.head_size

    @nn.nowrap
    def advance(self, x: jax.Array, qkv: jax.Array, depth: Depth, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `DepthState.advance`."""
        q, k, v = (part.astype(jnp.float32) for part in self.split(qkv))  # [T, n or kv, d]
        code: Any = self.code
        q, k = tell_depth(self, code, depth.flat(1), _unit(q), _unit(k))
        k = _unit(k)  # what is learned of depths may have stretched them
        wide = x.astype(jnp.float32)
        draw, size = nn.initializers.normal(self.std), 2 * self.kv_heads
        gates = self.weight("gates", draw, (self.hidden_size, size), *_GATES)
        fall = own(self.weight("fall", nn.initializers.zeros, (self.kv_heads,), ("norm",), "gate"))
        start = nn.initializers.constant(math.log(math.expm1(1 / REMEMBERED)))
        rate = own(self.weight("rate", start, (self.kv_heads,), ("norm",), "gate"))
        falling, taking = jnp.split(_gated(wide, gates), 2, axis=-1)  # [T, kv]
        kept = jnp.exp(-jnp.exp(fall) * jax.nn.softplus(falling + rate))[..., None]
        taken = jax.nn.sigmoid(taking)[..., None]
        stood = jnp.einsum("tkvd,tkd->tkv", state, k, precision="highest")
        change = taken * (v - kept * stood)
        state = kept[..., None] * state + change[..., None] * k[:, :, None, :]
        grouped = q.reshape(len(q), self.kv_heads, -1, self.head_size)
        read = jnp.einsum("tkvd,tkgd->tkgv", state, grouped, precision="highest")
        return read.reshape(q.shape), state

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Projections without norms of queries and keys; gates, falls and rates."""
        plain = super().parameters(folded) - 2 * self.head_size
        return plain + 2 * self.kv_heads * (self.hidden_size + 1)

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections, gates, and two products with the state."""
        gates = 2 * self.hidden_size * 2 * self.kv_heads
        return super().matmul_flops(reach, folded) + gates + 2 * (self.kv_heads + self.heads) * self.head_size**2

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """And the state's fall and its change."""
        return super().elementwise_flops(reach, folded) + 3 * self.kv_heads * self.head_size**2

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """And the state, as numbers of two bytes."""
        return super().intermediate_elements() + self.flight_elements()


class GatedRecurrent(DepthState):
    """s_l = (1 - z) s_{l-1} + z v_l, read as sigmoid(q) s_l: a gated unit for each channel, z = sigmoid(W_z x + c), in
    the manner of minGRU (Feng et al., 2024) along depth. There are no keys, and depths are told by what came of them.
    """

    @nn.nowrap
    def state_shape(self) -> tuple[int, ...]:
        """[kv, d]."""
        return self.kv_heads, self.head_size

    @nn.nowrap
    def advance(self, x: jax.Array, qkv: jax.Array, depth: Depth, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `DepthState.advance`."""
        heads = qkv.astype(jnp.float32).reshape(len(qkv), -1, self.head_size)
        q, v = jnp.split(heads, [self.heads], axis=1)
        size = self.kv_heads * self.head_size
        draw = nn.initializers.normal(self.std)
        matrix = self.weight("gates", draw, (self.hidden_size, size), *_GATES)
        start = nn.initializers.constant(math.log(TAKEN / (1 - TAKEN)))
        offset = own(self.weight("offset", start, (size,), ("norm",), "gate"))
        z = jax.nn.sigmoid(_gated(x.astype(jnp.float32), matrix) + offset).reshape(v.shape)
        state = (1 - z) * state + z * v
        grouped = jax.nn.sigmoid(q).reshape(len(q), self.kv_heads, -1, self.head_size)
        return (grouped * state[:, :, None]).reshape(q.shape), state

    @property
    def _qkv_size(self) -> int:
        return (self.heads + self.kv_heads) * self.head_size

    @property
    def _rotated(self) -> int:
        return 0

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Projections of queries and values, and the gate."""
        size = self.kv_heads * self.head_size
        return self.projections(parent=None).parameters(folded) + (self.hidden_size + 1) * size

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections and the gate."""
        gate = 2 * self.hidden_size * self.kv_heads * self.head_size
        return super().matmul_flops(reach, folded) + gate

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """And the gate, the state, and what is read of it."""
        return super().elementwise_flops(reach, folded) + (4 * self.kv_heads + 2 * self.heads) * self.head_size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """And the gate and the state, as numbers of two bytes."""
        return super().intermediate_elements() + 2 * self.flight_elements()


FORMS = {"gated_delta": GatedDelta, "gated_recurrent": GatedRecurrent}
"""`model.da_form` -> its block, but for the softmax."""
_GATES: Any = (("hidden", "norm"), "gate")
_SHORTEST = 1e-6


def _gated(x: jax.Array, weight: Any) -> jax.Array:
    """x [T, h] times a matrix [h, n] that may be stacked, in float32."""
    matrix = own(weight)  # in decoding, layers of their own may be another for every token
    t = "t" * (matrix.ndim - 2)
    return jnp.einsum(f"th,{t}hn->tn", x, matrix, precision="highest")


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + _SHORTEST)
