"""AlgoFormer: a transformer that prepares, one that is applied again and again, and one that reads the result off
(Gao et al., 2024; "Pre/Loop/Coda" in section 3.1.1 of the survey of latent reasoning).

    e   = Pre(embedding of the tokens)
    x_0 = e,   x_t = Loop(x_{t-1})                  inject: none
    x_0 = 0,   x_t = Loop(x_{t-1} + e)              inject: add, the looped transformer of Yang et al. (2023)
    y_t = N(Post(x_t)),   logits_t = y_t E^T
    loss = 1/dT sum_{t = T-dT+1}^{T} CE(logits_t)   the last dT loops are scored, so that more of them do no harm

Pre, Loop and Post are stacks of layers x += attention(N(x)), x += swiglu(N(x)); only Loop's are shared by loops, and no
loop knows its number. A loop is a depth of the scan, l = t - 1, L = T.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Counted, OnChip, Operation, Reach, Share
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, apply_layers, init_layers, layer_shares
from dreamer_jax.blocks.loss import cross_entropy
from dreamer_jax.blocks.memory import Context, Fresh, Memory, Slots
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.families.contract import Batch, Drawn, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.recurrence import Stepped, Weights


class Sequence(NamedTuple):
    """Memories of the sequence: of Pre's layers, of Loop's in every loop, of Post's."""

    pre: Any
    loop: Any
    post: Any


