"""One optimizer step, and its held-out twin: the same code on one device and on many.

Both are a shard_map over the mesh: every device computes the loss sum and gradient of its own rows, and what is
summed over the global batch (loss, gradient, expert counts) is summed explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.schema import Config
from dreamer_jax.model import Dreamer, update_balancing
from dreamer_jax.parallel.mesh import DATA
from dreamer_jax.training.loss import cross_entropy, token_losses
from dreamer_jax.training.optimizer import learning_rate, make_optimizer
from dreamer_jax.training.state import TrainState

Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]


def make_train_step(
    config: Config, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state, metrics); the state is donated.

    The batch is that of dreamer_jax.data, each entry [B, S]. Metrics, all of the global batch before the update:
    `loss` (mean over the targets that count), `gradient_norm` (before clipping), `learning_rate`, `counts`
    (router name -> [L, E] int32).
    """
    model = Dreamer(config.model, remat=config.training.remat)
    optimizer = make_optimizer(config.training)

    def loss_sum(params, balancing, batch):
        variables = {"params": params, "balancing": {"bias": balancing}}
        inputs = (batch["tokens"], batch["segment_ids"], batch["positions"])
        hidden, counts = model.apply(variables, *inputs, method="trunk")
        flat = hidden.reshape(-1, hidden.shape[-1])
        loss = cross_entropy(flat, params["head"], batch["targets"].reshape(-1), batch["loss_mask"].reshape(-1))
        return loss, counts

    def gradient(state: TrainState, batch: Batch):
        value_and_grad = jax.value_and_grad(loss_sum, has_aux=True)
        if config.training.microbatches == 1:
            return value_and_grad(state.params, state.balancing, batch)
        parts = {k: v.reshape(config.training.microbatches, -1, *v.shape[1:]) for k, v in batch.items()}

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, value_and_grad(state.params, state.balancing, part)), None

        shapes = jax.eval_shape(value_and_grad, state.params, state.balancing, {k: v[0] for k, v in parts.items()})
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(accumulate, zeros, parts)[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums = (gradient(state, batch), jnp.sum(batch["loss_mask"]))
        ((loss, counts), grads), targets = jax.lax.psum(sums, DATA)
        targets = jnp.maximum(targets, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda g: g / targets, grads)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        new_state = TrainState(
            state.step + 1,
            optax.apply_updates(state.params, updates),
            optimizer_state,
            update_balancing(state.balancing, counts, config.model),
        )
        metrics = {
            "loss": loss / targets,
            "gradient_norm": optax.global_norm(grads),
            "learning_rate": learning_rate(config.training, state.step + 1),
            "counts": counts,
        }
        return new_state, metrics

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(DATA)), out_specs=P(), check_vma=False)
    return jax.jit(sharded, donate_argnums=0)


def make_evaluation_step(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Any, Any, Batch], Metrics]:
    """The jitted evaluation of a batch: (params, balancing, batch) -> sums over it.

    Keys: `loss` and `targets` over all targets of the loss mask; `answers` and `exact`, the documents with an
    answer and those whose every answer token is the most likely one given the true tokens before it. That is
    exactly when greedy decoding from the prompt would produce the answer.
    """
    model = Dreamer(config.model)
    length = config.data.sequence_length

    def evaluate(params, balancing, batch: Batch) -> Metrics:
        variables = {"params": params, "balancing": {"bias": balancing}}
        inputs = (batch["tokens"], batch["segment_ids"], batch["positions"])
        hidden, _ = model.apply(variables, *inputs, method="trunk")
        flat = hidden.reshape(-1, hidden.shape[-1])
        losses, correct = token_losses(flat, params["head"], batch["targets"].reshape(-1))
        mask = batch["loss_mask"].reshape(-1)

        answer = batch["answer_mask"]
        wrong = answer & ~correct.reshape(answer.shape)

        def per_document(flags):  # [B, S] -> [B, S + 1], documents of a row counted from 1
            rows = jnp.arange(flags.shape[0])[:, None]
            return jnp.zeros((flags.shape[0], length + 1), jnp.int32).at[rows, batch["segment_ids"]].add(flags)

        has_answer = per_document(answer) > 0
        exact = has_answer & (per_document(wrong) == 0)
        sums = {
            "loss": jnp.sum(losses * mask),
            "targets": jnp.sum(mask),
            "answers": jnp.sum(has_answer),
            "exact": jnp.sum(exact),
        }
        return jax.lax.psum(sums, DATA)

    sharded = jax.shard_map(evaluate, mesh=mesh, in_specs=(P(), P(), P(DATA)), out_specs=P(), check_vma=False)
    return jax.jit(sharded)
