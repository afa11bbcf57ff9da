"""MoEUT: a universal transformer of mixtures of experts (Csordas et al., 2024, "MoEUT: Mixture-of-Experts Universal
Transformers"). Formulas are those of the published code (RobertCsordas/moeut, commit 87f0497), whose outputs the tests
compare with.

    x_0     = embedding of the tokens
    x_{l+1} = layer_G(... layer_1(x_l))             a group of G layers, repeated R times (layer grouping)
          layer: z = LN(x),  x += SwitchHead(queries, keys and selections of z, values of x)
                 z = LN(x),  x += sigma-MoE(selections of z, experts of x)
    logits  = W LN(x_R) + b

Layer norms stand only where a softmax or sigmoid follows: the residual stream feeds values as it is (peri-layernorm).
So that all experts stay in use, the loss has a regulariser for each router: sum_e p_e log p_e, where p is the mean of
softmax(logits) over all tokens of a row and all repeats. A repeat of the group is a depth of the scan.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.norms import LayerNorm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal, uniform
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.residual import Residual
from dreamer_jax.blocks.routing import observe_routing, usage
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.blocks.sigma_moe import Selection, SigmaMoE, equal_rows, negative_entropy
from dreamer_jax.blocks.switch_head import SwitchHead
from dreamer_jax.blocks.usage import expert_use
from dreamer_jax.families.contract import Batch, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.recurrence import Stepped, Weights

EXPERTS = "experts"
"""The router of a layer's feed-forward network; those of its attention are "values" and "outputs"."""
TAPED = ("attention", "feed_forward")
"""The halves of a layer, which have experts."""


class Layer(nn.Module):
    """One layer of the group; see the module.

    Attributes:
        attention, feed_forward: of the two halves.
    """

    attention: SwitchHead
    feed_forward: SigmaMoE

    @nn.compact
    def __call__(
        self, x: jax.Array, depth: Depth, memory: Any, context: Context, tape: Mapping[str, Any] | None = None
    ) -> tuple[jax.Array, Any, dict[str, Selection]]:
        """[B, P, h] -> [B, P, h], the memory with these keys and values, and what each router has selected."""
        tape = tape or {}
        z = LayerNorm(name="attention_norm")(x)
        attended = self.attention(x, z, depth, memory, context, tape.get("attention"))
        x = x + attended.out
        z = LayerNorm(name="mlp_norm")(x)
        made, chosen = self.feed_forward(x, z, tape.get("feed_forward"))
        return x + made, attended.memory, {**attended.selections, EXPERTS: chosen}


