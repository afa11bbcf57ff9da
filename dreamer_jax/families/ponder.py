"""PonderLM: a language model that reads its own prediction before it commits to one (Zeng et al., 2025, "Pretraining
Language Models to Ponder in Continuous Space"; section 3.1.1 of the survey of latent reasoning).

    x_1 = e, the embedding of the tokens
    h_t = N(layer_N(... layer_1(x_t)))              one pass of an ordinary transformer
          layer: x += attention(N(x)), then x += swiglu(N(x))
    p_t = softmax(W_out h_t) E                      the mean of all rows of the embedding E, weighted by the prediction
    x_{t+1} = x_t + p_t                             a residual path: nothing of earlier thoughts is lost
    logits = W_out h_L

Only the last prediction is trained. A pass is a depth of the scan, l = t - 1, and every pass has keys of its own. The
model ponders at the start of a pass but the first, on what the pass before predicted: so nothing is computed after the
last, and no depth has to know that it is the last one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, apply_layers, init_layers, layer_shares
from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.pondering import Pondering, expected_after, expected_embedding
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.families.contract import Batch, Family, Flags, Knob
from dreamer_jax.recurrence import Stepped, Weights


class Pondered(NamedTuple):
    """A position between two passes.

    Attributes:
        x: [B, P, h], x_t, what the last pass got; x_1 before the first.
        h: [B, P, h], h_t, what the head reads; zero before the first pass.
    """

    x: jax.Array
    h: jax.Array


class Ponder(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/ponder.py).

    Parameters: `embedding`; `layers` by number; `final_norm`; `head`.
    """

    parts = ("embedding", "layers", "pondering", "head")
    cached_parts = ("layers",)
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "pondering": "model.vocab_size or model.hidden_size",
        "layers": "model.layers or model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """Keys of one pass may stand in for another's."""
        return Flags(shares_caches=True)

    @property
    def depth(self) -> int:
        """L."""
        return self.config.depth

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the layers, unbound."""
        c, draw = self.config, normal(self.config.init_std)
        sizes = c.hidden_size, c.heads, c.kv_heads, c.head_size, c.rope_base
        attention = SelfAttention(self.operations, *sizes, draw, draw, parent=None)
        feed_forward = FeedForward(self.operations, c.hidden_size, c.mlp_size, draw, draw, draw, parent=None)
        return Layer(attention, feed_forward, "pre_norm", c.norm_epsilon, parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 3)

        def table(key: jax.Array) -> Parameter:
            rows = normal(c.init_std)(key, (c.vocab_size, c.hidden_size), jnp.float32)
            return Parameter(rows, ("vocab", "hidden"), "embedding")

        params = {
            "embedding": table(keys[0]),
            "layers": init_layers(Ponder(c, REFERENCE).layer, keys[1], c.layers),
            "final_norm": Parameter(jnp.ones(c.hidden_size), ("norm",), "norm"),
            "head": table(keys[2]),
        }
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All passes share everything, also the head and the embedding, through which a prediction comes back."""
        return Weights(shared=params)

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_1."""
        return embed(params["embedding"], batch["tokens"], self.config.dtype), memory

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> Pondered:
        """x_1, and nothing is predicted."""
        return Pondered(entered, jnp.zeros_like(entered))

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_{t-1}, h_{t-1} -> x_t, h_t."""
        shared = weights.shared
        x = state.x + expected_after(depth.index, state.h, shared["head"], shared["embedding"])
        passed, kept = apply_layers(self.layer, shared["layers"], x, depth, memory.sequence, context)
        h = rms_norm(passed, shared["final_norm"], self.config.norm_epsilon)
        return Stepped(Pondered(x, h), memory._replace(sequence=kept), (), {})

    def readout(self, params: Any, state: Pondered, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """h_t."""
        return state.h, memory

    def stream(self, state: Pondered) -> jax.Array:
        """h_t."""
        return state.h

    def carried(self, state: Pondered) -> jax.Array:
        """x_t."""
        return state.x

    def resumed(self, weights: Weights, state: Pondered) -> Pondered:
        """With x_{t+1} in the place of x_t."""
        shared = weights.shared
        return state._replace(x=state.x + expected_embedding(state.h, shared["head"], shared["embedding"]))

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Fresh())

    def slots(self, rows: int, capacity: int, depth: int) -> SharedSlots:
        """Keys and values of every pass and layer."""
        c = self.config
        return SharedSlots.empty(c.layers, depth, rows, capacity, c.kv_heads, c.head_size, c.dtype, "latest")

    # Counting.

    def blocks(self) -> list[Share]:
        """One set of layers, applied in every pass, with the final norm behind them, and between two the way back."""
        c, hidden = self.config, self.config.hidden_size
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *layer_shares(self.layer, "layers", c.layers, c.depth),
            Share("layers", RMSNorm(hidden, parent=None), 1, c.depth),
            Share("pondering", Pondering(c.vocab_size, hidden), 0, c.depth - 1, skips=1),
            Share("head", Head(c.vocab_size, hidden), 1, 1, outside=True),
        ]

    def state_elements(self) -> int:
        """x and h."""
        return 2 * self.config.hidden_size

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("layers", "depth", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers and passes."""
        return f"PonderLM {self.config.layers}x{self.config.depth}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "layers"),)


CORE = Ponder
