"""Where tokens enter and leave: the embedding's look-up and the output head."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, Counted, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.loss import CHUNK_ELEMENTS, CHUNK_ROWS


@dataclass(frozen=True)
class Embedding(Counted):
    """The look-up table [V, h].

    Attributes:
        vocab_size, hidden_size: V, h.
    """

    vocab_size: int
    hidden_size: int

    def parameters(self, folded: bool = False) -> int:
        """All rows."""
        return self.vocab_size * self.hidden_size

    def active_parameters(self, applications: int) -> int:
        """One row."""
        return self.hidden_size

    def step_cost(self, on: OnChip):
        """Nothing that would be seen beside the rest."""
        return iter(())


@dataclass(frozen=True)
class Head(Counted):
    """The product with [V, h] that gives logits, and the loss.

    Attributes:
        vocab_size, hidden_size: V, h.
        losses: states of a token that the loss of training reads out; elsewhere it is one.
    """

    vocab_size: int
    hidden_size: int
    losses: int = 1

    def parameters(self, folded: bool = False) -> int:
        """The matrix."""
        return self.vocab_size * self.hidden_size

    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """One product."""
        return 2 * self.hidden_size * self.vocab_size

    def loss_flops(self, reach: Reach) -> float:
        """One product for each state beyond the first that the loss reads out."""
        return (self.losses - 1) * 2 * self.hidden_size * self.vocab_size

    def logit_elements(self, tokens: int) -> int:
        """V of every state of a chunk."""
        return min(tokens * self.losses, self._chunk) * self.vocab_size

    @property
    def _chunk(self) -> int:
        """States that are read out at once."""
        return max(CHUNK_ROWS, CHUNK_ELEMENTS // self.vocab_size)

    def step_cost(self, on: OnChip):
        """In chunks of rows: logits in float32, the head's gradient added chunk by chunk."""
        weights, states = self.vocab_size * self.hidden_size, on.tokens * self.losses
        chunks = -(-states // self._chunk)
        logits = states * self.vocab_size * (3 * FLOAT32_BYTES + 3 * BFLOAT16_BYTES)
        flops = 3 * 2 * states * self.hidden_size * tiled(self.vocab_size)
        yield Operation("head and loss", flops, logits + chunks * weights * (2 * BFLOAT16_BYTES + 2 * FLOAT32_BYTES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """Rows of the embedding: [V, h], [B, S] int32 -> [B, S, h] in `dtype`; numbers out of range are clipped.

    The table is cast before the look-up, so that one gathered in `dtype` is never widened. Its gradient is summed
    over the occurrences of a token in float32 all the same.
    """
    return table.astype(dtype).at[jnp.clip(tokens, 0, len(table) - 1)].get(mode="promise_in_bounds")


def _embed_forward(table, tokens, dtype):
    return embed(table, tokens, dtype), (table, tokens)


def _embed_backward(dtype, residuals, d_out):
    table, tokens = residuals
    return jnp.zeros_like(table).at[jnp.clip(tokens, 0, len(table) - 1)].add(d_out.astype(table.dtype)), None


embed.defvjp(_embed_forward, _embed_backward)


def logits_of(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """[..., h], [V, h] -> logits [..., V] float32."""
    return jnp.einsum("...h,vh->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
