"""Seeing what a model computes without changing it: sums over tokens, taken depth by depth.

A family built with `observe` returns from its steps, in place of their counts, what its blocks saw. Here the step is
wrapped to add what can be said of any model: how its residual stream moves, and what the head makes of it after each
depth. All sums have shapes that depend on the model alone, leave padding out, and add up over batches and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dreamer_jax.analysis.convergence import change, count_changes
from dreamer_jax.analysis.hops import hop_sums
from dreamer_jax.blocks.loss import token_losses
from dreamer_jax.families import Family, Pass, build, forward

LENS_TARGETS = 32
"""Targets of a row that the logit lens reads, spread evenly over those that count: the head is applied to them at
every depth, which for all targets would cost more than the model itself."""

Sums = dict[str, Any]


def observe_batch(config: Any, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Sums:
    """Sums over the tokens of a batch (padding excluded), each with a leading axis over the L depths.

    Args:
        config: the section `model`.
        params, model_state: of the model.
        batch: of dreamer_jax.data, each entry [B, S].

    Returns:
        `norm`, `cosine`, `distance`: [L] float32, of the residual stream after each depth: its L2 norm, cosine with
        the stream before, and distance from it relative to the norm before; NaN where that is 0.
        `lens_loss` [L] float32, `lens_correct`, `lens_answers_correct` [L] int32: the head applied after each depth.
        `tokens`, `lens_targets`, `lens_answers`: scalars int32, what those sums are over.
        Of a family that injects its inputs: `settled` [L+1] and `changes` [L, BINS] int32, see `count_changes`; and if
        it generates, `lens_entropy` [L] float32, of the distribution that the head predicts, in nats.
        Of graphs: `hop_reached`, `hop_nodes`, see `hop_sums`.
        And what the family's blocks saw. Of routers: `counts` and `scores`, router -> [L, E] and [L, BINS] int32,
        selections by expert and by score; `entropy`, router -> [L] float32, of the sigmoid scores of all experts,
        normalised, in nats. Of depth attention: `depth_scores`, [L, n, L] float32, weights by depth, head and attended
        depth.
    """
    family = build(config, observe=True)
    real = batch["segment_ids"].reshape(-1) > 0
    rows, columns, lens = choose_targets(batch["loss_mask"], batch["answer_mask"])
    lens["targets"] = batch["targets"][rows, columns]
    # Only there can a recurrence converge to what its input says. Other families' sums stay as they are.
    converges = family.flags.injects_inputs

    def observe(step: Callable) -> Callable:
        def observed(weights, state, inputs, depth, memory, context, tape=None):
            stepped = step(weights, state, inputs, depth, memory, context, tape)
            before, after = family.stream(state), family.stream(stepped.state)
            if family.flags.generates:
                hidden, _ = family.readout(params, stepped.state, memory, context)
                losses, correct = token_losses(hidden[rows, columns], family.head(params), lens["targets"])
            else:  # few targets: the family says of each what it does in evaluation
                passed = Pass(stepped.state, (), (), inputs, memory, context, depth.total)
                losses, correct = (each[rows, columns] for each in family.evaluate(params, passed, batch))
            sums = dict(stepped.counts) | _stream(before, after, real)
            sums["lens_loss"] = jnp.sum(losses * lens["counted"])
            sums["lens_correct"] = jnp.sum(correct & lens["counted"])
            sums["lens_answers_correct"] = jnp.sum(correct & lens["answers"])
            if converges:
                sums["change"] = change(before, after).reshape(-1)
            if converges and family.flags.generates:
                sums["lens_entropy"] = jnp.sum(_entropy(family, params, hidden[rows, columns]) * lens["counted"])
            return stepped._replace(counts=sums)

        return observed

    sums = forward(family, params, model_state, batch, observe=observe).counts
    if "depth_scores" in sums:
        sums["depth_scores"] = sums["depth_scores"][..., : family.depth]
    if converges:
        sums |= count_changes(sums.pop("change"), real)
    if "visible" in batch:
        sums |= hop_sums(family, params, model_state, batch)
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


def _entropy(family: Family, params: Any, hidden: jax.Array) -> jax.Array:
    """Of the distributions that the head makes of [M, h], [M] float32 in nats; LENS_TARGETS logits at once."""

    def entropy(row: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(family.logits(params, row))
        return -jnp.sum(jnp.exp(logits) * logits, axis=-1)

    return jax.lax.map(entropy, hidden, batch_size=LENS_TARGETS)


def _stream(x: jax.Array, new: jax.Array, real: jax.Array) -> Sums:
    """How the residual stream [B, S, h] changes at one depth."""
    before, after = (t.reshape(real.size, -1).astype(jnp.float32) for t in (x, new))
    norms = [jnp.linalg.norm(t, axis=-1) for t in (before, after)]
    cosine = jnp.einsum("th,th->t", before, after, precision="highest") / (norms[0] * norms[1])
    distance = jnp.linalg.norm(after - before, axis=-1) / norms[0]
    # From a state of 0, as AlgoFormer with model.inject add begins with, nothing has a direction or is relatively far.
    values = {"norm": norms[1], "cosine": cosine, "distance": jnp.where(norms[0] > 0, distance, jnp.nan)}
    return {name: jnp.sum(jnp.where(real, value, 0)) for name, value in values.items()}
