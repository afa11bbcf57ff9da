"""The embedding that a model expects next: all rows of the table, weighted by its own prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import BFLOAT16_BYTES, FLOAT32_BYTES, Counted, OnChip, Operation, Reach, tiled
from dreamer_jax.blocks.head import logits_of
from dreamer_jax.blocks.loss import chunks
from pallas_kernels.kept import keep


def expected_embedding(hidden: jax.Array, head: jax.Array, table: jax.Array) -> jax.Array:
    """softmax(hidden head^T) table: [B, P, h], [V, h], [V, h] -> [B, P, h].

    The softmax is float32, the product in the dtype of `hidden`; in chunks of tokens, each computed again for its
    gradient, so that no more probabilities exist at once than the loss has logits.
    """
    weight, rows = head.astype(hidden.dtype), table.astype(hidden.dtype)

    @jax.checkpoint
    def mean(part: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits_of(part, weight)).astype(part.dtype) @ rows

    flat = hidden.reshape(-1, hidden.shape[-1])
    found = jax.lax.map(lambda parts: mean(*parts), chunks(head, flat))
    return found.reshape(-1, hidden.shape[-1])[: len(flat)].reshape(hidden.shape)


def expected_after(passes: Any, hidden: jax.Array, head: jax.Array, table: jax.Array) -> jax.Array:
    """`expected_embedding` where a pass has predicted something, zeros where none has; [B, P, h].

    Where there is one number for all nothing is computed before the first pass. The backward pass keeps the arguments
    alone: jax would have both branches hand over the matrices, anew in every pass.

    Args:
        passes: how many there were: one number for all, or in decoding [B, P].
        hidden, head, table: as of `expected_embedding`.
    """
    if jnp.ndim(passes):
        return jnp.where((passes > 0)[..., None], expected_embedding(hidden, head, table), 0)
    return _between_passes(passes, hidden, head, table)


@jax.custom_vjp
def _between_passes(passes, hidden, head, table):
    return jax.lax.cond(passes == 0, lambda *_: jnp.zeros_like(hidden), expected_embedding, hidden, head, table)


def _forward(*arguments):
    return keep(_between_passes(*arguments)), arguments


def _backward(residuals, d_mean):
    passes, *arguments = residuals

    def nothing(_):
        return tuple(map(jnp.zeros_like, arguments))

    def pulled(d_mean):
        return jax.vjp(expected_embedding, *arguments)[1](d_mean)

    return None, *jax.lax.cond(passes == 0, nothing, pulled, d_mean)


_between_passes.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Pondering(Counted):
    """What `expected_embedding` costs; both matrices are counted where they belong.

    Attributes:
        vocab_size, hidden_size: V, h.
    """

    vocab_size: int
    hidden_size: int

    def active_parameters(self, applications: int) -> int:
        """Both matrices, which are stored elsewhere."""
        return 2 * self.vocab_size * self.hidden_size

    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """Logits, and the mean of the rows."""
        return 4 * self.vocab_size * self.hidden_size

    def elementwise_flops(self, reach: Reach, folded: bool = True) -> float:
        """The softmax, and adding the mean to the input."""
        return self.vocab_size + self.hidden_size

    def extra_training_flops(self) -> float:
        """The logits once more for the gradient, which no policy keeps; nothing of that asks for the mean."""
        return 2 * self.vocab_size * self.hidden_size

    def intermediate_elements(self) -> int:
        """The prediction's state and the mean; probabilities exist in chunks only."""
        return 2 * self.hidden_size

    def kept_elements(self) -> int:
        """The mean."""
        return self.hidden_size

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """In chunks of tokens: logits in float32 and shares in the dtype of the state go through HBM, forward, again
        where the policy says so, and for the gradient with what comes back to them."""
        times = 3 + on.again.products
        flops = 2 * on.tokens * self.hidden_size * tiled(self.vocab_size) * (2 * times + 1)
        moved = on.tokens * self.vocab_size * times * 2 * (FLOAT32_BYTES + BFLOAT16_BYTES)
        yield Operation("pondering", flops, moved)
