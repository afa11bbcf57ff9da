"""The projections around an attention: plain matrices, or a top-1 mixture of linear experts (section 3.7)."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.routing import Router, observe_routing, select, usage
from pallas_kernels.attention_moe import LinearTape
from pallas_kernels.tape import Tapes
from pallas_kernels.weights import Arranged, Stacked


class Choice(NamedTuple):
    """The linear expert of each token.

    Attributes:
        index: [T] int32.
        score: [T] float32.
    """

    index: jax.Array
    score: jax.Array


class ProjectionTapes(flax.struct.PyTreeNode, Tapes):
    """The tapes of both maps, and whether there are shared experts."""

    qkv: LinearTape
    out: LinearTape
    shared: bool = flax.struct.field(pytree_node=False)

    def gradients(self) -> dict[str, Any]:
        """Every expert's, and their sum for the shared one, which all tokens see."""
        totals = {"qkv": self.qkv.totals, "out": self.out.totals}
        shared = {f"{name}_shared": jnp.sum(total, axis=0) for name, total in totals.items()} if self.shared else {}
        return {"projections": {**totals, **shared}}


class Projections(Block):
    """The fused q/k/v projection and the output projection of one attention.

    With experts both are attention MoEs that share one selection and one score; without, plain matrices, and `route`
    returns None.

    Attributes:
        operations: what to compute with.
        hidden_size: h.
        qkv_size: (n + 2 kv) d, columns of the fused projection.
        out_size: n d, rows of the output projection.
        std, out_std: of the initial matrices.
        router: of the mixture; None for plain matrices.
        shared_expert: whether a mixture has a shared expert, Eq. 7's second term.
        observe: whether `route` also returns what analysis wants to know.
    """

    operations: Operations
    hidden_size: int
    qkv_size: int
    out_size: int
    std: float
    out_std: float
    router: Router | None = None
    shared_expert: bool = True
    observe: bool = False

    def setup(self) -> None:
        experts = (self.router.num_experts,) if self.router else ()
        inward, outward = (self.hidden_size, self.qkv_size), (self.out_size, self.hidden_size)

        def matrix(name: str, std: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
            lead = ("attention_expert",) * (len(shape) - len(axes))
            return self.weight(name, normal(std), shape, lead + axes)

        self.qkv_weight = matrix("qkv", self.std, experts + inward, ("hidden", "heads"))
        self.out_weight = matrix("out", self.out_std, experts + outward, ("heads", "hidden"))
        self.qkv_shared = self.out_shared = None
        if self.has_shared and not self.folded("qkv_shared"):
            self.qkv_shared = matrix("qkv_shared", self.std, inward, ("hidden", "heads"))
            self.out_shared = matrix("out_shared", self.out_std, outward, ("heads", "hidden"))

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared expert, folded or not."""
        return self.router is not None and self.shared_expert

    def route(self, x: jax.Array, depth: Depth, bias: Any, real: jax.Array) -> tuple[Choice | None, Any, Any]:
        """The choice of each token, [T, h] -> (choice, counts [G] int32, what was observed); None without experts."""
        if self.router is None:
            return None, None, None
        logits = self.router(x, depth)
        indices, scores = select(logits, bias, 1)
        seen = observe_routing(logits, scores, real) if self.observe else None
        return Choice(indices[:, 0], scores[:, 0]), usage(indices, self.router.num_experts, real), seen

    def qkv(self, x: jax.Array, choice: Choice | None, tape: ProjectionTapes | None = None) -> jax.Array:
        """[T, h] -> [T, (n + 2 kv) d]: q's heads, then k's, then v's."""
        return self._project(x, choice, self.qkv_weight, self.qkv_shared, tape and tape.qkv)

    def out(self, x: jax.Array, choice: Choice | None, tape: ProjectionTapes | None = None) -> jax.Array:
        """[T, n d] -> [T, h]."""
        return self._project(x, choice, self.out_weight, self.out_shared, tape and tape.out)

    def _project(self, x, choice, weight, shared, tape):
        linear = self.operations.expert_linear
        if isinstance(weight, Stacked):  # plain matrices of several depths: the depth is the expert
            return linear(x, weight.row, None, weight.values)
        if choice is None:
            return x @ weight.astype(x.dtype)
        if not isinstance(weight, Arranged):
            weight = weight.astype(x.dtype)
        return linear(x, *choice, weight, None if shared is None else shared.astype(x.dtype), tape=tape)

    @nn.nowrap
    def start_tape(self, weights: dict[str, jax.Array], tokens: int, dtype: str) -> ProjectionTapes | None:
        """The empty tape of both maps, or None where there are no experts or the operation has none.

        Args:
            weights: the parameters; only their shapes matter.
            tokens: T of each depth.
            dtype: compute dtype.
        """
        if self.router is None:
            return None
        linear = self.operations.expert_linear
        qkv, out = (linear.start_tape(tokens, weights[name].shape, dtype) for name in ("qkv", "out"))
        return ProjectionTapes(qkv, out, self.has_shared) if qkv is not None and out is not None else None

    @nn.nowrap
    def fold(self, weights: dict[str, Any], dtype: str) -> dict[str, Any]:
        """The weights as decoding wants them: shared experts added into the routed ones in float32 (Eq. 8)."""
        folded, arrange = {}, self.operations.expert_linear.arrange
        for name in ("qkv", "out"):
            matrix = weights[name]
            if self.has_shared:
                matrix = matrix + weights[f"{name}_shared"]
            matrix = matrix.astype(dtype)
            several = matrix.ndim > 2  # one matrix for all depths isn't looked up
            folded[name] = arrange(matrix, expert=self.router is not None) if several else matrix
        if self.router is not None:
            folded["router"] = self.router.fold(weights["router"], dtype)
        return folded

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Every expert's two matrices, and the shared expert's unless it is folded; the router counts itself."""
        copies = self.router.num_experts if self.router else 1
        copies += self.has_shared and not folded
        return copies * self.hidden_size * (self.qkv_size + self.out_size)
