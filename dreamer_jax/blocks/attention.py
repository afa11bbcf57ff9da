"""SA and DA: grouped-query attention over the sequence (section 3.3), and of a token over its own depths (3.4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, LANES, Filled, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.memory import Context
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block
from dreamer_jax.blocks.positions import Depth, DepthCode, rope, tell_depth
from dreamer_jax.blocks.projections import Projections
from dreamer_jax.blocks.routing import Router
from dreamer_jax.blocks.self_attention import scores_cost
from dreamer_jax.blocks.some_depths import acting, place
from pallas_kernels.attention_moe.shapes import depths_aside
from pallas_kernels.depth_attention import WHOLE, DepthCache, Ring, Window, empty_cache
from pallas_kernels.depth_attention.reference import visible_slots
from pallas_kernels.dispatch.aside import blocks_aside
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape


class Attended(NamedTuple):
    """What an attention returns.

    Attributes:
        out: [B, P, h].
        memory: with this depth's keys and values.
        counts: of the attention MoE, [G] int32; None for plain matrices.
        seen: what was observed for analysis, or None.
    """

    out: jax.Array
    memory: Any
    counts: jax.Array | None
    seen: dict[str, Any] | None


class Attention(Block):
    """What both attentions share: fused projections, norms of queries and keys, and the counts.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        heads, kv_heads, head_size: n, kv, d.
        code: how places are encoded: the base of the rotation over positions; or of depths a `DepthCode`, or nothing.
        std, out_std: of the initial matrices.
        router: of the attention MoE; None for plain matrices.
        shared_expert: whether the MoE has a shared expert, Eq. 7's second term.
        observe: whether to return what analysis wants to know.
        every: it acts at depth 0 and every so many-th from there; the mixture sees to it.
    """

    operations: Operations
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    code: float | DepthCode | None
    std: float
    out_std: float
    router: Router | None = None
    shared_expert: bool = True
    observe: bool = False
    every: int = 1

    @nn.nowrap
    def projections(self, **place: Any) -> Projections:
        """The projections; `place` is Linen's name or parent."""
        qkv_size, out_size = self._qkv_size, self.heads * self.head_size
        router = self.router and self.router.clone(parent=None, name=None)
        sizes = self.hidden_size, qkv_size, out_size
        std, mixture = (self.std, self.out_std), (router, self.shared_expert)
        return Projections(self.operations, *sizes, *std, *mixture, self.observe, **place)

    @nn.nowrap
    def split(self, qkv: jax.Array) -> list[jax.Array]:
        """[..., (n + 2 kv) d] -> q [..., n, d], k and v [..., kv, d]."""
        heads = qkv.reshape(*qkv.shape[:-1], -1, self.head_size)
        return jnp.split(heads, [self.heads, self.heads + self.kv_heads], axis=-2)

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them."""
        return {**weights, "projections": self.projections(parent=None).fold(weights["projections"], dtype)}

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str) -> dict[str, Tape]:
        """The empty tapes of the projections."""
        tape = self.projections(parent=None).start_tape(weights.get("projections", {}), tokens, dtype)
        return {} if tape is None else {"projections": tape}

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Projections, norms of queries and keys, what is learned of depths; the router counts itself."""
        told = self.code.rows if isinstance(self.code, DepthCode) else 0
        return self.projections(parent=None).parameters(folded) + (2 + told) * self.head_size

    @nn.nowrap
    def active_parameters(self, applications: int) -> int:
        """Of a mixture of maps one for each application, as far as there are enough."""
        idle = max(0, self.router.num_experts - applications) if self.router else 0
        return self.parameters(folded=True) - idle * self._weights

    @nn.nowrap
    def keys_met(self, reach: Reach) -> float:
        """Keys that a query meets on average: over the sequence."""
        return reach.context

    @nn.nowrap
    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Projections, scores and values; with an unfolded shared expert (Eq. 7), projections twice."""
        branches = 2 if self._shared and not folded else 1
        scores_and_values = 2 * self.keys_met(reach) * self.heads * self.head_size
        return 2 * (branches * self._weights + scores_and_values)

    @nn.nowrap
    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """Norm and rotation of q and k; softmax; the score times both maps' outputs."""
        mixture = 0
        if self.router:  # with an unfolded shared expert twice, and the sum of both branches
            mixture = (3 if self._shared and not folded else 1) * (self._qkv_size + self.hidden_size)
        norm_and_rotation = (1 if self.code is None else 2) * self._rotated
        return norm_and_rotation + self.keys_met(reach) * self.heads + mixture

    @nn.nowrap
    def extra_training_flops(self) -> float:
        """The gradient of a folded projection takes a third product: the router's may not see the shared expert."""
        return 2 * self._weights if self._shared else 0.0

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Normed input, q/k/v before and after norm and rotation, attended heads, output."""
        return 2 * self.hidden_size + self._qkv_size + self._rotated + self.heads * self.head_size

    @nn.nowrap
    def kept_elements(self) -> int:
        """q, k and v, and the attended heads."""
        return 2 * self._rotated

    @property
    def _shared(self) -> bool:
        return self.router is not None and self.shared_expert

    @property
    def _qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def _rotated(self) -> int:
        """Elements of q and k."""
        return (self.heads + self.kv_heads) * self.head_size

    @property
    def _weights(self) -> int:
        """Elements of one expert's two matrices."""
        return self.hidden_size * (self._qkv_size + self.heads * self.head_size)

    @nn.nowrap
    def depths_aside(self, on: OnChip) -> int:
        """Depths whose rows are kept aside for the gradient of the linear experts: as chosen, or the default."""
        if self.router is None or on.depths == 1:
            return 1
        asked, rows = on.gradient_depths, self._rows(on)
        found = [depths_aside(asked, on.tokens, rows, its, on.dtype, on.depths, on.target) for its in self._maps]  # type: ignore
        return min(*found, on.depths)

    @nn.nowrap
    def scratch_bytes(self, on: OnChip) -> float:
        """The rows kept aside."""
        depths = self.depths_aside(on)
        if depths == 1:
            return 0.0
        columns = sum(inward + outward for _, inward, outward in self._maps)
        most, experts = self._rows(on) // LANES, self.router.num_experts if self.router else 0
        return blocks_aside(depths, most, on.tokens, experts, LANES) * LANES * columns * BFLOAT16_BYTES

    @property
    def _maps(self) -> list[tuple[int, int, int]]:
        """Shapes of both maps' linear experts."""
        experts = self.router.num_experts if self.router else 0
        return [(experts, self.hidden_size, self._qkv_size), (experts, self.heads * self.head_size, self.hidden_size)]

    @nn.nowrap
    def _rows(self, on: OnChip) -> int:
        """Rows that a map's linear experts have room for, whatever the router does."""
        return on.tokens + (self.router.num_experts if self.router else 0) * (LANES - 1)

    @nn.nowrap
    def _projecting(self, name: str, on: OnChip) -> Operation:
        """Both maps."""
        experts = self.router.num_experts if self.router else 0
        inner, outer = self._qkv_size, self.heads * self.head_size
        columns = tiled(inner) + tiled(outer)
        filled, each = Filled.by(on.tokens, experts), 2 * self.hidden_size * columns
        product, summed = filled.computed * each, filled.summed * each
        weights = max(1, experts) * self._weights
        moved = filled.rows * (2 * self.hidden_size + inner + outer) * BFLOAT16_BYTES  # the inputs and outputs of both
        shared = 2 * on.tokens * self.hidden_size * columns if self._shared else 0  # Eq. 7's second branch
        totals = weights * FLOAT32_BYTES * (2 / self.depths_aside(on) if experts else 1)
        again = 1 + on.again.products
        traffic = (moved + weights * BFLOAT16_BYTES) * again + 2 * moved + weights * BFLOAT16_BYTES + totals
        return Operation(f"{name}: projections", product * (again + 1) + summed + shared, traffic)


