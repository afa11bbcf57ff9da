"""Seeing what a layer computes without changing it: operations that remember, and the sums taken from them.

The model gets its attentions and experts as functions. Here it gets the same functions, wrapped to keep what they
are called with, and its layer is wrapped to return sums over the tokens in place of the expert counts. All sums
have shapes that depend on the model alone, leave padding out, and add up over batches and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.model import Dreamer, Operations, resolve_operations
from dreamer_jax.model.primitives import rms_norm
from dreamer_jax.model.routing import Router
from dreamer_jax.training.loss import token_losses

BINS = 20
"""Equal bins of [0, 1] that the scores of selected experts are counted in."""
LENS_TARGETS = 32
"""Targets of a row that the logit lens reads, spread evenly over those that count: the head is applied to them at
every depth, which for all targets would cost more than the model itself."""

Sums = dict[str, Any]


class Recorder:
    """Operations that compute what the given ones do and keep what they saw of the layer being traced."""

    def __init__(self, operations: Operations):
        self._inner = operations
        self.experts: tuple[jax.Array, ...] = ()
        """x [T, h] and indices [T, k] of the expert attention."""
        self.routed: dict[str, tuple[jax.Array, jax.Array]] = {}
        """Name of the attention -> x [T, h] and score [T] of its attention MoE."""
        self.depth: tuple[jax.Array, ...] = ()
        """q [T, n, d], keys [L, T, kv, d] and depth of the depth attention."""
        self._linear: tuple[jax.Array, jax.Array] | None = None
        self.operations = Operations(
            self._sequence_attention, self._depth_attention, self._expert_mlp, self._expert_linear
        )

    def reset(self) -> None:
        """Forget the previous layer."""
        self.experts, self.depth, self.routed, self._linear = (), (), {}, None

    def _expert_mlp(self, x, indices, *rest):
        self.experts = (x, indices)
        return self._inner.expert_mlp(x, indices, *rest)

    def _expert_linear(self, x, index, score, *rest):
        self._linear = (x, score)
        return self._inner.expert_linear(x, index, score, *rest)

    # An attention comes right after its own fused q/k/v projection, which tells whose routing that was.
    def _sequence_attention(self, q, *rest):
        if self._linear is not None:
            self.routed["sequence_attention"] = self._linear
        return self._inner.sequence_attention(q, *rest)

    def _depth_attention(self, q, k, v, cache, depth, *rest):
        if self._linear is not None:
            self.routed["depth_attention"] = self._linear
        out, cache = self._inner.depth_attention(q, k, v, cache, depth, *rest)
        self.depth = (q, cache.heads(q.shape[-1])[0], depth)
        return out, cache


def observe_batch(config: DreamerConfig, params: Any, balancing: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Sums over the tokens of a batch (padding excluded), each with a leading axis over the L depths.

    Args:
        config: sizes and variant.
        params, balancing: as `Dreamer.apply` takes them.
        batch: of dreamer_jax.data, each entry [B, S].

    Returns:
        `counts` and `scores`: router -> [L, E] and [L, BINS] int32, selections by expert and by score.
        `entropy`: router -> [L] float32, of the sigmoid scores of all experts, normalised; in nats.
        `depth_scores`: [L, n, L] float32, attention weights by depth, head and attended depth; not without DA.
        `norm`, `cosine`, `distance`: [L] float32, of the residual stream after each depth: its L2 norm, cosine with
        the stream before, and distance from it relative to the norm before.
        `lens_loss` [L] float32, `lens_correct`, `lens_answers_correct` [L] int32: the head applied after each depth.
        `tokens`, `lens_targets`, `lens_answers`: scalars int32, what those sums are over.
    """
    recorder = Recorder(resolve_operations(config.implementation))
    model = Dreamer(config, operations=recorder.operations, remat="none")
    real = batch["segment_ids"].reshape(-1) > 0
    rows, columns, lens = choose_targets(batch["loss_mask"], batch["answer_mask"])

    def readable(x):
        return x if config.recurrent else rms_norm(x, params["final_norm"]["scale"])

    def observe(layer: Callable) -> Callable:
        def observed(weights, x, depth, cache, bias, context):
            recorder.reset()
            new, cache, counts = layer(weights, x, depth, cache, bias, context)
            sums = _stream(x, new, real) | {"counts": counts}
            sums |= _routing(config, weights, recorder, depth, context.total_depth, real)
            if recorder.depth:
                weights_of_depth = depth_weights(*recorder.depth)  # [L, T, n]
                sums["depth_scores"] = jnp.einsum("ltn,t->nl", weights_of_depth, real * 1.0, precision="highest")
            losses, correct = token_losses(readable(new)[rows, columns], params["head"], lens["targets"])
            sums["lens_loss"] = jnp.sum(losses * lens["counted"])
            sums["lens_correct"] = jnp.sum(correct & lens["counted"])
            sums["lens_answers_correct"] = jnp.sum(correct & lens["answers"])
            return new, cache, sums

        return observed

    lens["targets"] = batch["targets"][rows, columns]
    variables = {"params": params, "balancing": {"bias": balancing}}
    inputs = (batch["tokens"], batch["segment_ids"], batch["positions"])
    trunk: Any = model.apply(variables, *inputs, observe=observe, method="trunk")
    sums = trunk[1]
    totals = {"tokens": real, "lens_targets": lens["counted"], "lens_answers": lens["answers"]}
    return {**sums, **{name: jnp.sum(mask, dtype=jnp.int32) for name, mask in totals.items()}}


