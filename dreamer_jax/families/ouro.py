"""Ouro: a looped language model that learns when to stop (Zhu et al., 2025, "Scaling Latent Reasoning via Looped LMs").

    x_0 = embedding of the tokens
    x_t = N(layer_N(... layer_1(x_{t-1})))          one loop; the norm's output is what the next loop gets (section 3.1)
          layer: x += N'(attention(N(x))), then x += N'(swiglu(N(x)))                                      (section 4.1)
    logits after loop t = head x_t
    lambda_t = sigmoid(w x_t + b)                   the probability of stopping after loop t, having come so far
    p_t = lambda_t prod_{s<t} (1 - lambda_s)        for t < R; p_R is all that is left                     (section 3.2)

Training has two stages. The first minimises the expected cross-entropy less the entropy of p, so that all loops are
tried (section 3.3). The second freezes the model and teaches the gate to stop where another loop improves nothing
(section 3.4). A loop is a depth of the scan: l = t - 1, L = R. Equations are numbered as in arXiv:2510.25741v4.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.counting import Share
from dreamer_jax.blocks.exit_gate import ExitGate
from dreamer_jax.blocks.feed_forward import FeedForward
from dreamer_jax.blocks.head import Embedding, Head, embed
from dreamer_jax.blocks.layer import Layer, apply_layers, init_layers, layer_shares
from dreamer_jax.blocks.loss import cross_entropy, token_losses
from dreamer_jax.blocks.memory import Context, Fresh, Memory
from dreamer_jax.blocks.norms import RMSNorm, rms_norm
from dreamer_jax.blocks.operations import REFERENCE
from dreamer_jax.blocks.parameters import Parameter, normal
from dreamer_jax.blocks.positions import Depth
from dreamer_jax.blocks.self_attention import SelfAttention
from dreamer_jax.blocks.shared_slots import SharedSlots
from dreamer_jax.families.contract import Batch, Family, Flags, Knob, Pass
from dreamer_jax.recurrence import Stepped, Weights


class Looped(NamedTuple):
    """A position between two loops.

    Attributes:
        x: [B, P, h], normed; the embedding before the first loop.
        going_on: [B, P] float32, prod_s (1 - lambda_s): with which probability it hasn't stopped yet.
    """

    x: jax.Array
    going_on: jax.Array


class Ouro(Family):
    """A model of the family, sizes by its configuration (dreamer_jax/config/models/ouro.py).

    Parameters: `embedding`; `layers` by number; `final_norm`; `exit_gate`; `head`.
    """

    parts = ("embedding", "layers", "exit gate", "head")
    cached_parts = ("layers",)
    remedies = {  # noqa: RUF012
        "embedding": "model.vocab_size or model.hidden_size",
        "head": "model.vocab_size or model.hidden_size",
        "layers": "model.layers or model.mlp_size",
    }

    @property
    def flags(self) -> Flags:
        """Keys of one loop may stand in for another's; every loop is scored; the gate may stop a token early."""
        c = self.config
        halts, apart = c.exit_threshold < 1, c.cache == "loops"
        return Flags(shares_caches=True, decodable=True, halts=halts, depths_apart=apart, weighs_depths=True)

    @property
    def depth(self) -> int:
        """R."""
        return self.config.depth

    @property
    def differentiated(self) -> int:
        """None in stage 2, in which the model is frozen."""
        return self.depth if self.config.stage == 1 else 0

    @functools.cached_property
    def layer(self) -> Layer:
        """Any of the layers, unbound."""
        c, draw = self.config, normal(self.config.init_std)
        sizes = c.hidden_size, c.heads, c.kv_heads, c.head_size, c.rope_base
        attention = SelfAttention(self.operations, *sizes, draw, draw, parent=None)
        feed_forward = FeedForward(self.operations, c.hidden_size, c.mlp_size, draw, draw, draw, parent=None)
        return Layer(attention, feed_forward, "double_norm", c.norm_epsilon, parent=None)

    @functools.cached_property
    def exit_gate(self) -> ExitGate:
        """The gate, unbound."""
        return ExitGate(self.config.hidden_size, normal(self.config.init_std), parent=None)

    # Parameters.

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Fresh parameters; the model has no state of its own."""
        c, keys = self.config, jax.random.split(key, 4)

        def table(key: jax.Array) -> Parameter:
            rows = normal(c.init_std)(key, (c.vocab_size, c.hidden_size), jnp.float32)
            return Parameter(rows, ("vocab", "hidden"), "embedding")

        params = {
            "embedding": table(keys[0]),
            "layers": init_layers(Ouro(c, REFERENCE).layer, keys[1], c.layers),
            "final_norm": Parameter(jnp.ones(c.hidden_size), ("norm",), "norm"),
            "exit_gate": self.exit_gate.init(keys[2], jnp.zeros((1, c.hidden_size)))["params"],
            "head": table(keys[3]),
        }
        return params, {}

    def weights(self, params: Any) -> Weights:
        """All loops share the layers, the norm and the gate."""
        return Weights(shared={name: params[name] for name in ("layers", "final_norm", "exit_gate")})

    # A pass.

    def enter(self, params: Any, batch: Batch, memory: Memory, context: Context) -> tuple[Any, Memory]:
        """x_0."""
        return embed(params["embedding"], batch["tokens"], self.config.dtype), memory

    def start(self, entered: jax.Array, context: Context, scale: Any = 1.0) -> Looped:
        """x_0, and nothing has stopped."""
        return Looped(entered, jnp.ones(entered.shape[:2], jnp.float32))

    def step(self, weights, state, inputs, depth, memory, context, tape=None) -> Stepped:
        """x_{t-1} -> x_t. Its outputs are what the loss reads: x_t and the gate's logit."""
        shared = weights.shared
        x, kept = apply_layers(self.layer, shared["layers"], state.x, depth, memory.sequence, context)
        x = rms_norm(x, shared["final_norm"], self.config.norm_epsilon)
        logit = self._gate(shared["exit_gate"], x)
        # Only decoding and analysis read the product; the loss makes its own in logarithms (`exit_distribution`).
        going_on = state.going_on * jax.nn.sigmoid(-jax.lax.stop_gradient(logit))
        counts = {}
        if self.observe:
            share = state.going_on - jnp.where(depth.index == depth.total - 1, 0.0, going_on)
            counts["exit_probability"] = jnp.sum(share.reshape(-1) * context.real)
        return Stepped(Looped(x, going_on), memory._replace(sequence=kept), (x, logit), counts)

    def _gate(self, params: Any, x: jax.Array) -> jax.Array:
        """The logit of leaving after a loop, from its state [..., h]."""
        logit: Any = self.exit_gate.apply({"params": params}, x)
        return logit

    def finished(self, params: Any, state: Looped, before: Looped, depth: Depth) -> jax.Array | None:
        """Q-exit (section 3.2): p_1 + ... + p_t = 1 - prod_{s<=t} (1 - lambda_s) has reached q.

        At q = 1 nothing may stop: where a lambda is rounded to 1 the sum would reach it."""
        q = self.config.exit_threshold
        return None if q >= 1 else 1 - state.going_on >= q

    def readout(self, params: Any, state: Looped, memory: Memory, context: Context) -> tuple[jax.Array, Memory]:
        """x_t, which is normed."""
        return state.x, memory

    def stream(self, state: Looped) -> jax.Array:
        """x_t."""
        return state.x

    # Memories.

    def fresh(self, batch: int, length: int, slots: int) -> Memory:
        """Nothing is kept."""
        return Memory(Fresh())

    def slots(self, rows: int, capacity: int, depth: int) -> SharedSlots:
        """Keys and values of every loop and layer; or of one loop, in which each writes over the one before (section
        5.4.2): then a token sees the last keys of earlier tokens, and its own of the present loop."""
        c = self.config
        kept = depth if c.cache == "loops" else 1
        return SharedSlots.empty(c.layers, kept, rows, capacity, c.kv_heads, c.head_size, c.dtype, "latest")

    # Training.

    def loss(self, params: Any, passed: Pass, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Stage 1: sum_t p_t CE_t - beta H(p), Eq. 4. Stage 2: 1/R of the sum of `gate_losses`."""
        c, (x, logits) = self.config, passed.outputs  # [R, B, S, h], [R, B, S]
        if c.stage == 2:  # the model is frozen: without a gradient of its own, the loops have no backward pass
            x = jax.lax.stop_gradient(x)
            logits = self._gate(params["exit_gate"], x)
        mask, head = batch["loss_mask"], self.head(params)
        flat = x.reshape(-1, x.shape[-1])
        targets = jnp.broadcast_to(batch["targets"], logits.shape).reshape(-1)
        log_p = exit_distribution(logits, passed.depth)
        p = jnp.exp(log_p)
        entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=0)  # [B, S]
        loops = jnp.arange(1, len(p) + 1, dtype=jnp.float32)
        logged = {
            "exit_loop": jnp.sum(jnp.einsum("l,lbs->bs", loops, p) * mask),
            "exit_entropy": jnp.sum(entropy * mask),
        }
        if c.stage == 1:
            expected: Any = cross_entropy(flat, head, targets, (p * mask).reshape(-1))
            return expected - c.entropy_weight * jnp.sum(entropy * mask), logged
        losses, _ = token_losses(flat, jax.lax.stop_gradient(head), targets)
        by_loop = gate_losses(logits, losses.reshape(logits.shape), c.improvement_slope, c.improvement_threshold)
        taken = jnp.arange(1, len(logits)) < passed.depth
        mean = jnp.einsum("l,lbs->bs", taken * 1.0, by_loop) / passed.depth  # 1 / R sum_{t=2..R}, section 3.4
        return jnp.sum(mean * mask), logged

    # Counting.

    def blocks(self) -> list[Share]:
        """One set of layers, applied in every loop, with the final norm and the gate behind them."""
        c, hidden = self.config, self.config.hidden_size
        truncated = None if c.stage == 1 else 0
        return [
            Share("embedding", Embedding(c.vocab_size, hidden), 1, 1, outside=True, truncated=truncated),
            *layer_shares(self.layer, "layers", c.layers, c.depth, cached=None if c.cache == "loops" else 1),
            Share("layers", RMSNorm(hidden, parent=None), 1, c.depth),
            Share("exit gate", self.exit_gate, 1, c.depth),
            Share("head", Head(c.vocab_size, hidden, losses=c.depth), 1, 1, outside=True, truncated=truncated),
        ]

    def state_elements(self) -> int:
        """x and the probability of going on; and x and the gate's logit again, for the loss."""
        return 2 * (self.config.hidden_size + 1)

    def describe(self) -> dict[str, Any]:
        """Sizes."""
        names = ("layers", "depth", "hidden_size", "mlp_size", "vocab_size")
        return {"family": self.config.family} | {name: getattr(self.config, name) for name in names}

    def headline(self) -> str:
        """Layers and loops."""
        return f"Ouro {self.config.layers}x{self.config.depth}"

    def knobs(self) -> tuple[Knob, ...]:
        """F moves FLOPs and parameters together: a dense model can't move them apart."""
        return (Knob("mlp_size", "flops_per_token", "layers"),)


def exit_distribution(logits: jax.Array, loops: jax.Array | None = None) -> jax.Array:
    """log p_t from the gate's logits, [R, ...] float32; the last one decides nothing (section 3.2).

    In logarithms, so that neither a product of many factors nor a sigmoid of 1 loses what is left: p adds up to one.

    Args:
        logits: of all loops.
        loops: int32, how many there were, at most R, which None means; those beyond have -1e30.
    """
    t = jnp.arange(1, len(logits) + 1).reshape(-1, *[1] * (logits.ndim - 1))
    count = len(logits) if loops is None else loops
    decides = t < count
    going_on = jnp.cumsum(jnp.where(decides, jax.nn.log_sigmoid(-logits), 0.0), axis=0)
    before = jnp.concatenate([jnp.zeros_like(logits[:1]), going_on[:-1]])
    log_p = before + jnp.where(decides, jax.nn.log_sigmoid(logits), 0.0)
    return jnp.where(t <= count, log_p, -1e30)


def gate_losses(logits: jax.Array, losses: jax.Array, slope: float, threshold: float) -> jax.Array:
    """Stage 2 (section 3.4, Eq. 5 and 6): the cross-entropy of going on, 1 - lambda_t, for t = 2 .. R, [R - 1, ...].

    I_t = max(0, CE_{t-1} - CE_t) is what loop t improved; w_t = sigmoid(slope (I_t - threshold)) is how much one wishes
    to go on after it.

    Args:
        logits: of the gate, [R, ...].
        losses: CE_t, [R, ...]; they get no gradient.
    """
    improved = jnp.maximum(0, losses[:-1] - losses[1:])
    wish = jax.lax.stop_gradient(jax.nn.sigmoid(slope * (improved - threshold)))
    return -(wish * jax.nn.log_sigmoid(-logits[1:]) + (1 - wish) * jax.nn.log_sigmoid(logits[1:]))


CORE = Ouro