class SequenceAttention(Attention):
    """Tokens look at earlier tokens of their document, at the same depth; base 10,000 over positions."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: Depth,
        memory: Any,
        bias: Any,
        context: Context,
        tape: dict[str, Tape] | None = None,
    ) -> Attended:
        """One depth.

        Args:
            x: [B, P, h], normed.
            depth: of the positions.
            memory: of the sequence, such as `Fresh` or `Slots`.
            bias: balancing bias of the attention MoE; None for plain matrices.
            context: see Context.
            tape: in the backward pass of the depth scan, what `start_tape` made.
        """
        project = self.projections(name="projections")
        maps: Any = (tape or {}).get("projections")
        flat = x.reshape(-1, x.shape[-1])  # [T, h]
        choice, counts, seen = project.route(flat, depth.flat(), bias, context.real)
        qkv = keep(project.qkv(flat, choice, maps))
        q, k, v = self.split(qkv.reshape(*x.shape[:2], -1))  # [B, P, n or kv, d]
        position = context.positions[:, :, None]
        base: Any = self.code
        q = rope(RMSNorm(name="q_norm")(q), position, base)
        k = rope(RMSNorm(name="k_norm")(k), position, base)
        attended, memory = memory.attend(q, k, v, place(depth, self.every), context, self.operations)
        out = project.out(attended.reshape(flat.shape[0], -1), choice, maps)
        return Attended(out.reshape(x.shape), memory, counts, seen)

    @nn.nowrap
    def cache_elements(self) -> int:
        """Keys and values."""
        return 2 * self.kv_heads * self.head_size

    @nn.nowrap
    def score_elements(self, length: int) -> int:
        """Of every head over the row; a kernel computes them again and keeps none."""
        kernel = getattr(self.operations.sequence_attention, "implementation", "xla") == "pallas"
        return 0 if kernel else self.heads * length

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections, and scores by whole blocks of the causal triangle."""
        yield self._projecting("sequence attention", on)
        yield scores_cost(self.heads, self.kv_heads, self.head_size, on)