def choose_targets(loss_mask: jax.Array, answer_mask: jax.Array):
    """Up to LENS_TARGETS places of every row, spread evenly over those the loss counts.

    Args:
        loss_mask, answer_mask: [B, S] bool.

    Returns:
        rows and columns [M] int32, and `counted` and `answers` [M] bool: whether a place was chosen (rows with fewer
        are filled up), and whether it belongs to an answer too.
    """
    limit = min(LENS_TARGETS, loss_mask.shape[1])
    number = jnp.cumsum(loss_mask, axis=1)  # from 1 at a row's first target
    total = number[:, -1:]
    wanted = jnp.minimum(limit, total)
    # Of n targets take w: number i where floor(i w / n) has grown.
    grown = number * wanted // jnp.maximum(total, 1) > (number - 1) * wanted // jnp.maximum(total, 1)
    columns = jnp.argsort(~(grown & loss_mask), axis=1, stable=True)[:, :limit].reshape(-1)
    rows = jnp.repeat(jnp.arange(loss_mask.shape[0]), limit)
    counted = (grown & loss_mask)[rows, columns]
    return rows, columns, {"counted": counted, "answers": counted & answer_mask[rows, columns]}


def depth_weights(q: jax.Array, keys: jax.Array, depth: jax.Array) -> jax.Array:
    """The softmax of Eq. 1 over the depths up to `depth`: q [T, n, d], keys [L, T, kv, d] -> [L, T, n] float32."""
    slots, tokens, kv_heads, size = keys.shape
    queries = q.reshape(tokens, kv_heads, -1, size).astype(jnp.float32)
    logits = jnp.einsum("tkgd,ltkd->ltkg", queries, keys.astype(jnp.float32), precision="highest") * size**-0.5
    visible = (jnp.arange(slots) <= depth)[:, None, None, None]
    return jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0).reshape(slots, tokens, -1)


def _stream(x: jax.Array, new: jax.Array, real: jax.Array) -> Sums:
    """How the residual stream [B, S, h] changes at one depth."""
    before, after = (t.reshape(real.size, -1).astype(jnp.float32) for t in (x, new))
    norms = [jnp.maximum(jnp.linalg.norm(t, axis=-1), 1e-30) for t in (before, after)]
    cosine = jnp.einsum("th,th->t", before, after, precision="highest") / (norms[0] * norms[1])
    distance = jnp.linalg.norm(after - before, axis=-1) / norms[0]
    values = {"norm": norms[1], "cosine": cosine, "distance": distance}
    return {name: jnp.sum(jnp.where(real, value, 0)) for name, value in values.items()}


def _routing(config: DreamerConfig, weights, recorder: Recorder, depth, total_depth, real) -> Sums:
    """Entropies and selected scores of every router of the layer, from the inputs it was seen to have."""
    sums: Sums = {"entropy": {}, "scores": {}}

    def add(name: str, router: Any, experts: int, x: jax.Array, indices: jax.Array | None, scores) -> None:
        logits: Any = Router(config, experts, parent=None).apply({"params": router}, x, depth, total_depth)
        if indices is not None:
            scores = jax.nn.sigmoid(jnp.take_along_axis(logits, indices, axis=-1))
        share = jax.nn.sigmoid(logits) / jnp.sum(jax.nn.sigmoid(logits), axis=-1, keepdims=True)
        entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
        sums["entropy"][name] = jnp.sum(jnp.where(real, entropy, 0))
        bins = jnp.clip((scores * BINS).astype(jnp.int32), 0, BINS - 1)
        ones = jnp.broadcast_to(real[:, None], bins.shape).astype(jnp.int32)
        sums["scores"][name] = jnp.zeros(BINS, jnp.int32).at[bins].add(ones)

    x, indices = recorder.experts
    add("expert_attention", weights["expert_attention"]["router"], config.num_experts, x, indices, None)
    for name, (routed, score) in recorder.routed.items():
        add(name, weights[name]["projections"]["router"], config.depth, routed, None, score[:, None])
    return sums
