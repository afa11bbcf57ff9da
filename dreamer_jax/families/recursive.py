"""Recursive transformers: few layers, shared by all of a deep stack, and relaxed by LoRA (Bae et al., 2024).

    x_0 = embedding of the tokens
    x <- layer_l(x), l = 0 .. K B - 1               a layer of Llama, Qwen3 or OLMo 2 (blocks/layer.py)
    layer l has the weights of shared layer k, and is its b-th application:
        cycle     k = l mod K, b = l div K          the stack of K layers is looped B times
        sequence  k = l div B, b = l mod B          every layer is repeated in its place
    W_l = W'_k + down_l up_l                        relaxed: a low-rank change of every matrix, at every application
    logits = head N(x)

A depth of the scan is what has weights of its own on the way through the stack. With `cycle` that is a loop b: all of
its K layers are shared by all depths, and what relaxes them is a row of a stack. With `sequence` it is a shared layer
k, applied B times: there is no loop over the stack, nothing that is the same at every depth and no place to stop early.
So a depth keeps one state for the backward pass, and a program has the code of K layers, or of B. The `middle_` forms
have one more layer before and one after, which are applied once.

A model that is looped may read its head after every loop: L = L_B + alpha (L_1 + ... + L_{B-1}), so that a generated
token may stop where the head is sure, or where the state has settled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, init_layers, layer_shares
from dreamer_jax.blocks.loss import cross_entropy
from dreamer_jax.blocks.memory import NOWHERE, Context, Fresh, Memory, Slots, Unread
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, is_box, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Batch, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.recurrence import Stepped, Weights
from dreamer_jax.recurrence.tape import merged
from pallas_kernels.weights import Stacked


class Sequence(NamedTuple):
    """Memories of the sequence: of the first layer, of the shared ones at every application, of the last layer."""

    first: Any
    core: Any
    last: Any


class Recursive(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/recursive.py).

    Parameters: `embedding`; `layers`, the shared ones; `relaxation`, what every application has of its own, unless
    there is nothing; `first` and `last`, layers, in the middle_ forms; `final_norm`; `head` unless it is the embedding.
    With cycle `layers` and `relaxation` have a part for every layer by number, and leaves of `relaxation` a leading
    axis [B]. With sequence leaves have leading axes [K] and [K, B].
    """

    parts = ("embedding", "layers", "relaxation", "unshared layers", "head")
    cached_parts = ("layers",)
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "layers": "model.layers or model.mlp_size",
        "relaxation": "model.rank",
    }

    @property
    def flags(self) -> Flags:
        """Loops without weights of their own can go on; keys of one may stand in for another's."""
        c = self.config
        looped = not c.in_place
        halts = c.exit_confidence < 1 or c.exit_change > 0
        recurrent, weighs = looped and not self.relaxed, c.exit_weight > 0 and self.depth > 1
        return Flags(recurrent=recurrent, shares_caches=looped, halts=halts, weighs_depths=weighs)

    @property
    def relaxed(self) -> bool:
        """Whether applications of a layer differ."""
        return self.config.rank > 0 or not self.config.share_norms

    @property
    def depth(self) -> int:
        """Loops B; or of a stack whose layers are repeated in their places, layers K."""
        return self.config.layers if self.config.in_place else self.config.depth

    @property
    def applied(self) -> int:
        """Layers that a depth applies, one after the other."""
        return self.config.depth if self.config.in_place else self.config.layers

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the shared layers, with what relaxes it, unbound."""
        return self._layer(self.config.rank)

    @functools.cached_property
    def plain_layer(self) -> Layer:
        """A layer without LoRA, unbound: the first and the last one."""
        return self._layer(0)

    def _layer(self, rank: int) -> Layer:
        c, draw = self.config, normal(self.config.init_std)
        sizes = c.hidden_size, c.heads, c.kv_heads, c.head_size, c.rope_base
        attention = SelfAttention(
            self.operations, *sizes, draw, draw, c.queries, c.norm_epsilon, rank, c.rope_scaling, parent=None
        )
        feed_forward = FeedForward(self.operations, c.hidden_size, c.mlp_size, draw, draw, draw, rank, parent=None)
        return Layer(attention, feed_forward, c.form, c.norm_epsilon, parent=None)

    def check_depth(self, depth: int) -> int:
        """See the contract."""
        if self.relaxed and not self.config.in_place and depth > self.depth:
            raise UserError(
                f"depth {depth}: each of the {self.depth} loops has weights of its own (model.rank, "
                "model.share_norms), so there can't be more of them"
            )
        return super().check_depth(depth)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, iter(jax.random.split(key, 6))

        def table(key: jax.Array) -> Parameter:
            rows = normal(c.init_std)(key, (c.vocab_size, c.hidden_size), jnp.float32)
            return Parameter(rows, ("vocab", "hidden"), "embedding")

        params = {"embedding": table(next(keys)), **self._init_shared(next(keys))}
        if c.ends:
            ends = init_layers(Recursive(c, REFERENCE).plain_layer, next(keys), 2)
            params |= {"first": ends["0"], "last": ends["1"]}
        params["final_norm"] = Parameter(jnp.ones(c.hidden_size), ("norm",), "norm")
        if not c.tied_head:
            params["head"] = table(next(keys))
        return params, {}

    def _init_shared(self, key: jax.Array) -> dict[str, Any]:
        """`layers` and `relaxation`; of the layers drawn for every application, the shared part of the first stays."""
        c, layer = self.config, Recursive(self.config, REFERENCE).layer

        def one(key: jax.Array) -> Any:
            return init_layers(layer, key, 1)["0"]

        def several(draw: Callable[..., Any], count: int) -> Callable[..., Any]:
            def stack(key: jax.Array) -> Any:
                stacked = jax.vmap(draw)(jax.random.split(key, count))
                return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layer"})

            return stack

        layers, _ = self._parted(several(one, c.layers)(key))
        _, relaxation = self._parted(several(several(one, c.depth), c.layers)(key))
        if not c.in_place:
            layers, relaxation = _by_number(layers, c.layers), _by_number(relaxation, c.layers)
        return {"layers": layers, "relaxation": relaxation} if self.relaxed else {"layers": layers}

    def _parted(self, layer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A layer's boxes: those that its applications share, and those that each has of its own."""
        shared, own = {}, {}
        for name, node in layer.items():
            if isinstance(node, Parameter):
                differs = "rank" in node.axes or (node.role == "norm" and not self.config.share_norms)
                (own if differs else shared)[name] = node
                continue
            for side, part in zip((shared, own), self._parted(node), strict=True):
                side |= {name: part} if part else {}
        return shared, own

    def weights(self, params: Any) -> Weights:
        """A loop has the layers of all loops, and its own relaxation; a layer repeated in its place is a row of all."""
        parts = {name: params[name] for name in ("layers", "relaxation") if name in params}
        if self.config.in_place:
            return Weights(stacked=parts)
        return Weights(shared=parts["layers"], stacked=parts.get("relaxation", {}))

    def layers_of(self, weights: Weights) -> list[Any]:
        """Parameters of the layers that a depth applies, in order."""
        if not self.config.in_place:
            numbers = map(str, range(len(weights.shared)))
            return [merged(weights.shared[k], weights.stacked.get(k, {})) for k in numbers]
        shared, relaxation = weights.stacked["layers"], weights.stacked.get("relaxation", {})

        def application(b: int) -> Callable[..., Any]:
            return lambda leaf: Stacked(leaf.values[:, b], leaf.row) if isinstance(leaf, Stacked) else leaf[b]

        picked = [jax.tree.map(application(b), relaxation, is_leaf=_is_stacked) for b in range(self.applied)]
        return [merged(shared, own) for own in picked]

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_0, or what the first layer makes of it."""
        x: Any = embed(params["embedding"], batch["tokens"], self.config.dtype)
        x, kept = self._end(params.get("first"), x, memory.sequence.first, context)
        return x, memory._replace(sequence=memory.sequence._replace(first=kept))

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array:
        """The same."""
        return entered

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """The layers of a depth, one after the other. Where every loop is read out, its state is the output."""
        x, kept = state, memory.sequence.core
        for i, its in enumerate(self.layers_of(weights)):
            number = Depth(depth.index * self.applied + i, depth.total)
            x, kept = self.layer.apply({"params": its}, x, number, kept, context)  # type: ignore[misc]
        outputs = x if self.flags.weighs_depths else ()
        return Stepped(x, memory._replace(sequence=memory.sequence._replace(core=kept)), outputs, {})

    def finished(self, params: Any, state: jax.Array, before: jax.Array, depth: Depth) -> jax.Array | None:
        """Where the head is sure, the two largest probabilities apart by more than a threshold (Schuster et al., 2022,
        "softmax response"), or where |x_b - x_{b-1}| / |x_b| is below another."""
        c, stops = self.config, []
        if c.exit_confidence < 1:
            logits = self.logits(params, rms_norm(state, params["final_norm"], c.norm_epsilon))
            best = jax.lax.top_k(jax.nn.softmax(logits), 2)[0]
            stops.append(best[..., 0] - best[..., 1] > c.exit_confidence)
        if c.exit_change > 0:
            moved = jnp.linalg.norm((state - before).astype(jnp.float32), axis=-1)
            stops.append(moved < c.exit_change * jnp.linalg.norm(state.astype(jnp.float32), axis=-1))
        return functools.reduce(jnp.logical_or, stops) if stops else None

    def readout(self, params: Any, state: jax.Array, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """The last layer, if there is one, and the final norm."""
        x, kept = self._end(params.get("last"), state, memory.sequence.last, context)
        x = rms_norm(x, params["final_norm"], self.config.norm_epsilon)
        return x, memory._replace(sequence=memory.sequence._replace(last=kept))

    def head(self, params: Any) -> jax.Array:
        """[V, h]."""
        return params["embedding" if self.config.tied_head else "head"]

    def _end(self, weights: Any, x: jax.Array, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """A layer that is applied once, which keeps its input only for the backward pass; without one, x."""
        if weights is None:
            return x, memory

        @jax.checkpoint
        def layer(weights, x, memory, context):
            return self.plain_layer.apply({"params": weights}, x, depth_of(0, 1), memory, context)

        return layer(weights, x, memory, context)  # type: ignore[return-value]

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Sequence(Fresh(), Fresh(), Fresh()))

    def slots(self, rows: int, capacity: int, depth: int) -> Sequence:
        """Keys and values of every application of every layer."""
        c, ends = self.config, int(self.config.ends)
        sizes = rows, capacity, c.kv_heads, c.head_size, c.dtype
        core = SharedSlots.empty(self.applied, depth, *sizes, "latest")
        return Sequence(Slots.empty(ends, *sizes), core, Slots.empty(ends, *sizes))

    def refill(self, params: Any, state: jax.Array, memory: Sequence, depths: jax.Array, positions: jax.Array):
        """Keys and values of the loops that positions left out: those of their last loop (`share`), or what each loop's
        own weights make of the state they stopped with (`propagate`, as in Schuster et al., 2022)."""
        if self.config.refill == "share" or self.config.in_place:
            return memory._replace(core=memory.core.fill_deeper(depths, positions))
        weights, loops = self.weights(params), len(memory.core.keys) // self.applied

        def fill(b: jax.Array, slots: SharedSlots) -> SharedSlots:
            places = jnp.where(b > depths, positions, NOWHERE)[:, None]
            context = Context(jnp.ones_like(places), places)
            for i, its in enumerate(self.layers_of(weights.of(b))):
                x = state
                if self.config.form == "pre_norm":
                    x = RMSNorm(epsilon=self.config.norm_epsilon, parent=None).apply(
                        {"params": its["attention_norm"]}, x
                    )
                number = depth_of(b * self.applied + i, loops)
                found: Any = self.layer.attention.apply({"params": its["attention"]}, x, number, Unread(slots), context)
                slots = found[1].slots
            return slots

        core = jax.lax.fori_loop(jnp.min(depths) + 1, loops, fill, memory.core)
        return memory._replace(core=core)

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """L_B + alpha (L_1 + ... + L_{B-1}), cross-entropies of the next token."""
        last, _ = super().loss(params, passed, batch)
        if not self.flags.weighs_depths or len(passed.outputs) == 1:
            return last, {}
        earlier = passed.outputs[:-1]  # [B - 1, rows, S, h]
        hidden = rms_norm(earlier, params["final_norm"], self.config.norm_epsilon)
        before = jnp.arange(len(earlier)) < passed.depth - 1
        targets = jnp.broadcast_to(batch["targets"], earlier.shape[:-1]).reshape(-1)
        mask = (batch["loss_mask"] & before[:, None, None]).reshape(-1)
        losses: Any = cross_entropy(hidden.reshape(-1, hidden.shape[-1]), self.head(params), targets, mask)
        return last + self.config.exit_weight * losses, {"last_loss": last}

    # Counting.

    def blocks(self) -> list[Share]:
        """K shared layers, applied B times each, with what every application has of its own."""
        c, hidden, every = self.config, self.config.hidden_size, self.config.layers * self.config.depth
        attention, feed_forward = self.layer.attention, self.layer.feed_forward
        low_ranks = [*attention.low_ranks.values(), *feed_forward.low_ranks.values()]
        norms = self.layer.norms * hidden + (0 if c.queries == "plain" else attention.query_parameters)
        # Every application's norms but the first's: beside what the layers store, and no work more.
        own_norms = [] if c.share_norms else [Share("relaxation", RMSNorm(norms, parent=None), every - c.layers, 0)]
        ends = layer_shares(self.plain_layer, "unshared layers", 2, 1, outside=True) if c.ends else []
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *layer_shares(self.layer, "layers", c.layers, c.depth),
            *(Share("relaxation", low, every, every) for low in low_ranks),
            *own_norms,
            *ends,
            Share("head", RMSNorm(hidden, parent=None), 1, 1, outside=True),
            Share(
                "head",
                Head(c.vocab_size, hidden, losses=c.depth if c.exit_weight else 1),
                0 if c.tied_head else 1,
                1,
                outside=True,
            ),
        ]

    def state_elements(self) -> int:
        """x, and once more where the loss reads every loop."""
        return self.config.hidden_size * (2 if self.config.exit_weight else 1)

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("layers", "depth", "sharing", "rank", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers, and how they are shared."""
        c = self.config
        relaxed = f", LoRA of rank {c.rank}" if c.rank else ""
        return f"recursive transformer, {c.layers} layers {c.depth} times ({c.sharing}){relaxed}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "layers"),)


def _by_number(stacked: Any, count: int) -> dict[str, Any]:
    """The boxes of a stack of layers, apart."""

    def layer(k: int) -> Any:
        return jax.tree.map(lambda box: Parameter(box.value[k], box.axes[1:], box.role), stacked, is_leaf=is_box)

    return {str(k): layer(k) for k in range(count)}


def _is_stacked(leaf: Any) -> bool:
    return isinstance(leaf, Stacked)


CORE = Recursive
