"""The Universal Transformer (Dehghani et al., 2018) as a causal language model: one layer, as many steps as are needed.

    x_0  = embedding of the token, times sqrt(h)
    x^   = x_{t-1} + sinusoid(position) + sinusoid(t)        signals of position and step, anew at every step (Eq. 6, 7)
    A    = LN(x^ + MHSA(x^))                                 Eq. 5: every step has the same weights
    x_t  = LN(A + W_2 relu(W_1 A + b_1) + b_2)               Eq. 4
    p_t  = sigmoid(w x^ + b)                                 Adaptive computation time: how probable halting is

Every position adds up its own p_t until they come to more than 1 - epsilon, after N steps. Then its state is copied to
later steps, where other positions still see it, and its output is final: y = p_1 x_1 + ... + p_{N-1} x_{N-1} + R x_N,
R = 1 - p_1 - ... - p_{N-1}, which the embedding's matrix turns into logits. The loss has the ponder cost N + R.
`blocks/halting.py` has the accounting, also that of tensor2tensor. docs/families.md has the settings.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import MLP
from dreamer_jax.blocks.halting import HaltingUnit, Pondered, ponder
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.memory import NOWHERE, Context, Fresh, Memory, Slots, Unread
from dreamer_jax.blocks.norms import LayerNorm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.residual import Residual
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.signals import Signals
from dreamer_jax.families.contract import Batch, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.recurrence import Stepped, Weights


class Layer(nn.Module):
    """x^ -> x_t, with a norm behind each addition (Eq. 4 and 5).

    Attributes:
        attention, feed_forward: of the two halves.
    """

    attention: SelfAttention
    feed_forward: MLP

    @nn.compact
    def __call__(self, x: jax.Array, depth: Depth, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """[B, P, h] -> [B, P, h], and the memory of the sequence with these keys and values."""
        attended, memory = self.attention(x, depth, memory, context)
        x = LayerNorm(name="attention_norm")(x + attended)
        return LayerNorm(name="mlp_norm")(x + self.feed_forward(x)), memory


class State(NamedTuple):
    """What a step hands to the next.

    Attributes:
        x: [B, P, h].
        pondered: where positions are on their way to halting; None where they don't halt.
    """

    x: jax.Array
    pondered: Pondered | None


class Universal(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/universal.py).

    Parameters: `embedding` [V, h], which is the head too; `layer`; `halting`, unless positions don't halt.
    """

    parts = ("embedding", "signals", "attention", "mlp", "halting", "residual", "head")
    cached_parts = ("attention",)
    observed_over = {"halting_probability": "running"}  # noqa: RUF012
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "mlp": "model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """Halted positions need no further step if their state is copied; else others see it change."""
        return Flags(halts=self.halts and self.config.copy_halted)

    @property
    def halts(self) -> bool:
        """Whether there is a halting unit."""
        return self.config.halting != "none"

    @property
    def depth(self) -> int:
        """T, most steps."""
        return self.config.depth

    @functools.cached_property
    def layer(self) -> Layer:
        """What is applied at every step, unbound."""
        c, draw = self.config, normal(self.config.hidden_size**-0.5)
        sizes = c.hidden_size, c.heads, c.heads, c.hidden_size // c.heads
        attention = SelfAttention(self.operations, *sizes, rope_base=0.0, projection=draw, out=draw, parent=None)
        return Layer(attention, MLP(c.hidden_size, c.mlp_size, jax.nn.relu, parent=None), parent=None)

    @functools.cached_property
    def unit(self) -> HaltingUnit:
        """The halting unit, unbound."""
        return HaltingUnit(self.config.hidden_size, self.config.halting_bias, parent=None)

    @functools.cached_property
    def signals(self) -> Signals:
        """What is added at every step."""
        return Signals(self.config.hidden_size)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 3)
        x, token = jnp.zeros((1, 1, c.hidden_size)), jnp.zeros((1, 1), jnp.int32)
        layer, std = Universal(c, REFERENCE).layer, c.hidden_size**-0.5
        rows = normal(std)(keys[0], (c.vocab_size, c.hidden_size), jnp.float32)
        params = {
            "embedding": Parameter(rows, ("vocab", "hidden"), "embedding"),
            "layer": layer.init(keys[1], x, depth_of(0, 1), Fresh(), Context(token, token))["params"],
        }
        if self.halts:
            params["halting"] = self.unit.init(keys[2], x)["params"]
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All steps share everything."""
        return Weights(shared={name: params[name] for name in ("layer", "halting") if name in params})

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_0."""
        x: Any = embed(params["embedding"], batch["tokens"], self.config.dtype)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype), memory

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> State:
        """x_0, of which nothing has been put out."""
        return State(entered, Pondered.none(*entered.shape) if self.halts else None)

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_{t-1} -> x_t, t = l + 1, of the positions that still run; and what is put out."""
        c, shared = self.config, weights.shared
        x = self.signals(state.x, context.positions, depth)
        found: Any = self.layer.apply({"params": shared["layer"]}, x, depth, memory.sequence, context)
        result, kept = found
        memory = memory._replace(sequence=kept)
        before = state.pondered
        if before is None:
            return Stepped(State(result, None), memory, (), {})
        p: Any = self.unit.apply({"params": shared["halting"]}, x)
        after = ponder(before, p, result, depth.index + 1 >= depth.total, c.halting_epsilon, c.halting)
        counts = {}
        if self.observe:
            seen = {"running": before.running, "halting_probability": p * before.running}
            counts = {name: jnp.sum(each.reshape(-1) * context.real * 1.0) for name, each in seen.items()}
        if c.copy_halted:
            result = jnp.where(before.running[..., None], result, state.x)
        return Stepped(State(result, after), memory, (), counts)

    def finished(self, params: Any, state: State, before: State, depth: Depth) -> jax.Array | None:
        """Positions that have halted."""
        if state.pondered is None or not self.flags.halts:
            return None
        return ~state.pondered.running

    def readout(self, params: Any, state: State, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """y; of positions that still run, as if they halted now: what is left of 1 goes to the present state."""
        if state.pondered is None:
            return state.x, memory
        y = state.pondered.output
        if self.config.halting == "graves":
            y = y + (1 - state.pondered.total)[..., None] * state.x.astype(jnp.float32)
        return y.astype(state.x.dtype), memory

    def head(self, params: Any) -> jax.Array:
        """[V, h], the embedding."""
        return params["embedding"]

    def stream(self, state: State) -> jax.Array:
        """x."""
        return state.x

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Fresh())

    def slots(self, rows: int, capacity: int, depth: int) -> Slots:
        """Keys and values of every step."""
        c = self.config
        return Slots.empty(depth, rows, capacity, c.heads, c.hidden_size // c.heads, c.dtype)

    def refill(self, params: Any, state: State, memory: Slots, depths: jax.Array, positions: jax.Array) -> Slots:
        """Keys and values of the copied state at the steps that were not taken: with the signals of each step, without
        attention or feed-forward."""
        attention = self.layer.attention

        def fill(l: jax.Array, slots: Slots) -> Slots:
            places = jnp.where(l > depths, positions, NOWHERE)[:, None]
            context, depth = Context(jnp.ones_like(places), places), depth_of(l, len(slots.keys))
            x = self.signals(state.x, places, depth)
            found: Any = attention.apply({"params": params["layer"]["attention"]}, x, depth, Unread(slots), context)
            return found[1].slots

        return jax.lax.fori_loop(jnp.min(depths) + 1, len(memory.keys), fill, memory)

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of the next token and the ponder cost, over the positions whose targets count."""
        entropy, _ = super().loss(params, passed, batch)
        pondered = passed.state.pondered
        if pondered is None:
            return entropy, {}
        cost = jnp.sum(pondered.cost * batch["loss_mask"])
        updates = jnp.sum(pondered.updates * batch["loss_mask"])
        return entropy + self.config.ponder_weight * cost, {"last_loss": entropy, "updates": updates}

    # Counting.

    def blocks(self) -> list[Share]:
        """The layer's parts and the halting unit, applied T times with one set of weights."""
        c, hidden, depth = self.config, self.config.hidden_size, self.config.depth
        unit = [Share("halting", self.unit, 1, depth)] if self.halts else []
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            Share("signals", self.signals, 0, depth),
            Share("attention", self.layer.attention, 1, depth),
            Share("mlp", self.layer.feed_forward, 1, depth),
            *unit,
            Share("residual", LayerNorm(hidden, parent=None), 2, 2 * depth),
            Share("residual", Residual(hidden, 2, 2), 0, depth),
            Share("head", Head(c.vocab_size, hidden), 0, 1, outside=True),
        ]

    def state_elements(self) -> int:
        """x, and in float32 y with the three numbers of a position."""
        wide = 2 if self.config.dtype == "bfloat16" else 1
        return self.config.hidden_size + (wide * (self.config.hidden_size + 3) if self.halts else 0)

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("depth", "halting", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Steps, and how positions halt."""
        return f"Universal Transformer, at most {self.depth} steps, halting {self.config.halting}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: all steps share one layer."""
        return (Knob("mlp_size", "flops_per_token", "mlp"),)


CORE = Universal
