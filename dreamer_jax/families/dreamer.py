"""Dreamer: depth-recurrent attention mixtures, and the layered baseline of the same parts (Knupp et al.).

One layer is a mixture of attention over the sequence (SA), over the earlier depths of the same token (DA) and over
experts (EA). Depth recurrence (DR) applies one layer L times; layered attention (LA) has L of them.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.blocks.attention import Attention, DepthAttention, SequenceAttention
from dreamer_jax.blocks.attention_mixture import AttentionMixture
from dreamer_jax.blocks.counting import Counted, Share
from dreamer_jax.blocks.decoding_layer import DecodingLayer
from dreamer_jax.blocks.depth_states import FORMS, Carried, DepthState
from dreamer_jax.blocks.dimensions import Dimensions
from dreamer_jax.blocks.expert_subsets import eligible
from dreamer_jax.blocks.experts import ExpertAttention
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.injection import DiagonalInjection
from dreamer_jax.blocks.memory import Context, Fresh, Memory, Slots
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameter_attention import ParameterAttention, Texts, slots_of
from dreamer_jax.blocks.parameters import Block, normal
from dreamer_jax.blocks.positions import DepthCode
from dreamer_jax.blocks.residual import Residual
from dreamer_jax.blocks.routing import Router, balance
from dreamer_jax.blocks.some_depths import acting
from dreamer_jax.blocks.usage import bias_range, expert_use
from dreamer_jax.families.contract import KNOWLEDGE, Family, Flags, Knob, depth_of
from dreamer_jax.recurrence import Stepped, Weights
from pallas_kernels.depth_attention import Window
from pallas_kernels.weights import Stacked


class _Parameters(Block):
    """All parameters of a model, drawn in the order that fixes what a seed gives."""

    family: Dreamer

    @nn.compact
    def __call__(self) -> None:
        config = self.family.config
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "hidden")
        self.weight("embedding", normal(self.family.std), shape, axes, "embedding")
        self.weight("head", normal(self.family.std), shape, axes, "embedding")
        if config.recurrent:
            self.param("layer", self.family.init_layer)
        else:
            self.param("layers", self.family.init_stack)
        if config.final_norm:
            RMSNorm(name="final_norm")(jnp.zeros(config.hidden_size))
        if self.family.decoding is not None:
            self.param("decoding", self.family.decoding.draw)


class Dreamer(Family):
    """A model of the family, sizes and variant by its configuration (dreamer_jax/config/models/dreamer.py).

    Parameters: `embedding`, `head`, and `layer` or, in LA, `layers`, stacked; `decoding`, if there is such a layer;
    `final_norm`, unless every depth ends with a norm and nothing decodes. Its state: `balancing`, router name -> b
    ([E], in LA [L, E]); with model.pa_source texts `knowledge`.
    """

    parts = ("embedding", "SA", "DA", "EA", "routers", "residual", "head")
    cached_parts = ("SA", "DA")
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "SA": "model.sa_heads or model.sa_head_size",
        "DA": "model.da_heads or model.da_head_size",
        "PA": "model.pa_slots",
        "decoding": "model.decoding_size",
        "routers": "model.router_size",
    }

    @property
    def flags(self) -> Flags:
        """DR goes to any depth; every variant keeps the keys of every depth."""
        return Flags(recurrent=self.config.recurrent, injects_inputs=self.config.injection != "none")

    @property
    def depth(self) -> int:
        """L."""
        return self.config.depth

    @property
    def std(self) -> float:
        """Of every matrix but the output projections: N(0, 1/(5h)) (Table 3)."""
        return (1 / (5 * self.config.hidden_size)) ** 0.5

    @functools.cached_property
    def layer(self) -> AttentionMixture:
        """The layer, unbound: SA, DA and EA as the configuration wants them."""
        config = self.config
        hidden, std = config.hidden_size, self.std
        # Output projections and the experts' down projections: N(0, 1/(2.5 h L n)), n attentions (Table 3).
        attentions = 2 + config.depth_attention + bool(config.pa_slots)
        out_std = (1 / (2.5 * hidden * config.depth * attentions)) ** 0.5

        code = None
        if config.depth_counters != "none":
            code = DepthCode(config.depth_rope_base, config.depth_counters, config.depth_scaling, config.depth)

        def router(experts: int, selected: int, **others: Any) -> Router:
            sizes = hidden, experts, config.router_size, selected
            return Router(*sizes, code if config.router_depth_code else None, std, parent=None, **others)

        def attention(kind: type, *sizes: Any, **others: Any) -> Any:
            router_of = router(config.depth, 1) if config.attention_moes else None  # as many linear experts as depths
            mixture = router_of, config.shared_expert
            return kind(self.operations, hidden, *sizes, std, out_std, *mixture, self.observe, parent=None, **others)

        every = {"every": config.da_every}

        sa = config.sa_heads, config.sa_kv_heads, config.sa_head_size, config.sa_rope_base
        da = config.da_heads, config.da_kv_heads, config.da_head_size, code
        depth_attention = None
        if config.da_form != "softmax":
            depth_attention = attention(FORMS[config.da_form], *da, **every)
        elif config.depth_attention:
            window = Window(config.da_window, config.da_dilation)
            depth_attention = attention(DepthAttention, *da, window=window, **every)
        parameter_attention = None
        if config.pa_slots:
            pa = config.pa_slots, config.pa_heads, config.pa_head_size, code
            how = std, out_std, config.pa_every, config.pa_embedding_size, self.observe
            parameter_attention = ParameterAttention(hidden, *pa, *how, parent=None)
        experts = router(config.num_experts, config.experts_per_token, subsets=config.expert_subsets)
        dimensions = None
        if config.dimensions_per_token:
            chooser = router(len(config.dimensions), config.dimensions_per_token)
            dimensions = Dimensions(config.dimensions, chooser, self.observe, parent=None)
        return AttentionMixture(
            sequence_attention=attention(SequenceAttention, *sa, every=config.sa_every),
            depth_attention=depth_attention,
            expert_attention=ExpertAttention(
                self.operations, hidden, config.expert_size, experts, std, out_std, self.observe, parent=None
            ),
            mixing=config.mixing,
            normalised=config.normalised_stream,
            injection=DiagonalInjection(hidden, parent=None) if config.injection == "diagonal" else None,
            averaged=config.residual_scale == "depth",
            parameter_attention=parameter_attention,
            dimensions=dimensions,
            parent=None,
        )

    @functools.cached_property
    def decoding(self) -> DecodingLayer | None:
        """What decodes, unbound, drawn as the experts are."""
        config, std = self.config, (self.std, self.layer.expert_attention.out_std)
        sizes = config.hidden_size, config.decoding_size
        return DecodingLayer(self.operations, *sizes, *std, parent=None) if config.decoding_size else None

    @property
    def routers(self) -> dict[str, Router]:
        """Router name -> the router."""
        found = {"expert_attention": self.layer.expert_attention.router}
        for name in ("sequence_attention", "depth_attention"):
            attention = getattr(self.layer, name)
            if attention is not None and attention.router is not None:
                found[name] = attention.router
        if self.layer.dimensions is not None:
            found["dimensions"] = self.layer.dimensions.router
        return found

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters and balancing biases."""
        params = _Parameters(self).init(key)["params"]
        config = self.config
        lead = () if config.recurrent else (config.depth,)
        bias = {name: jnp.zeros((*lead, its.num_experts), jnp.float32) for name, its in self.routers.items()}
        if not config.pa_embedding_size:
            return params, {"balancing": bias}
        texts = jnp.zeros((config.pa_slots, config.pa_embedding_size), jnp.float32)  # training is given the real ones
        return params, {"balancing": bias, KNOWLEDGE: {"texts": texts}}

    def init_layer(self, key: jax.Array) -> Any:
        """One layer's parameters, in boxes."""
        config, token = self.config, jnp.zeros((1, 1), jnp.int32)
        reference = Dreamer(config, REFERENCE)
        bias = {name: jnp.zeros(its.num_experts) for name, its in self.routers.items()}
        x, memory = jnp.zeros((1, 1, config.hidden_size)), reference.fresh(1, 1, 1, jnp.float32)
        if reference.folds_depths is not None:
            memory = memory._replace(depths=reference.folds_depths.start(1, 1))
        context = Context(token, token)
        return reference.layer.init(key, x, depth_of(0, 1), memory, bias, context, entered=x)["params"]

    def init_stack(self, key: jax.Array) -> Any:
        """All layers' parameters of LA."""
        stacked = jax.vmap(self.init_layer)(jax.random.split(key, self.config.depth))
        return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layer"})

    def weights(self, params: Any) -> Weights:
        """DR's layer is shared by the depths, LA's are stacked."""
        return Weights(shared=params["layer"]) if self.config.recurrent else Weights(stacked=params["layers"])

    def prepare(self, params: Any, state: dict[str, Any]) -> Any:
        """Keys and values of texts, [n, M, d], in the place of the maps that make them of the embeddings."""
        config = self.config
        if not config.pa_embedding_size:
            return params
        name = "layer" if config.recurrent else "layers"

        def slots(matrix: jax.Array) -> jax.Array:
            return slots_of(state[KNOWLEDGE]["texts"], matrix, config.pa_heads, config.dtype)

        its = params[name]["parameter_attention"]
        made = {leaf: (slots if config.recurrent else jax.vmap(slots))(its[leaf]) for leaf in ("keys", "values")}
        return {**params, name: {**params[name], "parameter_attention": {**its, **made}}}

    def fold(self, params: Any) -> Any:
        """Shared linear experts added into the routed ones in float32 (Eq. 8), matrices laid out for decoding."""
        name = "layer" if self.config.recurrent else "layers"
        layer, cast = params[name], self.cast(params)
        folded = dict(cast[name])
        for part in ("sequence_attention", "depth_attention", "expert_attention", "dimensions"):
            if part in layer:
                folded[part] = {**folded[part], **getattr(self.layer, part).fold(layer[part], self.config.dtype)}
        return {**cast, name: folded}

    # A pass.

    def enter(self, params: Any, batch: Any, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """The embedding enters depth 0 as it is; later depths get nothing of it, but where it is injected."""
        return embed(params["embedding"], batch["tokens"], self.config.dtype), memory

    @property
    def folds_depths(self) -> DepthState | None:
        """The depth attention that keeps a state in place of a cache, if it is of that kind."""
        return its if isinstance(its := self.layer.depth_attention, DepthState) else None

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> jax.Array | Carried:
        """x_0 [B, P, h], perhaps with an empty state of its depths."""
        folding = self.folds_depths
        return entered if folding is None else Carried(entered, folding.start(*entered.shape[:2]))

    def stream(self, state: jax.Array | Carried) -> jax.Array:
        """x_l."""
        return state.stream if isinstance(state, Carried) else state

    def state_elements(self) -> int:
        """The stream; and a state of depths, whose float32 counts as two numbers of bfloat16."""
        folding, size = self.folds_depths, self.config.hidden_size
        if folding is None:
            return size
        return size + folding.flight_elements() // (1 if self.config.dtype == "bfloat16" else 2)

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_l -> x_{l+1}."""
        bias, its = context.state["balancing"], weights.shared
        if not self.config.recurrent:
            bias, its = {name: Stacked(rows, depth.flat().index) for name, rows in bias.items()}, weights.stacked
        entered = inputs if self.flags.injects_inputs else None
        x, folded = self.stream(state), isinstance(state, Carried)
        if folded:
            memory = memory._replace(depths=state.depths)
        layer: Any = self.layer.apply({"params": its}, x, depth, memory, bias, context, tape, entered)
        out, memory, counts, seen = layer
        if folded:
            out, memory = Carried(out, memory.depths), memory._replace(depths=None)
        return Stepped(out, memory, (), _observed(counts, seen) if self.observe else counts)

    def start_tape(self, weights: Weights, tokens: int, slots: int) -> dict[str, Any]:
        """Depth attention's part, and in DR the totals that kernels add weight gradients to."""
        tape, dtype = {}, self.config.dtype
        its = weights.shared
        if self.layer.depth_attention is not None:
            depth_attention = its.get("depth_attention", {})
            tape["depth_attention"] = self.layer.depth_attention.start_tape(depth_attention, tokens, dtype, slots)
        if self.config.recurrent:
            for name in ("sequence_attention", "expert_attention"):
                tape[name] = getattr(self.layer, name).start_tape(its[name], tokens, dtype)
        return tape

    def readout(self, params: Any, state: jax.Array, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """What decodes, if anything does, of which the backward pass keeps the input only. DR's stream is normalised
        already; LA, DR without that, and what decodes have one final norm."""
        x = self.stream(state)
        if self.decoding is not None:
            x = jax.checkpoint(self.decoding.apply)({"params": params["decoding"]}, x)
        return (rms_norm(x, params["final_norm"]["scale"]) if self.config.final_norm else x), memory

    # Memories.

    def fresh(self, batch: int, length: int, slots: int, dtype: Any = None) -> Memory:
        """Nothing of the sequence is kept; a cache for depth attention."""
        attention, dtype = self.layer.depth_attention, dtype or self.config.dtype
        return Memory(Fresh(), attention and attention.memory(slots, batch * length, dtype))

    def slots(self, rows: int, capacity: int, depth: int) -> Slots:
        """Keys and values of SA at every depth."""
        config = self.config
        kept = acting(depth, config.sa_every)
        return Slots.empty(kept, rows, capacity, config.sa_kv_heads, config.sa_head_size, config.dtype)

    def refill(self, params: Any, state: Any, memory: Slots, depths: jax.Array, positions: jax.Array) -> Slots:
        """The latest stands in, of the depths at which SA acts."""
        return memory.fill_deeper(depths // self.config.sa_every, positions)

    def flight(self, batch: int, positions: int, depth: int, dtype: Any = None) -> Any:
        """The cache of DA, whose size doesn't grow with the sequence; None without DA."""
        attention = self.layer.depth_attention
        return attention and attention.newest(depth, batch * positions, dtype or self.config.dtype)

    # Training.

    def update(self, state: dict[str, Any], counts: dict[str, jax.Array], step: jax.Array) -> dict[str, Any]:
        """Eq. 3 for every router, each at its rate; or another rule, see `balance`."""
        config, boost = self.config, 1.0
        if config.balancing_boost_steps:
            done = jnp.minimum(step / config.balancing_boost_steps, 1.0)
            boost = config.balancing_boost + done * (1.0 - config.balancing_boost)
        rates = {"expert_attention": config.expert_bias_rate}
        bias = {
            name: balance(
                b,
                counts[name],
                boost * rates.get(name, config.attention_bias_rate),
                config.balancing,
                self._eligible(name, counts[name]),
                config.balancing_groups,
            )
            for name, b in state["balancing"].items()
        }
        return {**state, "balancing": bias}

    def _eligible(self, router: str, counts: Any) -> np.ndarray | None:
        """Whether an expert could be selected at a depth, as counts [L, E] have it; None: all could."""
        subsets = self.routers[router].subsets
        return None if subsets is None else eligible(subsets, len(counts))

    def choices(self, router: str, counted: int) -> int:
        """Where depths have subsets of the experts, one of them."""
        subsets = self.routers[router].subsets
        return counted if subsets is None else subsets.size

    def log(self, state: dict[str, Any], counts: Any) -> dict[str, float]:
        """How evenly each router uses its experts, and the range of its bias."""
        tables = {name: self._eligible(name, table) for name, table in counts.items()}
        return expert_use(counts, self.config.recurrent, tables) | bias_range(state["balancing"])

    # Counting.

    def blocks(self) -> list[Share]:
        """One layer's blocks L times, its parameters stored once (DR) or L times (LA)."""
        config, layer = self.config, self.layer
        depths, copies = config.depth, 1 if config.recurrent else config.depth
        hidden: int = config.hidden_size
        attentions: list[Attention] = [layer.sequence_attention]
        norm = RMSNorm(hidden, parent=None)
        da = [Share("DA", Counted(), 0, 0)]
        every = {"sequence_attention": config.sa_every, "depth_attention": config.da_every}
        applied = {name: acting(depths, every.get(name, 1)) for name in self.routers}
        if layer.depth_attention is not None:
            attentions.append(layer.depth_attention)
            kept = layer.depth_attention.cached_depths(depths)
            acts, turns = acting(depths, config.da_every), config.da_every
            da = [
                Share("DA", layer.depth_attention, copies, acts, cached=kept, every=turns),
                Share("DA", norm, copies, depths),
            ]
        pa, acts_pa, chooser = layer.parameter_attention, acting(depths, config.pa_every), layer.dimensions
        rotated = sum((each.heads + each.kv_heads) * each.head_size for each in attentions)
        residual = Residual(hidden, len(attentions) + 1, len(attentions) + 1 + config.residual_norm, rotated)
        return [
            Share("embedding", Embedding(config.vocab_size, hidden), 1, 1, outside=True),
            Share("SA", layer.sequence_attention, copies, acting(depths, config.sa_every), every=config.sa_every),
            Share("SA", norm, copies, depths),
            *da,
            Share("EA", layer.expert_attention, copies, depths, experts=True),
            Share("EA", norm, copies, depths),
            *(
                Share("routers", router, copies, applied[name], every=every.get(name, 1))
                for name, router in self.routers.items()
            ),
            Share("residual", residual, 0, depths),
            Share("residual", norm, 1, depths if config.normalised_stream else 1),
            *([] if layer.injection is None else [Share("residual", layer.injection, 1, depths)]),
            *(
                []
                if chooser is None
                else [Share("routers", chooser, 0, depths), Share("routers", norm, copies, depths)]
            ),
            *([] if pa is None else [Share("PA", pa, copies, acts_pa, every=config.pa_every)]),
            *([] if pa is None else [Share("PA", norm, copies, depths)]),
            *(
                [Share("PA", Texts(config.pa_slots, config.pa_embedding_size), 1, 0)]
                if config.pa_embedding_size
                else []
            ),
            *([] if self.decoding is None else self.decoding.shares("decoding", int(config.normalised_stream))),
            Share("head", Head(config.vocab_size, hidden), 1, 1, outside=True),
        ]

    def describe(self) -> dict[str, Any]:
        """Variant and sizes."""
        names = ("variant", "depth", "hidden_size", "vocab_size", "num_experts", "experts_per_token", "expert_size")
        return {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Variant and depth."""
        return f"{self.config.variant}, depth {self.config.depth}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves the FLOPs, E the parameters (section 3.8)."""
        return (
            Knob("expert_size", "flops_per_token", "EA"),
            Knob("num_experts", "params", "EA", smallest=self.config.fewest_experts, fine=True),
        )

    def knob_starts(self, baseline: Family) -> dict[str, int]:
        """The baseline's own experts, as one layer (or, in LA, each layer) would hold them; of another family
        the fewest and smallest."""
        its = baseline.config
        if not isinstance(baseline, Dreamer):
            return {knob.key: knob.smallest for knob in self.knobs()}
        experts = its.num_experts
        if self.config.recurrent and not its.recurrent:
            experts *= its.depth
        if its.recurrent and not self.config.recurrent:
            experts = max(its.experts_per_token, experts // its.depth)
        return {"expert_size": its.expert_size, "num_experts": experts}


def _observed(counts: dict[str, jax.Array], seen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What blocks saw, by quantity and then by router; and scores of DA and PA by themselves."""
    found: dict[str, Any] = {"counts": counts, "entropy": {}, "scores": {}}
    for router, values in seen.items():
        for quantity, value in values.items():
            if quantity in ("depth_scores", "slot_scores"):
                found[quantity] = value
            else:
                found[quantity][router] = value
    return found


CORE = Dreamer
