"""Eq. 4-6: one layer, the mixture of the three attentions around the residual stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model.depth_attention import DepthAttention
from dreamer_jax.model.expert_attention import ExpertAttention
from dreamer_jax.model.operations import Operations
from dreamer_jax.model.primitives import RMSNorm
from dreamer_jax.model.sequence_attention import SequenceAttention
from pallas_kernels.depth_attention import DepthCache
from pallas_kernels.kept import keep


class Context(NamedTuple):
    """What every depth of a forward pass sees unchanged; integers only.

    Attributes:
        segment_ids: [B, S] int32, the document of each token in its row; 0 is padding.
        positions: [B, S] int32, from 0 within the document.
        total_depth: scalar int32, L of this forward pass.
    """

    segment_ids: jax.Array
    positions: jax.Array
    total_depth: jax.Array

    @property
    def real(self) -> jax.Array:
        """[T] bool: tokens that are not padding."""
        return self.segment_ids.reshape(-1) > 0


class Layer(nn.Module):
    """One depth step. In DR the same parameters serve every depth and the residual stream is normalised."""

    config: DreamerConfig
    operations: Operations

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        depth: jax.Array,
        cache: DepthCache | None,
        bias: dict[str, jax.Array],
        context: Context,
        tape: dict[str, Any] | None = None,
    ) -> tuple[jax.Array, DepthCache | None, dict[str, jax.Array]]:
        """Apply the layer at one depth.

        Args:
            x: [B, S, h], the residual stream x_l.
            depth: scalar int32, l.
            cache: of the depth attention, filled below l; None without it.
            bias: router name -> balancing bias [E].
            context: see Context.
            tape: in the backward pass of the depth scan (recurrence.py), operation -> its part of the tape.

        Returns:
            x_{l+1} [B, S, h]; the cache with slot l filled, or None; counts, router name -> [E] int32.
        """
        config, operations = self.config, self.operations
        sequence = SequenceAttention(config, operations, name="sequence_attention")
        expert = ExpertAttention(config, operations, name="expert_attention")
        sequence_norm, expert_norm = RMSNorm(name="sequence_norm"), RMSNorm(name="expert_norm")
        tape = tape or {}
        counts = {}

        def sa(x):
            out, counts["sequence_attention"] = sequence(
                sequence_norm(x), depth, bias.get("sequence_attention"), context, tape.get("sequence_projections")
            )
            return out

        def da(x):
            nonlocal cache
            if not config.depth_attention:
                return 0
            assert cache is not None
            normed = RMSNorm(name="depth_norm")(x)
            attention = DepthAttention(config, operations, name="depth_attention")
            tapes = tape.get("depth_attention"), tape.get("depth_projections")
            out, cache, counts["depth_attention"] = attention(
                normed, depth, cache, bias.get("depth_attention"), context, *tapes
            )
            return out

        def ea(x):
            out, counts["expert_attention"] = expert(
                expert_norm(x), depth, bias["expert_attention"], context, tape.get("expert_attention")
            )
            return out

        if config.mixing == "sequential":  # Eq. 4
            y = x + da(x)
            y = keep(y + sa(y))
            y = y + ea(y)
        elif config.mixing == "parallel_attention":  # Eq. 5
            y = keep(x + da(x) + sa(x))
            y = y + ea(y)
        else:  # Eq. 6
            y = x + da(x) + sa(x) + ea(x)

        if config.recurrent:  # section 3.7: x_{l+1} = Norm(y_l), so that scales agree across depths
            y = RMSNorm(name="residual_norm")(keep(y))
        return y, cache, {name: count for name, count in counts.items() if count is not None}
