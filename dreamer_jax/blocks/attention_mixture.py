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

    @nn.compact
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
        (sequence, depths), tape, counts, seen = memory, tape or {}, {}, {}
        sequence_norm, expert_norm = RMSNorm(name="sequence_norm"), RMSNorm(name="expert_norm")
        if self.injection is not None:
            x = self.injection(x, entered)

        gates = {}
        if self.dimensions is not None:
            name, normed = "dimensions", RMSNorm(name="dimension_norm")(x)
            gates, counts[name], seen[name] = self.dimensions(normed, depth, bias[name], context.real)

        def scaled(name, branch):
            if name in gates:
                branch = (branch * gates[name]).astype(branch.dtype)
            # 1/N (arXiv:2606.18524): however many depths, together they add as much
            total = depth.total[..., None] if depth.total.ndim else depth.total
            return (branch / total).astype(branch.dtype) if self.averaged else branch

        def attend(attention, x, memory, name):
            arguments = x, depth, memory, bias.get(name), context, tape.get(name)
            if attention.every == 1 or self.is_initializing():
                return attention(*arguments)
            return at_some_depths(attention, *arguments, watched=self.is_mutable_collection("intermediates"))

        def sa(x):
            nonlocal sequence
            name = "sequence_attention"
            its = attend(self.sequence_attention, sequence_norm(x), sequence, name)
            sequence, counts[name], seen[name] = its.memory, its.counts, its.seen
            return scaled(name, its.out)

        def pa(x):
            its: Any = self.parameter_attention
            normed = RMSNorm(name="parameter_norm")(x)
            if its.every == 1 or self.is_initializing():
                out, seen["parameter_attention"] = its(normed, depth, context.real)
            else:
                out, seen["parameter_attention"] = branch_at_some_depths(its, normed, depth, context)
            return scaled("parameter_attention", out)

        def da(x):
            if self.parameter_attention is None:
                return over_depths(x)
            return over_depths(x) + pa(x)

        def over_depths(x):
            nonlocal depths
            if self.depth_attention is None:
                return 0
            name, normed = "depth_attention", RMSNorm(name="depth_norm")(x)
            its = attend(self.depth_attention, normed, depths, name)
            depths, counts[name], seen[name] = its.memory, its.counts, its.seen
            return scaled(name, its.out)

        def ea(x):
            name = "expert_attention"
            asked = gates[name].reshape(-1) > 0 if gates else None
            its = self.expert_attention(expert_norm(x), depth, bias[name], context, tape.get(name), asked)
            counts[name], seen[name] = its.counts, its.seen
            return scaled(name, its.out)

        if self.mixing == "sequential":  # Eq. 4
            y = x + da(x)
            y = keep(y + sa(y))
            y = y + ea(y)
        elif self.mixing == "parallel_attention":  # Eq. 5
            y = keep(x + da(x) + sa(x))
            y = y + ea(y)
        else:  # Eq. 6
            y = x + da(x) + sa(x) + ea(x)

        if self.normalised:  # section 3.7: x_{l+1} = Norm(y_l), so that scales agree across depths
            y = RMSNorm(name="residual_norm")(keep(y))
        return y, Memory(sequence, depths), _present(counts), _present(seen)


def _present(by_name: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in by_name.items() if value is not None}