class Moeut(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/moeut.py).

    Parameters: `embedding` [V, h]; `layers` by number; `out_norm`; `head` [V, h] and `head_bias` [V].
    """

    parts = ("embedding", "attention", "experts", "residual", "head")
    cached_parts = ("attention",)
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "attention": "model.attention_experts or model.heads",
        "experts": "model.num_experts or model.expert_size",
    }

    @property
    def flags(self) -> Flags:
        """Keys of one repeat may stand in for another's."""
        return Flags(shares_caches=True, weighs_depths=True)

    @property
    def depth(self) -> int:
        """R."""
        return self.config.depth

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the layers, unbound. Matrices start with variance 2/(G R) over their inputs."""
        c, h = self.config, self.config.hidden_size
        scale = (2 / (c.layers * c.depth)) ** 0.5
        into, width = scale * h**-0.5, c.heads * c.head_size
        attention = SwitchHead(
            self.operations,
            h,
            c.heads,
            c.head_size,
            c.attention_experts,
            c.attention_experts_per_token,
            c.rope_base,
            inward=normal(into),
            outward=normal(scale * width**-0.5),
            keys=equal_rows(into, by_row=True),
            parent=None,
        )
        feed_forward = SigmaMoE(
            self.operations,
            h,
            c.expert_size,
            c.num_experts,
            c.experts_per_token,
            inward=normal(into),
            outward=normal(scale * (c.num_experts * c.expert_size) ** -0.5),
            keys=equal_rows(into),
            parent=None,
        )
        return Layer(attention, feed_forward, parent=None)

    @functools.cached_property
    def norm(self) -> LayerNorm:
        """Before the head, unbound."""
        return LayerNorm(self.config.hidden_size, parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, h, keys = self.config, self.config.hidden_size, jax.random.split(key, 4)
        layer, token = Moeut(c, REFERENCE).layer, jnp.zeros((1, 1), jnp.int32)
        given = jnp.zeros((1, 1, h)), depth_of(0, 1), Fresh(), Context(token, token)
        drawn, numbers = uniform(h**-0.5), jax.random.split(keys[1], c.layers)
        rows = normal(h**-0.5)(keys[0], (c.vocab_size, h), jnp.float32)
        head = drawn(keys[2], (c.vocab_size, h), jnp.float32)
        params = {
            "embedding": Parameter(rows, ("vocab", "hidden"), "embedding"),
            "layers": {str(g): layer.init(each, *given)["params"] for g, each in enumerate(numbers)},
            "out_norm": self.norm.init(keys[3], jnp.zeros((1, h)))["params"],
            "head": Parameter(head, ("vocab", "hidden"), "embedding"),
            "head_bias": Parameter(drawn(keys[3], (c.vocab_size,), jnp.float32), ("norm",), "bias"),
        }
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All repeats share the group."""
        return Weights(shared=params["layers"])

    def fold(self, params: Any) -> Any:
        """Experts laid out for decoding, and the head with its bias."""
        cast, layer, layers = self.cast(params), self.layer, {}
        for g, its in cast["layers"].items():
            folded = {name: getattr(layer, name).fold(its[name], self.config.dtype) for name in TAPED}
            layers[g] = {**its, **folded}
        rest = {name: leaf for name, leaf in cast.items() if name != "head_bias"}
        return {**rest, "layers": layers, "head": self.head(cast)}

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_0."""
        return embed(params["embedding"], batch["tokens"], self.config.dtype), memory

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array:
        """x_0 [B, P, h]."""
        return entered

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_l -> x_{l+1}. Its outputs are what the regularisers read: layer -> router -> sum of probabilities."""
        x, sequence, groups = state, memory.sequence, len(weights.shared)
        real, outputs, chosen = context.segment_ids > 0, {}, {}
        for g in map(str, range(groups)):
            number = Depth(depth.index * groups + int(g), depth.total)
            its: Any = self.layer.apply(
                {"params": weights.shared[g]}, x, number, sequence, context, (tape or {}).get(g)
            )
            x, sequence, routers = its
            outputs[g] = {name: router.probabilities(real) for name, router in routers.items()}
            chosen |= {f"{name}_{g}": router for name, router in routers.items()}
        counts = _observed(chosen, context.real) if self.observe else _usage(chosen, context.real)
        return Stepped(x, memory._replace(sequence=sequence), outputs, counts)

    def start_tape(self, weights: Weights, tokens: int, slots: int) -> dict[str, Any]:
        """The totals that kernels add the gradients of the experts' matrices to."""
        layer, dtype = self.layer, self.config.dtype
        return {
            g: {name: getattr(layer, name).start_tape(its[name], tokens, dtype) for name in TAPED}
            for g, its in weights.shared.items()
        }

    def readout(self, params: Any, state: jax.Array, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """LN(x_R), and a 1 that meets the head's bias."""
        hidden: Any = self.norm.apply({"params": params["out_norm"]}, state)
        return jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1), memory

    @property
    def readout_size(self) -> int:
        """h, and the bias."""
        return self.config.hidden_size + 1

    def head(self, params: Any) -> jax.Array:
        """[V, h + 1]: the bias is the last column, so that whatever applies a head applies it too."""
        if "head_bias" not in params:  # folded
            return params["head"]
        return jnp.concatenate([params["head"], params["head_bias"].astype(params["head"].dtype)[:, None]], axis=1)

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Fresh())

    def slots(self, rows: int, capacity: int, depth: int) -> SharedSlots:
        """Keys and values of every repeat and layer. Keys are rotated by their positions before they are kept."""
        c = self.config
        return SharedSlots.empty(c.layers, depth, rows, capacity, c.heads, c.head_size, c.dtype, "latest")

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of the next token and the regularisers: of each row, times the number of its targets, so that
        their sum over all targets is the mean over rows, by their targets."""
        c, targets = self.config, jnp.sum(batch["loss_mask"], axis=1)
        entropy, _ = super().loss(params, passed, batch)
        experts, attention = (jnp.sum(each * targets) for each in regularisers(passed))
        total = entropy + c.expert_entropy_weight * experts + c.attention_entropy_weight * attention
        entropies = {"expert_entropy": -experts / c.layers, "attention_entropy": -attention / (2 * c.layers)}
        return total, {"last_loss": entropy, **entropies}

    def choices(self, router: str, counted: int) -> int:
        """Every head has attention experts of its own, and their numbers are counted in a row."""
        return counted if router.startswith(EXPERTS) else self.config.attention_experts

    def log(self, state: dict[str, Any], counts: Mapping[str, np.ndarray]) -> dict[str, float]:
        """How evenly each router uses its experts."""
        return expert_use(counts, recurrent=True)

    # Counting.

    def blocks(self) -> list[Share]:
        """The group's layers, applied in every repeat."""
        c, hidden, copies = self.config, self.config.hidden_size, self.config.layers
        depths = copies * c.depth
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            Share("attention", self.layer.attention, copies, depths),
            Share("experts", self.layer.feed_forward, copies, depths),
            Share("residual", self.norm, 2 * copies, 2 * depths),
            Share("residual", Residual(hidden, 2, 2, c.heads * c.head_size), 0, depths),
            Share("residual", self.norm, 1, 1, outside=True),
            Share("head", Head(c.vocab_size, self.readout_size), 1, 1, outside=True),
        ]

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("layers", "depth", "hidden_size", "vocab_size", "num_experts", "experts_per_token", "expert_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers and repeats."""
        return f"MoEUT {self.config.layers}x{self.config.depth}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves the FLOPs, E the parameters."""
        return (
            Knob("expert_size", "flops_per_token", "experts"),
            Knob("num_experts", "params", "experts", smallest=self.config.experts_per_token, fine=True),
        )


def regularisers(passed: Pass) -> tuple[jax.Array, jax.Array]:
    """-H of the mean probabilities of each row [B], summed over the layers: of the feed-forward networks' routers; and
    of the attention's, of values and of outputs, the mean over the heads. -log E each where all experts are alike."""
    tokens = passed.depth * jnp.sum(passed.context.segment_ids > 0, axis=1)
    experts = attention = jnp.zeros(len(tokens))
    for its in passed.outputs.values():
        for name, sums in its.items():
            total = jnp.sum(sums, axis=0)  # over the repeats, [B, E] or [B, n, E]
            mean = total / jnp.maximum(tokens, 1).reshape(-1, *[1] * (total.ndim - 1))
            if name == EXPERTS:
                experts += negative_entropy(mean)
            else:
                attention += jnp.mean(negative_entropy(mean), axis=-1)
    return experts, attention


def _usage(chosen: Mapping[str, Selection], real: jax.Array) -> dict[str, jax.Array]:
    """Router -> how often each expert was selected, those of all heads in a row."""
    return {name: usage(its.experts, int(np.prod(its.logits.shape[1:])), real) for name, its in chosen.items()}


def _observed(chosen: Mapping[str, Selection], real: jax.Array) -> dict[str, Any]:
    """What analysis wants to know of every router; entropies are means over the heads."""
    found: dict[str, Any] = {"counts": _usage(chosen, real), "entropy": {}, "scores": {}}
    for name, its in chosen.items():
        heads = its.logits[0].size // its.logits.shape[-1]
        logits, scores = (each.reshape(-1, each.shape[-1]) for each in (its.logits, its.scores))
        seen = observe_routing(logits, scores, jnp.repeat(real, heads))
        found["scores"][name], found["entropy"][name] = seen["scores"], seen["entropy"] / heads
    return found


CORE = Moeut
