"""Huginn: latent recurrent depth (Geiping et al., 2025), and pretrained stacks in that form (McLeish et al., 2025).

A prelude embeds the tokens once, e = P(x). A core is applied r times on the state and that input, s' = R(s, e), from a
random state s_0. A coda reads the last state, p = C(s_r) (section 3.1). The number r is drawn anew in every step of
training, and only the last few recurrences are differentiated (section 3.3).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Counted, Reach, Share
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, apply_layers, init_layers, layer_shares
from dreamer_jax.blocks.loss import cross_entropy
from dreamer_jax.blocks.memory import Context, Fresh, Memory, Slots
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, truncated_normal
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.config.models.huginn import ring
from dreamer_jax.families.contract import Drawn, Family, Flags, Knob, Pass, depth_of
from dreamer_jax.recurrence import Stepped, Weights
from dreamer_jax.recurrence.draws import exponential, grown, keys_of_rows, poisson_lognormal

DEEPEST = 16
"""Times the mean: recurrences that training draws at most."""


class Sequence(NamedTuple):
    """Memories of the sequence: of the prelude's layers, of the core's at every recurrence, of the coda's."""

    prelude: Any
    core: Any
    coda: Any


class Huginn(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/huginn.py).

    Parameters: `embedding`; `prelude`, `core` and `coda`, layers by number; `adapter` [2h, h], state first;
    `final_norm`; `head` unless it is the embedding.
    """

    parts = ("embedding", "prelude", "adapter", "core", "coda", "head")
    cached_parts = ("prelude", "core", "coda")
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "prelude": "model.prelude_layers or model.mlp_size",
        "core": "model.core_layers or model.mlp_size",
        "coda": "model.coda_layers or model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """The input is injected, the state random; keys of one recurrence may stand in for another's; where numbers of
        recurrences are drawn, a state can be decoded after any."""
        rule, drawn = self.config.cache, self.config.depth_draw != "fixed"
        apart = rule in ("latest", "full")  # always-last looks whether any position, also a later one, lacks a depth
        cache = {"shares_caches": True, "depths_apart": apart}
        return Flags(injects_inputs=True, random=True, decodable=drawn, counts_depths=False, **cache)

    @property
    def depth(self) -> int:
        """The mean number of recurrences."""
        return self.config.depth

    @property
    def differentiated(self) -> int:
        """Recurrences of truncated backpropagation."""
        return self.config.gradient_recurrences

    @property
    def std(self) -> float:
        """Of every matrix but those that write to the stream: sqrt(2/(5h)) (Takase et al., 2023)."""
        return (2 / (5 * self.config.hidden_size)) ** 0.5

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings."""
        return self.config.embedding_scale or self.config.hidden_size**0.5

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the layers, unbound."""
        c = self.config
        # The stream is written to twice a layer, by as many layers as a token passes at the mean depth.
        passed = c.prelude_layers + c.core_layers * c.depth + c.coda_layers
        draw, out = truncated_normal(self.std), truncated_normal(self.std / (2 * passed) ** 0.5)
        sizes = c.hidden_size, c.heads, c.kv_heads, c.head_size, c.rope_base
        attention = SelfAttention(
            self.operations, *sizes, draw, out, c.queries, c.norm_epsilon, 0, c.rope_scaling, parent=None
        )
        feed_forward = FeedForward(self.operations, c.hidden_size, c.mlp_size, draw, out, out, parent=None)
        return Layer(attention, feed_forward, c.form, c.norm_epsilon, parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, iter(jax.random.split(key, 6))
        draw, table = truncated_normal(self.std), (c.vocab_size, c.hidden_size)

        def box(shape: tuple[int, ...], axes: tuple[str, ...], role: Any) -> Parameter:
            return Parameter(draw(next(keys), shape, jnp.float32), axes, role)

        def layers(count: int) -> dict[str, Any]:
            return init_layers(Huginn(c, REFERENCE).layer, next(keys), count)

        params = {
            "embedding": box(table, ("vocab", "hidden"), "embedding"),
            "prelude": layers(c.prelude_layers),
            "adapter": box((2 * c.hidden_size, c.hidden_size), ("both", "hidden"), "matrix"),
            "core": layers(c.core_layers),
            "coda": layers(c.coda_layers),
            "final_norm": Parameter(jnp.ones(c.hidden_size), ("norm",), "norm"),
        }
        if not c.tied_head:
            params["head"] = box(table, ("vocab", "hidden"), "embedding")
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All recurrences share the adapter and the core."""
        return Weights(shared={"adapter": params["adapter"], "core": params["core"]})

    # A pass.

    def draw(self, key: jax.Array, step: jax.Array, rows: jax.Array) -> Drawn:
        """r of a train step (section 3.3): 1 + Poisson(rate), rate log-normal with the configured mean and spread; or
        1 + an exponential's whole part, whose mean is half a recurrence less. A curriculum lets the mean grow, and no
        more recurrences are differentiated than it has come to (McLeish et al., 2025, their published code)."""
        c, mean = self.config, mean_depth(self.config, step)
        if c.depth_draw == "fixed":
            return Drawn(mean, c.depth, c.gradient_recurrences)
        grown = mean if c.curriculum_steps else None
        most, last = DEEPEST * c.depth, c.gradient_recurrences
        if c.draw_by == "step":
            return Drawn(recurrences(c, key, mean=mean), most, last, differentiated=grown)
        depths = jax.vmap(lambda key: recurrences(c, key, mean=mean))(keys_of_rows(key, rows))
        return Drawn(depths, most, last, min(c.row_groups, len(rows)), differentiated=grown)

    def enter(self, params: Any, batch: Any, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """e = P(x), what every recurrence gets."""
        x: jax.Array = embed(params["embedding"], batch["tokens"], self.config.dtype)  # type: ignore[assignment]
        x = x * jnp.asarray(self.embedding_scale, x.dtype)
        x, prelude = self._stack(params["prelude"], x, memory.sequence.prelude, context)
        return x, memory._replace(sequence=memory.sequence._replace(prelude=prelude))

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array:
        """s_0 [B, P, h]: a normal cut off at three standard deviations, times `scale`."""
        std = scale * (self.config.state_std or (2 / 5) ** 0.5)
        rows, positions, size = entered.shape
        if context.keys is None:
            keys = jax.vmap(jax.vmap(lambda place: jax.random.fold_in(jax.random.key(0), place)))(context.positions)
        else:
            keys = jax.vmap(lambda key: jax.random.split(key, positions))(context.keys)
        draws = jax.vmap(lambda key: jax.random.truncated_normal(key, -3, 3, (size,)))(keys.reshape(-1))
        return (std * draws).astype(entered.dtype).reshape(rows, positions, size)

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """s_l -> s_{l+1}: the adapter of [s; e], and the core's layers."""
        both = jnp.concatenate([state, inputs], axis=-1)
        x = both @ weights.shared["adapter"].astype(both.dtype)
        x, core = apply_layers(self.layer, weights.shared["core"], x, depth, memory.sequence.core, context)
        return Stepped(x, memory._replace(sequence=memory.sequence._replace(core=core)))

    def readout(self, params: Any, state: jax.Array, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """The coda between two applications of one norm, of which retrofitted models have the second only."""
        epsilon, scale = self.config.norm_epsilon, params["final_norm"]
        x = rms_norm(state, scale, epsilon) if self.config.coda_norm else state
        x, coda = self._stack(params["coda"], x, memory.sequence.coda, context)
        return rms_norm(x, scale, epsilon), memory._replace(sequence=memory.sequence._replace(coda=coda))

    def head(self, params: Any) -> jax.Array:
        """[V, h], as a rule the embedding."""
        return params["embedding" if self.config.tied_head else "head"]

    def _stack(self, layers: dict[str, Any], x: jax.Array, memory: Any, context: Context) -> tuple[jax.Array, Any]:
        """Layers one after another, each of which keeps its input only for the backward pass."""
        for i in range(len(layers)):

            @jax.checkpoint
            def layer(weights, x, memory, context, i=i):
                return self.layer.apply({"params": weights}, x, depth_of(i, len(layers)), memory, context)

            x, memory = layer(layers[str(i)], x, memory, context)
        return x, memory

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Sequence(Fresh(), Fresh(), Fresh()))

    def slots(self, rows: int, capacity: int, depth: int) -> Sequence:
        """Keys and values of every layer; of the core's, at as many recurrences as the rule `cache` keeps."""
        c = self.config
        sizes = rows, capacity, c.kv_heads, c.head_size, c.dtype
        kept = ring(c.cache, c.core_layers)
        rule = c.cache if kept is None else "latest"
        core = SharedSlots.empty(c.core_layers, min(kept or depth, depth), *sizes, rule)
        return Sequence(Slots.empty(c.prelude_layers, *sizes), core, Slots.empty(c.coda_layers, *sizes))

    def refill(self, params: Any, state: Any, memory: Sequence, depths: jax.Array, positions: jax.Array) -> Sequence:
        """By the rule of the core's cache."""
        return memory._replace(core=memory.core.fill_deeper(depths, positions))

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of the next token after the last recurrence, and the z-loss."""
        hidden, _ = self.readout(params, passed.state, passed.memory, passed.context)
        flat, targets, mask = hidden.reshape(-1, hidden.shape[-1]), batch["targets"], batch["loss_mask"]
        loss: Any = cross_entropy(flat, self.head(params), targets.reshape(-1), mask.reshape(-1), self.config.z_loss)
        return loss, {"recurrences": jnp.sum(passed.depth.reshape(-1, 1) * mask)}

    # Counting.

    def blocks(self) -> list[Share]:
        """Prelude, core and coda layer by layer; the core's are applied in every recurrence."""
        c, hidden = self.config, self.config.hidden_size
        norm = RMSNorm(hidden, parent=None)
        last, kept = c.gradient_recurrences, ring(c.cache, c.core_layers)
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True),
            *layer_shares(self.layer, "prelude", c.prelude_layers, 1, outside=True),
            Share("adapter", Adapter(hidden), 1, c.depth, truncated=last),
            *layer_shares(self.layer, "core", c.core_layers, c.depth, truncated=last, cached=kept),
            *layer_shares(self.layer, "coda", c.coda_layers, 1, outside=True),
            Share("head", norm, 1, 2 if c.coda_norm else 1, outside=True),
            Share("head", Head(c.vocab_size, hidden), 0 if c.tied_head else 1, 1, outside=True),
        ]

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("prelude_layers", "core_layers", "coda_layers", "depth", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers and recurrences."""
        c = self.config
        return f"Huginn {c.prelude_layers}+{c.core_layers}x{c.depth}+{c.coda_layers}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "core"),)


class Adapter(Counted):
    """The matrix from [s; e] to the core's input, for counting.

    Args:
        hidden_size: h.
    """

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size

    def parameters(self, folded: bool = False) -> int:
        """[2h, h]."""
        return 2 * self.hidden_size**2

    def matmul_flops(self, reach: Reach, folded: bool = True) -> float:
        """One product."""
        return 2 * self.parameters()

    def intermediate_elements(self) -> int:
        """Its input."""
        return 2 * self.hidden_size


def mean_depth(config: Any, step: int | jax.Array) -> Any:
    """The mean that a step's recurrences are drawn with: `depth`, or less in the steps of the curriculum, rounded up,
    as McLeish et al. (2025) train retrofitted models."""
    if not config.curriculum_steps:
        return config.depth
    share = grown(config.curriculum, step, config.curriculum_steps)
    return jnp.maximum(jnp.ceil(config.depth * share), 1).astype(jnp.int32)


def recurrences(config: Any, key: jax.Array, shape: tuple[int, ...] = (), mean: Any = None) -> jax.Array:
    """Numbers of recurrences as training draws them, int32, at least 1 and at most `DEEPEST` times `depth`.

    Args:
        config: says how they are drawn.
        key: of the draws.
        shape: how many.
        mean: see `mean_depth`; None for `depth`.
    """
    mean = config.depth if mean is None else mean
    if config.depth_draw == "exponential":
        drawn = exponential(key, mean, shape)
    else:
        drawn = poisson_lognormal(key, mean, config.depth_sigma, shape)
    return jnp.minimum(drawn, DEEPEST * config.depth)


CORE = Huginn
