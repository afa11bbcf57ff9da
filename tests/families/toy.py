"""A small family from outside of the package: a gated recurrence that halts, token by token.

The embedding passes a prelude, one attention layer, whose output e is given to every depth. A depth mixes the sequence
by attention and closes a gate on the result: x' = (1 - z) x + z c. Every depth also halts a share of each token; what
is read out is the average of the states, weighted by those shares (adaptive computation time, Graves 2016, in its
continuous form). All depths share their weights but one matrix, the adapter of [x; e].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.attention import SequenceAttention
from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.memory import Context, Fresh, Memory, Slots
from dreamer_jax.blocks.norms import RMSNorm
from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.blocks.parameters import Block, Parameter, normal
from dreamer_jax.config.values import Implementation, require_positive
from dreamer_jax.families.contract import Family, Flags, Knob, depth_of
from dreamer_jax.recurrence import Stepped, Weights
from pallas_kernels.kept import keep
from pallas_kernels.weights import own


@dataclass(frozen=True)
class ToyConfig:
    """A gated recurrence with a prelude, which halts token by token."""

    family: Literal["toy"] = "toy"
    """Which models."""
    depth: int = 4
    """L: depths a token passes."""
    hidden_size: int = 32
    """h: size of the state."""
    vocab_size: int = 259
    """V: rows of the embedding and of the output head."""
    heads: int = 2
    """Heads of both attentions."""
    head_size: int = 16
    """d of both attentions; even."""
    gate_size: int = 32
    """F: intermediate size of the gate."""
    ponder_cost: float = 0.01
    """Weight of the average number of depths in the loss."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Compute precision."""
    implementation: Implementation = "auto"
    """Backend of the attentions."""

    def __post_init__(self) -> None:
        require_positive(self, "model", allow_zero=("ponder_cost",))


class Gate(Block):
    """z = sigmoid(W_2 silu(W_1 x) + b), closed to begin with.

    Attributes:
        hidden_size, size: h, F.
    """

    hidden_size: int
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, h] -> [B, P, h], between 0 and 1."""
        std = self.hidden_size**-0.5
        inward = self.weight("in", normal(std), (self.hidden_size, self.size), ("hidden", "mlp"))
        outward = self.weight("out", normal(std), (self.size, self.hidden_size), ("mlp", "hidden"))
        bias = self.weight("bias", nn.initializers.constant(-1.0), (self.hidden_size,), ("norm",), "bias")
        return jax.nn.sigmoid(jax.nn.silu(x @ inward) @ outward + bias.astype(x.dtype))

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Both matrices and the bias."""
        return 2 * self.hidden_size * self.size + self.hidden_size

    @nn.nowrap
    def matmul_flops(self, reach: Any, folded: bool = True) -> float:
        """Both products."""
        return 2 * 2 * self.hidden_size * self.size

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """What is between the products, and the gate."""
        return 2 * self.size + self.hidden_size


class Adapter(Block):
    """[x; e] -> h by a matrix of the depth's own.

    Attributes:
        hidden_size: h.
    """

    hidden_size: int

    @nn.compact
    def __call__(self, x: jax.Array, e: jax.Array) -> jax.Array:
        """[B, P, h] twice -> [B, P, h]."""
        shape = (2 * self.hidden_size, self.hidden_size)
        weight = self.weight("matrix", normal((2 * self.hidden_size) ** -0.5), shape, ("hidden", "hidden"))
        both, matrix = jnp.concatenate([x, e], axis=-1), own(weight)
        if matrix.ndim == 2:
            return both @ matrix
        flat = both.reshape(-1, both.shape[-1])  # in decoding, positions at depths of their own
        return jnp.einsum("ta,tab->tb", flat, matrix).reshape(x.shape)

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """The matrix."""
        return 2 * self.hidden_size**2

    @nn.nowrap
    def matmul_flops(self, reach: Any, folded: bool = True) -> float:
        """The product."""
        return 2 * self.parameters()

    @nn.nowrap
    def intermediate_elements(self) -> int:
        """Its input."""
        return 2 * self.hidden_size


class Layer(Block):
    """What all depths share.

    Attributes:
        hidden_size: h.
        attention, gate: of the candidate state, and of how much of it is taken.
    """

    hidden_size: int
    attention: SequenceAttention
    gate: Gate

    @nn.compact
    def __call__(self, x, depth, memory, context):
        """[B, P, h] -> the candidate and the gate, [B, P, h] each, halting logits [B, P], and the memory."""
        normed = RMSNorm(name="norm")(x)
        attended = self.attention(normed, depth, memory, None, context)
        halting = self.weight("halt", normal(self.hidden_size**-0.5), (self.hidden_size,), ("norm",), "gate")
        logits = jnp.einsum("bph,h->bp", normed.astype(jnp.float32), halting)
        return jnp.tanh(keep(x + attended.out)), self.gate(normed), logits, attended.memory

    @nn.nowrap
    def parameters(self, folded: bool = False) -> int:
        """Its own: the norm's scale and the halting weights."""
        return 2 * self.hidden_size

    @nn.nowrap
    def matmul_flops(self, reach: Any, folded: bool = True) -> float:
        """The halting logit."""
        return 2 * self.hidden_size


