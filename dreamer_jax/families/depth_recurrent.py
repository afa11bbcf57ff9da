"""The depth-recurrent transformer of "Thinking Deeper, Not Longer" (Chen, 2026): one gated block, T thinking steps.

    H_0 = embedding of the tokens                                    a perception interface (section 3.2)
    H^  = H_{t-1} + e_t                                              Eq. 10: depth embedding
    H'  = H^ + g_attn * MHSA(LN(H^), M)                              Eq. 6, 7: M masks what isn't visible (Eq. 4)
    H~  = H' + g_ffn * (W_2 GELU(W_1 LN(H') + b_1) + b_2)            Eq. 8, 9; g are LayerScale's factors
    z   = sigmoid([H~; H_{t-1}] W_z + b_z)                           Eq. 2: a gate that starts at sigmoid(-2) = 0.12
    H_t = z * H~ + (1 - z) * H_{t-1}                                 Eq. 3

A classifier reads the states of one or two positions of H_T (section 3.3). T is drawn anew for every batch of training,
and only H_T is supervised (silent thinking, section 3.1). docs/depth_recurrent.md has the settings.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.dropout import dropout
from dreamer_jax.blocks.feed_forward import MLP
from dreamer_jax.blocks.gate import Gate
from dreamer_jax.blocks.head import Embedding, embed
from dreamer_jax.blocks.memory import Bidirectional, Context, Memory
from dreamer_jax.blocks.multi_head_attention import MultiHeadAttention
from dreamer_jax.blocks.norms import LayerNorm
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.readout import READ, read_states
from dreamer_jax.blocks.residual import LayerScale, Residual
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Batch, Drawn, Flags, Knob, Pass, depth_of
from dreamer_jax.families.puzzles import PuzzleFamily, class_losses, labels
from dreamer_jax.recurrence import Stepped, Weights

ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}


class ReasoningBlock(nn.Module):
    """f_theta and the gate: H_{t-1}, e_t -> H_t (Appendix A).

    Attributes:
        attention, feed_forward: f of the two branches.
        gate: None for H_t = H~.
        norm: "pre" x + g f(LN(x)), "post" LN(x + g f(x)).
        layer_scale: what g starts at; 0 for none.
        dropout: share that training drops.
        dtype: of the branches; the state is float32, in which what LayerScale lets through isn't rounded away.
    """

    attention: MultiHeadAttention
    feed_forward: MLP
    gate: Gate | None
    norm: str
    layer_scale: float
    dropout: float
    dtype: str

    @nn.compact
    def __call__(
        self, state: jax.Array, embedded: jax.Array | None, depth: Depth, memory: Any, context: Context
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """[B, S, h] float32 and [h] -> the next state, the memory, and the gate's z [B, S, h] or None."""
        size = state.shape[-1]

        def drop(x: jax.Array, place: int) -> jax.Array:
            return dropout(x, self.dropout, context.keys, depth.index, place)

        def joined(name: str, x: jax.Array, branch: Any, place: int) -> jax.Array:
            norm = LayerNorm(name=f"{name}_norm")
            out = drop(branch((norm(x) if self.norm == "pre" else x).astype(self.dtype)).astype(x.dtype), place)
            if self.layer_scale:
                out = LayerScale(size, self.layer_scale, name=f"{name}_scale")(out)
            return x + out if self.norm == "pre" else norm(x + out)

        def attend(x: jax.Array) -> jax.Array:
            nonlocal memory
            x, memory = self.attention(x, depth, memory, context)
            return x

        x = state if embedded is None else state + embedded.astype(state.dtype)
        x = joined("attention", x, attend, 0)
        x = joined("mlp", x, lambda x: self.feed_forward(x, lambda x: drop(x, 1)), 2)
        if self.gate is None:
            return x, memory, None
        new, z = self.gate(x, state)
        return new, memory, z


