"""CoTFormer (Mohtashami et al., 2023): a stack whose middle is repeated and attends to what it was at all repeats.

    x_0  = begin(embedding)
    x'   = x_{r-1} + v (R - r)                    depth embedding: repeats that are still to come, 0 at the last one
    x_r  = LN(middle(x'))                         every layer sees the keys and values of repeats 1 .. r
    y    = LN(end(x_R)), logits = y E^T           all layers x + f(LN(x)), of attention and of a GELU network

With `adaptive`, the mixture of repeats: after repeat r a router reads g = sigmoid(w_r x_r) of every position. Those
with the largest g go on, and what they come to is (1 - g) x_r + g x_{r+1}; for the others x_r is final. They have no
keys at later repeats, those of earlier ones stay visible. The router of the last repeat decides nothing.

`blocks/repeats.py` has the attention, `blocks/mixture_of_repeats.py` who goes on. docs/families.md has the settings.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import MLP
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, apply_layers, init_layers, layer_shares
from dreamer_jax.blocks.memory import Context, Fresh, Memory, Slots
from dreamer_jax.blocks.mixture_of_repeats import RepeatRouter, drawn_capacities, largest, share_going_on
from dreamer_jax.blocks.norms import LayerNorm, layer_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.repeats import LayerRepeats, RepeatAttention, RepeatGradient, Repeats
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.signals import DepthEmbedding
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Batch, Family, Flags, Knob, depth_of
from dreamer_jax.recurrence import Stepped, Weights
from pallas_kernels.weights import own

STD = 0.02
"""Of every matrix but those that write to the stream."""
ROPE_BASE = 10_000.0
EPSILON = 1e-5

plain_layer_norm = functools.partial(LayerNorm, bias=False)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), with the error function."""
    return jax.nn.gelu(x, approximate=False)


class State(NamedTuple):
    """What a repeat hands to the next.

    Attributes:
        x: [B, P, h].
        gate: [B, P] float32, g of the next repeat; None unless the model is adaptive.
        active: [B, P] bool, positions that go on; likewise.
    """

    x: jax.Array
    gate: jax.Array | None
    active: jax.Array | None


class Sequence(NamedTuple):
    """Memories of the sequence: of the begin layers, of the middle ones at every repeat, of the end layers."""

    begin: Any
    middle: Repeats
    end: Any


