"""One optimizer step, and its held-out twin: the same code on one device and on a pod.

Both are a shard_map over the mesh. Parameters, divided over all devices between steps, are cast and gathered once,
one torus axis after the other; every device computes the loss sum and gradient of its own rows, in microbatches; the
gradient is scattered once the same way back, and each device updates its part. What is summed over the global batch
(loss, expert counts) is summed explicitly. Nothing travels inside the loops but expert parallelism's exchange.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.sections import Config
from dreamer_jax.model import Dreamer, update_balancing
from dreamer_jax.model.operations import Operations, resolve_operations
from dreamer_jax.parallel.expert_parallel import exchanged_experts, gathered_experts
from dreamer_jax.parallel.gather import gather, scatter, squared_norm, sum_over
from dreamer_jax.parallel.layout import parameter_layouts
from dreamer_jax.parallel.mesh import EXPERT, batch_spec
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training.loss import cross_entropy, token_losses
from dreamer_jax.training.optimizer import learning_rate, make_optimizer
from dreamer_jax.training.state import state_specs

Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]


def make_train_step(config: Config, mesh: Mesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state, metrics); the state is donated.

    The batch is that of dreamer_jax.data, each entry [B, S]. Metrics, all of the global batch before the update:
    `loss` (mean over the targets that count), `gradient_norm` (before clipping), `learning_rate`, `counts`
    (router name -> [L, E] int32), and `skipped` (int32): 1 where loss or gradient norm isn't finite; such a step
    changes nothing of the state but `step`.
    """
    layouts = parameter_layouts(config.model, mesh)
    optimizer = make_optimizer(config.training)
    loss_and_gradient = make_loss_and_gradient(config, mesh)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = gather(state.params, layouts, jnp.dtype(config.model.dtype))
        (loss, counts), gradients = loss_and_gradient(weights, state.balancing, batch)
        loss, counts, targets = sum_over(mesh, (loss, counts, jnp.sum(batch["loss_mask"])))
        targets = jnp.maximum(targets, 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda g: g / targets, scatter(gradients, layouts, mesh))
        norm = jnp.sqrt(squared_norm(gradients, layouts, mesh))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params, gradient_norm=norm)
        balancing = update_balancing(state.balancing, counts, config.model)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        before = (state.params, state.optimizer, state.balancing)
        after = (optax.apply_updates(state.params, updates), optimizer_state, balancing)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        metrics = {
            "loss": loss / targets,
            "gradient_norm": norm,
            "learning_rate": learning_rate(config.training, state.step + 1),
            "counts": counts,
            "skipped": 1 - finite.astype(jnp.int32),
        }
        return TrainState(state.step + 1, *kept), metrics

    specs = state_specs(config, mesh)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, batch_spec(mesh)), out_specs=(specs, P()), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=0)


def make_loss_and_gradient(config: Config, mesh: Mesh) -> Callable[..., Any]:
    """(weights, balancing, batch) -> ((loss sum, counts), gradients), of one device's rows; inside a shard_map.

    Weights are what `gather` returned; gradients have their shapes and are float32, summed in float32 over depths and
    microbatches.
    """
    model = Dreamer(config.model, operations=_operations(config, mesh), remat=config.training.remat)

    def loss_sum(params, balancing, batch):
        variables = {"params": params, "balancing": {"bias": balancing}}
        inputs = (batch["tokens"], batch["segment_ids"], batch["positions"])
        hidden, counts = model.apply(variables, *inputs, method="trunk")
        flat = hidden.reshape(-1, hidden.shape[-1])
        loss = cross_entropy(flat, params["head"], batch["targets"].reshape(-1), batch["loss_mask"].reshape(-1))
        return loss, counts

    def of_part(weights, balancing, batch):
        # Differentiated as float32, so that gradients are. The model casts back at once: nothing of it is computed.
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
        return jax.value_and_grad(loss_sum, has_aux=True)(wide, balancing, batch)

    def of_batch(weights, balancing, batch):
        if config.training.microbatches == 1:
            return of_part(weights, balancing, batch)
        parts = {k: v.reshape(config.training.microbatches, -1, *v.shape[1:]) for k, v in batch.items()}

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, of_part(weights, balancing, part)), None

        shapes = jax.eval_shape(of_part, weights, balancing, {k: v[0] for k, v in parts.items()})
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(accumulate, zeros, parts)[0]

    return of_batch


def _operations(config: Config, mesh: Mesh) -> Operations:
    operations = resolve_operations(config.model.implementation)
    depths = config.training.gradient_depths
    expert_tape = functools.partial(operations.expert_tape, depths=depths, total=config.model.depth)
    operations = dataclasses.replace(operations, expert_tape=expert_tape)
    if mesh.shape[EXPERT] == 1:
        return operations
    group = mesh.shape[EXPERT]

    def tape_of_group(indices, gate_up, dtype):
        return expert_tape((indices[0] * group, indices[1]), gate_up, dtype)

    exchange = {"gather": gathered_experts, "ragged": exchanged_experts}[config.mesh.exchange]
    experts = exchange(operations.expert_mlp, EXPERT)
    return dataclasses.replace(operations, expert_mlp=experts, expert_tape=tape_of_group)


def make_evaluation_step(config: Config, mesh: Mesh) -> Callable[[Any, Any, Batch], Metrics]:
    """The jitted evaluation of a batch: (params, balancing, batch) -> sums over it.

    Keys: `loss` and `targets` over all targets of the loss mask; `answers` and `exact`, the documents with an
    answer and those whose every answer token is the most likely one given the true tokens before it. That is
    exactly when greedy decoding from the prompt would produce the answer.
    """
    model = Dreamer(config.model, operations=_operations(config, mesh))
    layouts = parameter_layouts(config.model, mesh)
    length = config.data.sequence_length

    def evaluate(params, balancing, batch: Batch) -> Metrics:
        params = gather(params, layouts, jnp.dtype(config.model.dtype))
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
        return sum_over(mesh, sums)

    specs = jax.tree.map(lambda layout: layout.spec, layouts)
    sharded = jax.shard_map(
        evaluate, mesh=mesh, in_specs=(specs, P(), batch_spec(mesh)), out_specs=P(), check_vma=False
    )
    return jax.jit(sharded)