class DepthAttention(Attention):
    """Tokens look back at what they were at shallower depths; nothing crosses tokens. Base 500 over depths.

    Attributes:
        window: which of the depths are seen.
    """

    window: Window = WHOLE

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: Depth,
        memory: DepthCache,
        bias: Any,
        context: Context,
        tape: dict[str, Tape] | None = None,
    ) -> Attended:
        """One depth; arguments as of `SequenceAttention`, `memory` being filled below the depth."""
        project = self.projections(name="projections")
        tape = tape or {}
        maps: Any = tape.get("projections")
        flat, depth = x.reshape(-1, x.shape[-1]), depth.flat()  # [T, h]
        slot = place(depth, self.every).index
        choice, counts, seen = project.route(flat, depth, bias, context.real)
        q, k, v = self.split(keep(project.qkv(flat, choice, maps)))  # [T, n or kv, d]
        q, k = RMSNorm(name="q_norm")(q), RMSNorm(name="k_norm")(k)
        code: Any = self.code
        q, k = tell_depth(self, code, depth.flat(1), q, k)
        attended, memory = self.operations.depth_attention(
            q, k, v, memory, slot, tape=tape.get("keys"), window=self.window
        )
        if self.observe:
            weights = depth_weights(q, memory.heads(self.head_size)[0], slot, self.window)  # [L, T, n]
            scores = jnp.einsum("ltn,t->nl", weights, context.real * 1.0, precision="highest")
            scores = jnp.repeat(scores, self.every, axis=1) * (
                jnp.arange(scores.shape[1] * self.every) % self.every == 0
            )
            seen = {**(seen or {}), "depth_scores": scores}
        out = project.out(attended.reshape(flat.shape[0], -1), choice, maps)
        return Attended(out.reshape(x.shape), memory, counts, seen)

    @nn.nowrap
    def memory(self, slots: int, tokens: int, dtype: str) -> DepthCache:
        """The empty cache of T tokens for L = `slots` depths: a backward pass asks for the keys of all of them."""
        return empty_cache(acting(slots, self.every), tokens, self.kv_heads, self.head_size, dtype)

    @nn.nowrap
    def newest(self, slots: int, tokens: int, dtype: str) -> DepthCache:
        """The same where there is no backward pass: of as many depths as are still looked at."""
        slots = acting(slots, self.every)
        span = self.window.span(slots)
        cache = empty_cache(span, tokens, self.kv_heads, self.head_size, dtype)
        return Ring(*cache) if span < slots else cache

    @nn.nowrap
    def start_tape(self, weights: dict[str, Any], tokens: int, dtype: str, slots: int = 1) -> dict[str, Tape]:
        """The empty tapes of the keys and values, and of the projections."""
        cache = self.memory(slots, tokens, dtype)
        keys = self.operations.depth_attention.start_tape(cache, self.heads, self.head_size, window=self.window)
        return {**({} if keys is None else {"keys": keys}), **super().start_tape(weights, tokens, dtype)}

    @nn.nowrap
    def cached_depths(self, depths: int) -> int:
        """Of a pass of so many, those that are kept in generation."""
        return self.window.span(acting(depths, self.every))

    @nn.nowrap
    def keys_met(self, reach: Reach) -> float:
        """Keys that a query meets on average: over depths, those that it sees."""
        if self.every == 1 and self.window.whole:
            return reach.depths
        total = acting(reach.total, self.every)
        return self.window.mean(total) if total else self.window.most(acting(round(reach.depths), self.every))

    @nn.nowrap
    def flight_elements(self) -> int:
        """Keys and values."""
        return 2 * self.kv_heads * self.head_size

    @nn.nowrap
    def flight_read(self, reach: Reach) -> float:
        """Of the depths that are seen."""
        return self.keys_met(reach) * self.flight_elements()

    @nn.nowrap
    def gradient_cache_elements(self) -> int:
        """Keys and values."""
        return 2 * self.kv_heads * self.head_size

    @nn.nowrap
    def gradient_depths(self, depths: int) -> int:
        """What is older than the window's oldest depth has got its gradient."""
        return depths if self.window.whole else self.window.span(depths)

    @nn.nowrap
    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Projections, and the cache's traffic."""
        yield self._projecting("depth attention", on)
        slots = self.window.mean(acting(on.total_depth, self.every))
        keys_values = 2 * on.tokens * self.kv_heads * self.head_size * BFLOAT16_BYTES
        queries = 2 * on.tokens * self.heads * self.head_size * BFLOAT16_BYTES
        # Backward: keys and values below, and queries and cotangents above.
        traffic = slots * (keys_values * (1 + on.again.products) + keys_values + queries)
        yield Operation("depth attention: scores", 0, traffic)


def depth_weights(q: jax.Array, keys: jax.Array, depth: jax.Array, window: Window = WHOLE) -> jax.Array:
    """The softmax of Eq. 1 over the depths that are seen at `depth`: q [T, n, d], keys [L, T, kv, d] -> [L, T, n]
    float32."""
    slots, tokens, kv_heads, size = keys.shape
    queries = q.reshape(tokens, kv_heads, -1, size).astype(jnp.float32)
    logits = jnp.einsum("tkgd,ltkd->ltkg", queries, keys.astype(jnp.float32), precision="highest") * size**-0.5
    visible = visible_slots(slots, depth, window)[:, None, None, None]
    return jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0).reshape(slots, tokens, -1)