class Algoformer(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/algoformer.py).

    Parameters: `embedding` [V, h], which is the head too; `pre`, `loop` and `post`, layers by number; `final_norm`.
    """

    parts = ("embedding", "pre", "loop", "post", "head")
    cached_parts = ("pre", "loop", "post")
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "pre": "model.pre_layers or model.mlp_size",
        "loop": "model.loop_layers or model.mlp_size",
        "post": "model.post_layers or model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """Keys of one loop may stand in for another's; the last ones are all scored."""
        c = self.config
        own, weighs = c.inject == "add", c.score == "all"
        return Flags(injects_inputs=own, shares_caches=True, decodable=c.scored > 1, weighs_depths=weighs)

    @property
    def depth(self) -> int:
        """T."""
        return self.config.depth

    @property
    def differentiated(self) -> int:
        """Loops of truncated backpropagation."""
        return self.config.scored if self.config.truncate else self.depth

    @property
    def output_depths(self) -> int:  # type: ignore[override]
        """dT."""
        return self.config.scored

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the layers, unbound."""
        c, draw = self.config, normal(self.config.init_std)
        sizes = c.hidden_size, c.heads, c.heads, c.head_size, c.rope_base
        attention = SelfAttention(self.operations, *sizes, draw, draw, parent=None)
        feed_forward = FeedForward(self.operations, c.hidden_size, c.mlp_size, draw, draw, draw, parent=None)
        return Layer(attention, feed_forward, "pre_norm", c.norm_epsilon, parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 4)
        layer = Algoformer(c, REFERENCE).layer
        rows = normal(c.init_std)(keys[0], (c.vocab_size, c.hidden_size), jnp.float32)
        params = {
            "embedding": Parameter(rows, ("vocab", "hidden"), "embedding"),
            "pre": init_layers(layer, keys[1], c.pre_layers),
            "loop": init_layers(layer, keys[2], c.loop_layers),
            "post": init_layers(layer, keys[3], c.post_layers),
            "final_norm": Parameter(jnp.ones(c.hidden_size), ("norm",), "norm"),
        }
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All loops share Loop."""
        return Weights(shared=params["loop"])

    # A pass.

    def draw(self, key: jax.Array, step: jax.Array, rows: jax.Array) -> Drawn:
        """T loops; or with one sampled loss, as many as lead to it, uniform over the scored ones."""
        c = self.config
        last = c.scored if c.truncate else None
        if c.score == "all":
            return Drawn(c.depth, c.depth, last)
        return Drawn(jax.random.randint(key, (), c.depth - c.scored + 1, c.depth + 1), c.depth, last)

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """e."""
        x: Any = embed(params["embedding"], batch["tokens"], self.config.dtype)
        x, pre = self._stack(params["pre"], x, memory.sequence.pre, context)
        return x, memory._replace(sequence=memory.sequence._replace(pre=pre))

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array:
        """x_0 [B, P, h]."""
        return jnp.zeros_like(entered) if self.flags.injects_inputs else entered

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_{t-1} -> x_t, which the loss reads too where all losses are taken."""
        x = state + inputs if self.flags.injects_inputs else state
        x, loop = apply_layers(self.layer, weights.shared, x, depth, memory.sequence.loop, context)
        outputs = x if self.config.score == "all" else ()
        return Stepped(x, memory._replace(sequence=memory.sequence._replace(loop=loop)), outputs, {})

    def readout(self, params: Any, state: jax.Array, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """y_t."""
        x, post = self._stack(params["post"], state, memory.sequence.post, context)
        hidden = rms_norm(x, params["final_norm"], self.config.norm_epsilon)
        return hidden, memory._replace(sequence=memory.sequence._replace(post=post))

    def head(self, params: Any) -> jax.Array:
        """[V, h], the embedding."""
        return params["embedding"]

    def _stack(self, layers: dict[str, Any], x: jax.Array, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """Pre or Post, which keep only their input for the backward pass."""

        @jax.checkpoint
        def stack(layers, x, memory, context):
            return apply_layers(self.layer, layers, x, depth_of(0, 1), memory, context)

        return stack(layers, x, memory, context)

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Sequence(Fresh(), Fresh(), Fresh()))

    def slots(self, rows: int, capacity: int, depth: int) -> Sequence:
        """Keys and values of every layer, of Loop's in every loop."""
        c = self.config
        sizes = rows, capacity, c.heads, c.head_size, c.dtype
        loop = SharedSlots.empty(c.loop_layers, depth, *sizes, "latest")
        return Sequence(Slots.empty(c.pre_layers, *sizes), loop, Slots.empty(c.post_layers, *sizes))

    def refill(self, params: Any, state: Any, memory: Sequence, depths: jax.Array, positions: jax.Array) -> Sequence:
        """What a position left last stands for the loops that it didn't take."""
        return memory._replace(loop=memory.loop.fill_deeper(depths, positions))

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean of the losses after the last dT loops; or that of the last loop, which `draw` has sampled."""
        if self.config.score == "sampled":
            return super().loss(params, passed, batch)

        c = self.config
        hidden = jax.lax.map(
            lambda x: self.readout(params, x, passed.memory, passed.context)[0], passed.outputs
        )  # [dT, B, S, h]
        taken = jnp.arange(c.scored, 0, -1) <= passed.depth  # of a pass with fewer loops all
        targets = jnp.broadcast_to(batch["targets"], hidden.shape[:-1])
        mask = batch["loss_mask"] & taken[:, None, None]
        flat = hidden.reshape(-1, hidden.shape[-1])
        total: Any = cross_entropy(flat, self.head(params), targets.reshape(-1), mask.reshape(-1))
        return total / jnp.sum(taken), {}

    # Counting.

    def blocks(self) -> list[Share]:
        """The three stacks; Loop's layers are applied in every loop."""
        c, hidden = self.config, self.config.hidden_size
        last, losses = self.differentiated, c.scored if c.score == "all" else 1
        post = layer_shares(self.layer, "post", c.post_layers, 1, outside=True)
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *layer_shares(self.layer, "pre", c.pre_layers, 1, outside=True),
            *layer_shares(self.layer, "loop", c.loop_layers, c.depth, truncated=last),
            *post,
            Share("post", Scored(tuple(share.block for share in post), losses), 0, c.post_layers, outside=True),
            Share("head", RMSNorm(hidden, parent=None), 1, 1, outside=True),
            Share("head", Head(c.vocab_size, hidden, losses=losses), 0, 1, outside=True),
        ]

    def state_elements(self) -> int:
        """x; and again for the loss, where all are taken."""
        return self.config.hidden_size * (2 if self.config.score == "all" else 1)

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("pre_layers", "loop_layers", "post_layers", "depth", "scored", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers and loops."""
        c = self.config
        return f"AlgoFormer {c.pre_layers}+{c.loop_layers}x{c.depth}+{c.post_layers}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "loop"),)


class Scored(Counted):
    """What Post costs beyond its first application when training reads several loops off, for counting.

    Args:
        blocks: of one layer.
        losses: dT.
    """

    def __init__(self, blocks: tuple[Any, ...], losses: int):
        self.blocks, self.losses = blocks, losses

    def loss_flops(self, reach: Reach) -> float:
        """The forward once more for every loss beyond the first."""
        return (self.losses - 1) * sum(block.matmul_flops(reach) for block in self.blocks)

    def step_cost(self, on: OnChip) -> Iterator[Operation]:
        """Likewise all that a step does for it."""
        for block in self.blocks:
            yield from (one.times(self.losses - 1) for one in block.step_cost(on))


CORE = Algoformer