class Cotformer(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/cotformer.py).

    Parameters: `embedding` [V, h], which is the head too; `begin`, `middle` and `end`, layers by number; `repeat_norm`,
    `final_norm`; `depth_embedding`, [h] or a row a repeat; `routers`, a row a repeat.
    """

    parts = ("embedding", "begin", "middle", "repeats", "end", "head")
    cached_parts = ("begin", "middle", "end")
    observed_over = {"gate": "repeats"}  # noqa: RUF012
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "begin": "model.begin_layers or model.mlp_size",
        "middle": "model.middle_layers or model.mlp_size",
        "end": "model.end_layers or model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """An adaptive model draws how many go on, and stops by itself; what belongs to each repeat can't be repeated
        more often than it was trained."""
        c = self.config
        stops = c.adaptive and c.threshold > 0
        return Flags(recurrent=not self._by_repeat, random=c.adaptive, halts=stops)

    @property
    def _by_repeat(self) -> bool:
        """Whether some weights differ between repeats."""
        return self.config.adaptive or self.config.depth_embedding == "learned"

    @property
    def depth(self) -> int:
        """R."""
        return self.config.depth

    def check_depth(self, depth: int) -> int:
        """See `Family`."""
        if self._by_repeat and depth > self.depth:
            raise UserError(
                f"depth {depth}: this model has routers or depth embeddings for {self.depth} repeats; ask for at most "
                f"{self.depth}"
            )
        return super().check_depth(depth)

    def _layer(self, attention: type[SelfAttention], **more: Any) -> Layer:
        c = self.config
        layers = c.begin_layers + c.middle_layers + c.end_layers
        draw, out = normal(STD), normal(STD / (2 * layers) ** 0.5)
        sizes = c.hidden_size, c.heads, c.heads, c.hidden_size // c.heads, ROPE_BASE
        attends = attention(self.operations, *sizes, draw, out, parent=None, **more)
        feed_forward = MLP(c.hidden_size, c.mlp_size, gelu, bias=False, inward=draw, outward=out, parent=None)
        return Layer(attends, feed_forward, "pre_norm", EPSILON, plain_layer_norm, parent=None)

    @functools.cached_property
    def outer(self) -> Layer:
        """Any of the begin and end layers, unbound."""
        return self._layer(SelfAttention)

    @functools.cached_property
    def middle(self) -> Layer:
        """Any of the middle layers, unbound."""
        return self._layer(RepeatAttention, repeats=self.config.depth)

    @functools.cached_property
    def router(self) -> RepeatRouter:
        """Of a repeat, unbound."""
        return RepeatRouter(self.config.hidden_size, normal(STD), parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 6)
        outer, hidden = Cotformer(c, REFERENCE).outer, c.hidden_size

        def box(key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], role: Any) -> Parameter:
            return Parameter(normal(STD)(key, shape, jnp.float32), axes, role)

        by_repeat = (c.depth, hidden), ("layer", "norm")
        params = {
            "embedding": box(keys[0], (c.vocab_size, hidden), ("vocab", "hidden"), "embedding"),
            "begin": init_layers(outer, keys[1], c.begin_layers),
            "middle": init_layers(outer, keys[2], c.middle_layers),
            "end": init_layers(outer, keys[3], c.end_layers),
            "final_norm": Parameter(jnp.ones(hidden), ("norm",), "norm"),
        }
        if c.repeat_norm:
            params["repeat_norm"] = Parameter(jnp.ones(hidden), ("norm",), "norm")
        if c.depth_embedding != "none":
            shape = by_repeat if c.depth_embedding == "learned" else ((hidden,), ("norm",))
            params["depth_embedding"] = box(keys[4], *shape, "bias")
        if c.adaptive:
            params["routers"] = {"row": box(keys[5], *by_repeat, "gate")}
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All repeats share the layers; routers and a learned depth embedding have a row each."""
        rows = {"routers"} | ({"depth_embedding"} if self.config.depth_embedding == "learned" else set())
        inside = {"middle", "repeat_norm", "depth_embedding", "routers"} & set(params)
        return Weights({name: params[name] for name in inside - rows}, {name: params[name] for name in inside & rows})

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_0."""
        x: Any = embed(params["embedding"], batch["tokens"], self.config.dtype)
        x, begin = self._stack(params["begin"], x, memory.sequence.begin, context)
        return x, memory._replace(sequence=memory.sequence._replace(begin=begin))

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> State:
        """x_0; all positions go through the first repeat, and what comes out of it is taken whole."""
        if not self.config.adaptive:
            return State(entered, None, None)
        ones = jnp.ones(entered.shape[:2], jnp.float32)
        return State(entered, ones, ones > 0)

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_{r-1} -> x_r, r = l + 1, of the positions that are active; and who goes on."""
        c, shared, tape = self.config, weights.shared, tape or {}
        active = jnp.ones(state.x.shape[:2], bool) if state.active is None else state.active
        repeats = memory.sequence.middle.reaching(depth, active, context)
        x = self._with_depth(weights, state.x, depth)
        for j in range(c.middle_layers):
            params, its = {"params": shared["middle"][str(j)]}, LayerRepeats(repeats, j, tape.get(str(j)))
            found: Any = self.middle.apply(params, x, depth, its, context)
            x, repeats = found[0], found[1].repeats
        if c.repeat_norm:
            x = layer_norm(x, shared["repeat_norm"], epsilon=EPSILON)
        memory = memory._replace(sequence=memory.sequence._replace(middle=repeats))
        if not c.adaptive:
            return Stepped(State(x, None, None), memory, (), {})
        gate = state.gate[..., None]
        mixed = (1 - gate) * state.x.astype(jnp.float32) + gate * x.astype(jnp.float32)
        x = jnp.where(active[..., None], mixed.astype(x.dtype), state.x)
        logits: Any = self.router.apply({"params": weights.stacked["routers"]}, x)
        goes_on = active & self._goes_on(logits, active, depth, context, repeats.whole)
        gate = jax.nn.sigmoid(logits)
        counts = {"repeats": jnp.sum(active.reshape(-1) & context.real, dtype=jnp.int32)}
        if self.observe:
            taken = (active.reshape(-1) & context.real) * 1.0
            counts = {"repeats": jnp.sum(taken), "gate": jnp.sum(gate.reshape(-1) * taken)}
        return Stepped(State(x, gate, goes_on), memory, (), counts)

    def _with_depth(self, weights: Weights, x: jax.Array, depth: Depth) -> jax.Array:
        """x' of a repeat."""
        kind = self.config.depth_embedding
        if kind == "none":
            return x
        if kind == "linear":
            left = jnp.asarray(depth.total - 1 - depth.index, jnp.float32)[..., None]
            added = left * weights.shared["depth_embedding"]
        else:
            row = own(weights.stacked["depth_embedding"])  # [h], or of each token [T, h]
            added = row if row.ndim == 1 else row.reshape(x.shape)
        return x + added.astype(x.dtype)

    def _goes_on(self, logits: jax.Array, active: jax.Array, depth: Depth, context: Context, whole: bool) -> jax.Array:
        """[B, P] bool, also of positions that aren't active any more."""
        c = self.config
        if whole and (context.key is not None or c.decide == "capacity"):
            # The share of the last repeat is the capacity; going there from 1 in equal steps.
            fixed = 1 - (1 - c.capacity) * jnp.arange(1, c.depth, dtype=jnp.float32) / max(1, c.depth - 1)
            capacities = fixed if context.key is None else drawn_capacities(context.key, c.depth - 1)
            return largest(logits, active, context.segment_ids, share_going_on(capacities, depth.index))
        return jax.nn.sigmoid(logits) >= c.threshold

    def finished(self, params: Any, state: State, before: State, depth: Depth) -> jax.Array | None:
        """Positions that don't go on."""
        return ~state.active if self.flags.halts and state.active is not None else None

    def start_tape(self, weights: Weights, tokens: int, slots: int) -> dict[str, RepeatGradient]:
        """The gradient of the keys and values of every middle layer."""
        c = self.config
        size = c.hidden_size // c.heads
        return {str(j): RepeatGradient.empty(slots, tokens, c.heads, size) for j in range(c.middle_layers)}

    def readout(self, params: Any, state: State, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """The end layers and the final norm."""
        x, end = self._stack(params["end"], state.x, memory.sequence.end, context)
        memory = memory._replace(sequence=memory.sequence._replace(end=end))
        return layer_norm(x, params["final_norm"], epsilon=EPSILON), memory

    def head(self, params: Any) -> jax.Array:
        """[V, h], the embedding."""
        return params["embedding"]

    def stream(self, state: State) -> jax.Array:
        """x."""
        return state.x

    def _stack(self, layers: dict[str, Any], x: jax.Array, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """Begin or end layers, which keep only their input for the backward pass."""

        @jax.checkpoint
        def stack(layers, x, memory, context):
            return apply_layers(self.outer, layers, x, depth_of(0, 1), memory, context)

        return stack(layers, x, memory, context)

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Keys and values of the middle layers at all repeats: memory that grows with R, in training too."""
        return Memory(Sequence(Fresh(), self._repeats(batch, length, slots, whole=True), Fresh()))

    def slots(self, rows: int, capacity: int, depth: int) -> Sequence:
        """Keys and values of every layer, of the middle ones at every repeat."""
        c = self.config
        sizes = rows, capacity, c.heads, c.hidden_size // c.heads, c.dtype
        middle = self._repeats(rows, capacity, depth, whole=False)
        return Sequence(Slots.empty(c.begin_layers, *sizes), middle, Slots.empty(c.end_layers, *sizes))

    def _repeats(self, rows: int, length: int, repeats: int, whole: bool) -> Repeats:
        c = self.config
        sizes = rows, length, c.heads, c.hidden_size // c.heads, c.dtype
        return Repeats.empty(c.middle_layers, repeats, *sizes, whole)

    def refill(self, params: Any, state: State, memory: Sequence, depths: jax.Array, positions: jax.Array) -> Sequence:
        """Nothing: a position has no keys at repeats that it didn't take."""
        return memory

    # Training.

    def log(self, state: dict[str, Any], counts: Any) -> dict[str, float]:
        """Repeats of a position on average."""
        if not self.config.adaptive:
            return {}
        taken = np.asarray(counts["repeats"], np.float64)
        return {"repeats": float(taken.sum() / max(1, taken[0]))}

    # Counting.

    def blocks(self) -> list[Share]:
        """One set of middle layers, applied R times; all positions are taken to go through all repeats, as they do in
        the program of a training step."""
        c, hidden = self.config, self.config.hidden_size
        norm = plain_layer_norm(hidden, parent=None)
        each = []
        if c.repeat_norm:
            each.append(Share("repeats", norm, 1, c.depth))
        if c.depth_embedding != "none":
            copies = c.depth if c.depth_embedding == "learned" else 1
            each.append(Share("repeats", DepthEmbedding(hidden), copies, c.depth))
        if c.adaptive:
            each.append(Share("repeats", self.router, c.depth, c.depth))
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *layer_shares(self.outer, "begin", c.begin_layers, 1, outside=True),
            *layer_shares(self.middle, "middle", c.middle_layers, c.depth),
            *each,
            *layer_shares(self.outer, "end", c.end_layers, 1, outside=True),
            Share("head", norm, 1, 1, outside=True),
            Share("head", Head(c.vocab_size, hidden), 0, 1, outside=True),
        ]

    def state_elements(self) -> int:
        """x; of an adaptive model the gate, float32, and whether a position goes on."""
        return self.config.hidden_size + (3 if self.config.adaptive else 0)

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("begin_layers", "middle_layers", "end_layers", "depth", "hidden_size", "mlp_size", "vocab_size")
        described = {name: getattr(self.config, name) for name in (*names, "adaptive")}
        return {"family": self.config.family} | described

    def headline(self) -> str:
        """Layers and repeats."""
        c = self.config
        kind = "adaptive CoTFormer" if c.adaptive else "CoTFormer"
        return f"{kind} {c.begin_layers}+{c.middle_layers}x{c.depth}+{c.end_layers}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "middle"),)


CORE = Cotformer
