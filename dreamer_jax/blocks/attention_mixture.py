"""One depth of Dreamer: the mixture of its three attentions around the residual stream."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from dreamer_jax.blocks.attention import DepthAttention, SequenceAttention
from dreamer_jax.blocks.depth_states import DepthState
from dreamer_jax.blocks.dimensions import Dimensions
from dreamer_jax.blocks.experts import ExpertAttention
from dreamer_jax.blocks.injection import DiagonalInjection
from dreamer_jax.blocks.memory import Context, Memory
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.parameter_attention import ParameterAttention
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.some_depths import at_some_depths, branch_at_some_depths
from pallas_kernels.kept import keep


class AttentionMixture(nn.Module):
    """Eq. 4-6: one depth step, the mixture of the three attentions around the residual stream.

    Attributes:
        sequence_attention, depth_attention, expert_attention: SA, DA (or None), EA.
        parameter_attention: PA, or None; it is added where DA is.
        mixing: how they are combined.
        normalised: whether the residual stream is, as in DR.
        injection: gives every depth what entered the recurrence; or None.
        averaged: whether what is added to the stream is divided by the depth of the pass.
        dimensions: chooses which of them a token takes; or None: all.
    """

    sequence_attention: SequenceAttention
    depth_attention: DepthAttention | DepthState | None
    expert_attention: ExpertAttention
    mixing: str
    normalised: bool
    injection: DiagonalInjection | None = None
    averaged: bool = False
    parameter_attention: ParameterAttention | None = None
    dimensions: Dimensions | None = None

    def setup(self) -> None:
        self.sequence_norm, self.expert_norm = RMSNorm(), RMSNorm()
        if self.depth_attention is not None:
            self.depth_norm = RMSNorm()
        if self.parameter_attention is not None:
            self.parameter_norm = RMSNorm()
        if self.dimensions is not None:
            self.dimension_norm = RMSNorm()
        if self.normalised:
            self.residual_norm = RMSNorm()

    def __call__(
        self,
        x: jax.Array,
        depth: Depth,
        memory: Memory,
        bias: dict[str, Any],
        context: Context,
        tape: dict[str, Any] | None = None,
        entered: Any = None,
    ) -> tuple[jax.Array, Memory, dict[str, jax.Array], dict[str, Any]]:
        """Apply the layer at one depth.

        Args:
            x: [B, P, h], the residual stream x_l.
            depth: of the positions.
            memory: of the sequence, and of their own depths below l.
            bias: router name -> balancing bias b.
            context: see Context.
            tape: in the backward pass of the depth scan, what `start_tape` made.
            entered: [B, P, h], what is injected.

        Returns:
            x_{l+1} [B, P, h]; the memory with depth l; counts, router name -> [E] int32; what was observed, likewise.
        """
        if self.injection is not None:
            x = self.injection(x, entered)
        step = _Branches(self, depth, memory, bias, context, tape or {})
        if self.dimensions is not None:
            step.choose(x)

        if self.mixing == "sequential":  # Eq. 4
            y = x + step.da(x)
            y = keep(y + step.sa(y))
            y = y + step.ea(y)
        elif self.mixing == "parallel_attention":  # Eq. 5
            y = keep(x + step.da(x) + step.sa(x))
            y = y + step.ea(y)
        else:  # Eq. 6
            y = x + step.da(x) + step.sa(x) + step.ea(x)

        if self.normalised:  # section 3.7: x_{l+1} = Norm(y_l), so that scales agree across depths
            y = self.residual_norm(keep(y))
        return y, step.memory, _present(step.counts), _present(step.seen)


class _Branches:
    """What a mixture adds to the stream at one depth.

    Attributes:
        memory: with what branches have written so far.
        counts, seen: router name -> what it selected, and what was observed.
    """

    def __init__(self, mixture: AttentionMixture, depth: Depth, memory: Memory, bias: Any, context: Context, tape: Any):
        self.mixture, self.depth, self.memory = mixture, depth, memory
        self.bias, self.context, self.tape = bias, context, tape
        self.gates: dict[str, jax.Array] = {}
        self.counts: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}

    def choose(self, x: jax.Array) -> None:
        """Section 5: which branches each token takes."""
        name, choose = "dimensions", self.mixture.dimensions
        assert choose is not None
        normed = self.mixture.dimension_norm(x)
        chosen = choose(normed, self.depth, self.bias[name], self.context.real)
        self.gates, self.counts[name], self.seen[name] = chosen

    def sa(self, x: jax.Array) -> jax.Array:
        """Of attention over the sequence."""
        its, normed = self.mixture.sequence_attention, self.mixture.sequence_norm(x)
        out, sequence = self._attended("sequence_attention", its, normed, self.memory.sequence)
        self.memory = self.memory._replace(sequence=sequence)
        return out

    def da(self, x: jax.Array) -> Any:
        """Of attention over the depths, and of what stands beside it."""
        return self._over_depths(x) if self.mixture.parameter_attention is None else self._over_depths(x) + self._pa(x)

    def _over_depths(self, x: jax.Array) -> Any:
        its = self.mixture.depth_attention
        if its is None:
            return 0
        normed = self.mixture.depth_norm(x)
        out, depths = self._attended("depth_attention", its, normed, self.memory.depths)
        self.memory = self.memory._replace(depths=depths)
        return out

    def _pa(self, x: jax.Array) -> jax.Array:
        name, its = "parameter_attention", self.mixture.parameter_attention
        assert its is not None
        normed = self.mixture.parameter_norm(x)
        if its.every == 1 or self.mixture.is_initializing():
            out, self.seen[name] = its(normed, self.depth, self.context.real)
        else:
            out, self.seen[name] = branch_at_some_depths(its, normed, self.depth, self.context)
        return self._scaled(name, out)

    def ea(self, x: jax.Array) -> jax.Array:
        """Of the experts."""
        name = "expert_attention"
        asked = self.gates[name].reshape(-1) > 0 if self.gates else None
        arguments = self.depth, self.bias[name], self.context, self.tape.get(name), asked
        its = self.mixture.expert_attention(self.mixture.expert_norm(x), *arguments)
        self.counts[name], self.seen[name] = its.counts, its.seen
        return self._scaled(name, its.out)

    def _attended(self, name: str, attention: Any, normed: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        arguments = normed, self.depth, memory, self.bias.get(name), self.context, self.tape.get(name)
        if attention.every == 1 or self.mixture.is_initializing():
            its = attention(*arguments)
        else:
            watched = self.mixture.is_mutable_collection("intermediates")
            its = at_some_depths(attention, *arguments, watched=watched)
        self.counts[name], self.seen[name] = its.counts, its.seen
        return self._scaled(name, its.out), its.memory

    def _scaled(self, name: str, branch: jax.Array) -> jax.Array:
        if name in self.gates:
            branch = (branch * self.gates[name]).astype(branch.dtype)
        if not self.mixture.averaged:
            return branch
        # 1/N (arXiv:2606.18524, of one layer in N loops): however many depths, together they add as much
        total = self.depth.total[..., None] if self.depth.total.ndim else self.depth.total
        return (branch / total).astype(branch.dtype)


def _present(by_name: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in by_name.items() if value is not None}