class Toy(Family):
    """See the module's docstring. Parameters: `embedding`, `head`, `prelude`, `layer`, and `adapter`, stacked."""

    parts = ("embedding", "prelude", "adapter", "attention", "gate", "halting", "head")

    @property
    def flags(self) -> Flags:
        """Its adapters are as many as the depths it was trained at; its loss reads all depths."""
        return Flags(recurrent=False, injects_inputs=True, weighs_depths=True)

    @property
    def depth(self) -> int:
        """L."""
        return self.config.depth

    def attention(self) -> SequenceAttention:
        """That of the prelude, and that of a depth."""
        config, std = self.config, self.config.hidden_size**-0.5
        sizes = config.hidden_size, config.heads, config.heads, config.head_size
        return SequenceAttention(self.operations, *sizes, 10_000.0, std, std / config.depth, parent=None)

    @property
    def adapter(self) -> Adapter:
        """Of one depth."""
        return Adapter(self.config.hidden_size, parent=None)

    @property
    def layer(self) -> Layer:
        """What all depths share."""
        hidden = self.config.hidden_size
        return Layer(hidden, self.attention(), Gate(hidden, self.config.gate_size, parent=None), parent=None)

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        config, keys = self.config, jax.random.split(key, 5)
        plain, depth = Toy(config, operations_of("xla")), depth_of(0, 1)
        x, token = jnp.zeros((1, 1, config.hidden_size)), jnp.zeros((1, 1), jnp.int32)
        context = Context(token, token)

        def table(key: jax.Array) -> Parameter:
            rows = normal(1.0)(key, (config.vocab_size, config.hidden_size), jnp.float32)
            return Parameter(rows, ("vocab", "hidden"), "embedding")

        each = jax.random.split(keys[0], self.depth)
        adapters = jax.vmap(lambda key: plain.adapter.init(key, x, x)["params"])(each)
        params = {
            "embedding": table(keys[1]),
            "head": table(keys[2]),
            "prelude": plain.attention().init(keys[3], x, depth, Fresh(), None, context)["params"],
            "layer": plain.layer.init(keys[4], x, depth, Fresh(), context)["params"],
            "adapter": nn.meta.add_axis(adapters, 0, {nn.meta.PARTITION_NAME: "layer"}),
        }
        return params, {}

    def weights(self, params: Any) -> Weights:
        """The layer is shared, adapters are stacked."""
        return Weights(params["layer"], params["adapter"])

    def enter(self, params: Any, batch: Any, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """e: the embedding through the prelude's attention."""
        x = embed(params["embedding"], batch["tokens"], self.config.dtype)
        weights = {"params": self.cast(params)["prelude"]}
        its: Any = self.attention().apply(weights, x, depth_of(0, 1), memory.sequence["prelude"], None, context)
        return x + its.out, Memory({**memory.sequence, "prelude": its.memory})

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> dict[str, jax.Array]:
        """Nothing is read out yet, and nothing has halted."""
        shape = entered.shape[:2]
        return {"x": entered, "out": jnp.zeros_like(entered), "left": jnp.ones(shape), "visits": jnp.zeros(shape, int)}

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x' = (1 - z) x + z c; a share of what is left halts, at the last depth all of it."""
        mixed = self.adapter.apply({"params": weights.stacked}, state["x"], inputs)
        layer: Any = self.layer.apply({"params": weights.shared}, mixed, depth, memory.sequence["core"], context)
        candidate, z, logits, core = layer
        x = (1 - z) * state["x"] + z * candidate
        last = depth.index == depth.total - 1
        share = state["left"] * jnp.where(last, 1.0, jax.nn.sigmoid(logits))  # [B, P]
        out = state["out"] + share[..., None].astype(x.dtype) * x
        state = {"x": x, "out": out, "left": state["left"] - share, "visits": state["visits"] + 1}
        seen = {"halted": jnp.sum(share.reshape(-1) * context.real)} if self.observe else {}
        return Stepped(state, Memory({**memory.sequence, "core": core}), {"halt": share * (depth.index + 1)}, seen)

    def readout(self, params: Any, state: Any, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """The weighted average of the states, as far as it has come."""
        return state["out"] + state["left"][..., None].astype(state["x"].dtype) * state["x"], memory

    def stream(self, state: Any) -> jax.Array:
        """x."""
        return state["x"]

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory({"prelude": Fresh(), "core": Fresh()})

    def slots(self, rows: int, capacity: int, depth: int) -> dict[str, Slots]:
        """Keys and values of the prelude, which has one depth, and of every depth."""
        config = self.config
        sizes = rows, capacity, config.heads, config.head_size, config.dtype
        return {"prelude": Slots.empty(1, *sizes), "core": Slots.empty(depth, *sizes)}

    def loss(self, params: Any, passed: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy, and the average depth at which a token halts."""
        entropy, _ = super().loss(params, passed, batch)
        depths = jnp.sum(jnp.sum(passed.outputs["halt"], axis=0) * batch["loss_mask"])
        return entropy + self.config.ponder_cost * depths, {"halting_depth": depths}

    def blocks(self) -> list[Share]:
        """The prelude once, the layer L times with one set of weights, an adapter a depth."""
        config, attention = self.config, self.attention()
        return [
            Share("embedding", Embedding(config.vocab_size, config.hidden_size), 1, 1, outside=True),
            Share("prelude", attention, 1, 1, outside=True),
            Share("adapter", self.adapter, self.depth, self.depth),
            Share("attention", attention, 1, self.depth),
            Share("gate", self.layer.gate, 1, self.depth),
            Share("halting", self.layer, 1, self.depth),
            Share("head", Head(config.vocab_size, config.hidden_size), 1, 1, outside=True),
        ]

    def knobs(self) -> tuple[Knob, ...]:
        """One size moves parameters and FLOPs together; it is searched for the parameters."""
        return (Knob("gate_size", "params", "gate"),)


CONFIG, CORE = ToyConfig, Toy
