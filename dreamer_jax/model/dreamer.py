"""The whole model: embed -> recurrence -> head, for LA, DR and DR+DA alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.core
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.values import Remat
from dreamer_jax.errors import UserError
from dreamer_jax.model.attention_moe import start_tape, tape_gradients
from dreamer_jax.model.mixture import Context, Layer
from dreamer_jax.model.operations import XLA, Operations, resolve_operations
from dreamer_jax.model.primitives import RMSNorm, embed, input_init
from dreamer_jax.model.recurrence import TapeRules, depth_scan
from pallas_kernels.depth_attention import DepthCache, empty_cache


class Output(NamedTuple):
    """What a forward pass returns.

    Attributes:
        logits: [B, S, V] float32.
        counts: router name -> [L, E] int32, how often each expert was selected at each depth (padding excluded).
    """

    logits: jax.Array
    counts: dict[str, jax.Array]


class Dreamer(nn.Module):
    """Depth-recurrent attention mixture.

    Variables: `params`, float32, and `balancing`, router name -> bias b ([E], in LA [L, E]), which is state of the
    train step, not a gradient parameter.

    Attributes:
        config: sizes and variant.
        operations: what the layers compute with; None takes those of `config.implementation`.
        remat: what is kept for the backward pass, see `depth_scan`.
    """

    config: DreamerConfig
    operations: Operations | None = None
    remat: Remat = "full"

    def setup(self) -> None:
        config = self.config
        init = input_init(config.hidden_size, ("vocab", "hidden"))
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = self.param("embedding", init, shape, jnp.float32)
        self.head_weight = self.param("head", init, shape, jnp.float32)
        if config.recurrent:
            self.layer_params = self._weights("layer", self._init_layer)
        else:
            self.layer_params = self._weights("layers", self._init_stack)
            self.final_norm = RMSNorm()
        self.bias = self.variable("balancing", "bias", self._init_bias)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        depth: int | jax.Array | None = None,
    ) -> Output:
        """Logits of the next token at every position.

        Args:
            tokens: [B, S] int32.
            segment_ids: [B, S] int32, documents of a packed row, from 1; 0 is padding. None: one document a row.
            positions: [B, S] int32, from 0 within each document. None: 0..S-1.
            depth: depths to apply, None for the trained one. DR takes any, LA at most the layers it has; a traced
                scalar may not exceed the trained depth.
        """
        hidden, counts = self.trunk(tokens, segment_ids, positions, depth)
        return Output(self.head(hidden), counts)

    def trunk(
        self, tokens, segment_ids=None, positions=None, depth=None, observe: Callable | None = None
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Everything before the head: [B, S] -> final hidden states [B, S, h] in compute dtype, and the counts.

        Args:
            tokens, segment_ids, positions, depth: as of a call.
            observe: gets the layer, a pure function (see recurrence.py), and returns another of that contract; what
                it returns in place of the counts comes back stacked over the depths.
        """
        config = self.config
        depth = config.depth if depth is None else depth
        slots = depth if isinstance(depth, int) else config.depth
        if not config.recurrent and slots > config.depth:
            raise UserError(f"this LA model has {config.depth} layers and can't be applied at depth {slots}")
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        x: Any = embed(self.embedding, tokens, config.dtype)  # [B, S, h]
        cache = None
        if config.depth_attention:
            cache = empty_cache(slots, tokens.size, config.da_kv_heads, config.da_head_size, x.dtype)

        operations = self.operations or resolve_operations(config.implementation)
        step = Layer(config, operations, parent=None)

        def layer(weights, x, l, cache, bias, context, tape=None) -> Any:
            own_bias = bias if config.recurrent else jax.tree.map(lambda b: b[l], bias)
            return step.apply({"params": weights}, x, l, cache, own_bias, context, tape)

        layer = observe(layer) if observe else layer
        context = Context(segment_ids, positions, jnp.asarray(depth, jnp.int32))
        x, counts = depth_scan(
            layer,
            self.layer_params,
            x,
            cache,
            (self.bias.value, context),
            depth,
            slots=slots,
            shared=config.recurrent,
            remat=self.remat,
            tape_rules=self._tape_rules(operations, cache, tokens.size),
        )
        return (x if config.recurrent else self.final_norm(x)), counts

    def _tape_rules(self, operations: Operations, cache: DepthCache | None, tokens: int) -> TapeRules:
        """What goes on the tape of the backward pass: depth attention's part, and the totals that kernels add to."""
        config, params = self.config, self.layer_params

        def start():
            tape = {}
            if cache is not None:
                tape["depth_attention"] = operations.depth_tape(cache, config.da_heads, config.da_head_size)
            if config.recurrent:
                selection = tokens, config.experts_per_token
                gate_up = params["expert_attention"]["gate_up"].shape
                tape["expert_attention"] = operations.expert_tape(selection, gate_up, config.dtype)
                for name in _attentions(config):
                    maps = params[f"{name}_attention"]["projections"]
                    tape[f"{name}_projections"] = start_tape(operations, maps, tokens, config.dtype)
            return {name: part for name, part in tape.items() if part is not None}

        def settle(tape):
            experts = {name: operations.settle_tape(part) for name, part in tape.items() if name == "expert_attention"}
            return {**tape, **experts}

        def gradients(tape):
            found = {}
            if "expert_attention" in tape:
                totals = tape["expert_attention"]
                found["expert_attention"] = {"gate_up": totals.gate_up, "down": totals.down}
            for name in _attentions(config):
                if f"{name}_projections" in tape:
                    found[f"{name}_attention"] = {"projections": tape_gradients(tape[f"{name}_projections"])}
            return found

        expert = jax.eval_shape(start).get("expert_attention")
        return TapeRules(start, settle, 1 if expert is None else expert.depths, gradients)

    def head(self, hidden: jax.Array) -> jax.Array:
        """[..., h] -> logits [..., V] float32."""
        weight = self.head_weight.astype(hidden.dtype)
        return jnp.einsum("...h,vh->...v", hidden, weight, preferred_element_type=jnp.float32)

    def _weights(self, name: str, init: Callable[[jax.Array], Any]) -> Any:
        """The layer's parameters; given ones may hold other experts than E: that is up to `operations.expert_mlp`."""
        given = self.get_variable("params", name) if self.has_variable("params", name) else self.param(name, init)
        return nn.meta.unbox(given)

    def _init_layer(self, key: jax.Array) -> Any:
        config = self.config
        token = jnp.zeros((1, 1), jnp.int32)
        cache = empty_cache(1, 1, config.da_kv_heads, config.da_head_size, jnp.float32)
        bias = {name: jnp.zeros(size) for name, size in router_sizes(config).items()}
        context = Context(token, token, jnp.int32(1))
        x = jnp.zeros((1, 1, config.hidden_size))
        return Layer(config, XLA, parent=None).init(key, x, jnp.int32(0), cache, bias, context)["params"]

    def _init_stack(self, key: jax.Array) -> Any:
        stacked = jax.vmap(self._init_layer)(jax.random.split(key, self.config.depth))
        return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layer"})

    def _init_bias(self) -> dict[str, jax.Array]:
        lead = () if self.config.recurrent else (self.config.depth,)
        return {name: jnp.zeros((*lead, size), jnp.float32) for name, size in router_sizes(self.config).items()}


def _attentions(config: DreamerConfig) -> tuple[str, ...]:
    return ("sequence", "depth") if config.depth_attention else ("sequence",)


def router_sizes(config: DreamerConfig) -> dict[str, int]:
    """Router name -> number of experts it chooses among."""
    sizes = {"expert_attention": config.num_experts}
    if config.recurrent:
        sizes["sequence_attention"] = config.depth
        if config.depth_attention:
            sizes["depth_attention"] = config.depth
    return sizes


def initialise(config: DreamerConfig, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """Fresh (params, balancing bias) as plain arrays, without the logical-axis boxes of `Dreamer.init`.

    Args:
        config: sizes and variant.
        key: PRNG key; the same key gives the same parameters on every machine.
    """
    # Drawing every matrix takes the CPU backend seconds to compile at full effort; this little gives the same bits.
    quick = jax.default_backend() == "cpu" and not isinstance(key, jax.core.Tracer)
    options = {"xla_backend_optimization_level": 1} if quick else None
    init = jax.jit(Dreamer(config, XLA, remat="none").init, compiler_options=options)
    variables = nn.meta.unbox(init(key, jnp.zeros((1, 1), jnp.int32)))
    return variables["params"], variables["balancing"]["bias"]