class DepthRecurrent(PuzzleFamily):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/depth_recurrent.py).

    Parameters: `embedding` [V, h]; `depth_embedding` [T_max, h]; `core`, the block with its gate; `classifier`.

    The core counts 4 h^2 + 4 h for attention, 2 h F + F + h for the feed-forward network, 4 h for two layer norms and
    2 h^2 + h for the gate, all with biases: 165,376 for graphs (h 128, F 256), and with 2 h for LayerScale 921,600 for
    texts (h 256, F 1024). The model for graphs has 201,474: also 20 depth embeddings and 3 roles (2,944), and the
    readout 256 -> 128 -> 2 with biases (33,154). The number of nodes changes nothing.
    """

    parts = ("embedding", "depth embedding", "attention", "mlp", "gate", "residual", "head")
    remedies = {"embedding": "model.vocab_size or model.hidden_size", "mlp": "model.mlp_size"}  # noqa: RUF012

    @property
    def flags(self) -> Flags:
        """A position sees later ones too, and what is read off are classes."""
        weighs = self.config.loss_at != "last"
        return Flags(causal=False, generates=False, random=self.config.dropout > 0, weighs_depths=weighs)

    @property
    def depth(self) -> int:
        """T, the most that training draws."""
        return self.config.depth

    def check_depth(self, depth: int) -> int:
        """The depth, if there are embeddings for it."""
        most = self.config.max_depth
        if self.config.depth_embedding_std and depth > most:
            raise UserError(f"this model has depth embeddings for {most} steps and can't think for {depth}")
        return super().check_depth(depth)

    @functools.cached_property
    def core(self) -> ReasoningBlock:
        """The block, unbound."""
        c = self.config
        base = c.rope_base if c.positions == "rope" else 0.0
        attention = MultiHeadAttention(self.operations, c.hidden_size, c.heads, base, parent=None)
        feed_forward = MLP(c.hidden_size, c.mlp_size, ACTIVATIONS[c.activation], parent=None)
        gate = Gate(c.hidden_size, c.gate_bias, parent=None) if c.gate else None
        return ReasoningBlock(attention, feed_forward, gate, c.norm, c.layer_scale, c.dropout, c.dtype, parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 4)
        token, x, e = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, c.hidden_size)), jnp.zeros(c.hidden_size)
        core = self.core.init(keys[0], x, e, depth_of(0, 1), Bidirectional(), Context(token, token))["params"]

        def table(key: jax.Array, rows: int, std: float, axis: str) -> Parameter:
            drawn = normal(std)(key, (rows, c.hidden_size), jnp.float32)
            return Parameter(drawn, (axis, "hidden"), "embedding")

        params = {
            "embedding": table(keys[1], c.vocab_size, 1.0, "vocab"),
            "core": core,
            "classifier": self.init_classifier(keys[2]),
        }
        if c.depth_embedding_std:
            params["depth_embedding"] = table(keys[3], c.max_depth, c.depth_embedding_std, "depths")
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All steps share the core; each has a row of the depth embeddings."""
        stacked = {name: params[name] for name in ("depth_embedding",) if name in params}
        return Weights(shared=params["core"], stacked=stacked)

    # A pass.

    def draw(self, key: jax.Array, step: jax.Array, rows: jax.Array) -> Drawn:
        """T, uniform over the range of training (section 3.1, Table 2), one for the whole batch."""
        c = self.config
        return Drawn(jax.random.randint(key, (), c.depth_min, c.depth + 1), c.depth)

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """H_0, float32."""
        return embed(params["embedding"], batch["tokens"], "float32"), memory

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array:
        """H_0 [B, S, h]."""
        return entered

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """H_{t-1} -> H_t, t = l + 1; with the loss at every step, what is read off as well."""
        e = weights.stacked.get("depth_embedding")
        found: Any = self.core.apply({"params": weights.shared}, state, e, depth, memory.sequence, context)
        x, kept, z = found
        outputs = () if self.config.loss_at == "last" else read_states(x, context.read, READ[self.config.readout])
        counts = {}
        if self.observe and z is not None:
            counts["gate_openness"] = jnp.sum(jnp.mean(z, axis=-1).reshape(-1) * context.real)
        return Stepped(x, memory._replace(sequence=kept), outputs, counts)

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Bidirectional())

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy after the last step, or its mean over steps 1 to T (section 4.4)."""
        if self.config.loss_at == "last":
            return super().loss(params, passed, batch)
        logits = self.logits(params, passed.outputs)  # [slots, B, C]
        label, counted = labels(batch)
        taken = jnp.arange(len(logits)) < passed.depth
        losses = jnp.einsum("tb,t,b->", class_losses(logits, label), taken * 1.0, counted * 1.0)
        return losses / passed.depth, self.logged(logits[passed.depth - 1], passed, label, counted)

    # Counting.

    def blocks(self) -> list[Share]:
        """The block's parts, applied T times with one set of weights."""
        c, hidden, depth = self.config, self.config.hidden_size, self.config.depth
        norm, scale = LayerNorm(hidden, parent=None), LayerScale(hidden, c.layer_scale, parent=None)
        scales = [Share("residual", scale, 2, 2 * depth)] if c.layer_scale else []
        gates = [Share("gate", self.core.gate, 1, depth)] if self.core.gate else []
        tables = [Share("depth embedding", Embedding(c.max_depth, hidden), 1, depth)] if c.depth_embedding_std else []
        rotated = 2 * hidden if c.positions == "rope" else 0
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *tables,
            Share("attention", self.core.attention, 1, depth),
            Share("mlp", self.core.feed_forward, 1, depth),
            *gates,
            Share("residual", norm, 2, 2 * depth),
            *scales,
            Share("residual", Residual(hidden, 3 if tables else 2, 2, rotated), 0, depth),
            Share("head", self.classifier.clone(losses=1 if c.loss_at == "last" else depth), 1, 1, outside=True),
        ]

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("depth_min", "depth", "hidden_size", "mlp_size", "vocab_size", "readout")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Steps."""
        return f"depth-recurrent transformer, {self.config.depth_min} to {self.config.depth} steps"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together."""
        return (Knob("mlp_size", "params", "mlp"),)


CORE = DepthRecurrent
