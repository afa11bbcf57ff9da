"""One optimizer step, and its held-out twin, of any family: the same code on one device and on a pod.

Both are a shard_map over the mesh. Parameters, divided over all devices between steps, are cast and gathered once,
one torus axis after the other; every device computes the loss sum and gradient of its own rows, in microbatches; the
gradient is scattered once the same way back, and each device updates its part. What is summed over the global batch
(loss, counts) is summed explicitly. Nothing travels inside the loops but expert parallelism's exchange, and what
training.scatter and training.balance put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.config.sections import Config
from dreamer_jax.families import Drawn, Family, build, forward
from dreamer_jax.parallel.expert_parallel import parallel_operations
from dreamer_jax.parallel.gather import gather, means, scatter, squared_norm, sum_over
from dreamer_jax.parallel.layout import parameter_layouts
from dreamer_jax.parallel.mesh import EXPERT, batch_spec
from dreamer_jax.runs.state import TrainState
from dreamer_jax.training import depths
from dreamer_jax.training.optimizer import make_optimizer, next_learning_rate, routing_rests, trained_leaves
from dreamer_jax.training.penalties import check_likeness, likeness
from dreamer_jax.training.state import state_specs

Batch = Mapping[str, jax.Array]
Metrics = dict[str, Any]


def make_train_step(config: Config, mesh: Mesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state, metrics); the state is donated.

    The batch is that of dreamer_jax.data, each entry [B, S]. Metrics, all of the global batch before the update:
    `loss` (mean over the targets that count), `gradient_norm` (of what is trained, before clipping), `learning_rate`,
    `counts` (what the family's steps counted, by depth), what else its loss says, and `skipped` (int32): 1 where loss
    or gradient norm isn't finite; such a step changes nothing of the state but `step`.
    """
    family = family_on(config, mesh)
    layouts = parameter_layouts(family.boxed, mesh)
    optimizer = make_optimizer(config.training, family.roles, lambda tree: means(tree, layouts, mesh))
    each = config.training.scatter == "microbatch"

    def divided(gradients: Any) -> Any:
        return scatter(gradients, layouts, mesh, config.training.scatter_dtype)

    trained = trained_leaves(config.training, family.roles)
    balances = not routing_rests(trained, family.roles)

    def updated(model_state: Any, counts: Any, step: jax.Array) -> Any:
        return family.update(model_state, counts, step) if balances else model_state

    def balanced(model_state: Any, counts: Any, step: jax.Array) -> Any:
        return updated(model_state, sum_over(mesh, counts), step)

    at_once = config.training.balance == "microbatch"
    smooth = None
    if config.recurrence.jacobian:
        smooth = family_on(replace(config, model=replace(config.model, implementation="xla")), mesh)
    loss_and_gradient = make_loss_and_gradient(
        config, family, divided if each else None, balanced if at_once else None, smooth
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = gather(state.params, layouts, family.cast)
        numbered = {**batch, "rows": _numbers(batch, mesh)}
        sums, gradients, model_state = loss_and_gradient(weights, state.model_state, numbered, state.step)
        (loss, (counts, logged)), targets = sums, jnp.sum(batch["loss_mask"])
        loss, counts, logged, targets = sum_over(mesh, (loss, counts, logged, targets))
        targets = jnp.maximum(targets, 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda g: g / targets, gradients if each else divided(gradients))
        if config.training.trainable:
            gradients = jax.tree.map(lambda g, is_trained: g * is_trained, gradients, trained)
        norm = jnp.sqrt(squared_norm(gradients, layouts, mesh))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params, gradient_norm=norm)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        before = (state.params, state.optimizer, state.model_state)
        after = (
            optax.apply_updates(state.params, updates),
            optimizer_state,
            model_state if at_once else updated(model_state, counts, state.step),
        )
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        metrics = {
            "loss": loss / targets,
            "gradient_norm": norm,
            "learning_rate": next_learning_rate(config.training, state.optimizer),
            "counts": counts,
            "skipped": 1 - finite.astype(jnp.int32),
            **{name: value / targets for name, value in logged.items()},
        }
        return TrainState(state.step + 1, *kept), metrics

    specs = state_specs(config, mesh)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, batch_spec(mesh)), out_specs=(specs, P()), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=0)


def make_loss_and_gradient(
    config: Config,
    family: Family,
    divided: Callable[[Any], Any] | None = None,
    balanced: Callable[[Any, Any, jax.Array], Any] | None = None,
    smooth: Family | None = None,
) -> Callable[..., Any]:
    """(weights, model state, batch, step) -> ((loss sum, (counts, logged sums)), gradients, model state), of one
    device's rows; inside a shard_map.

    Weights are what `gather` returned; gradients have their shapes and are float32, summed in float32 over depths and
    microbatches. With `divided` each microbatch's gradients pass through it before they are added. With `balanced`
    (model state, counts, step) -> model state is applied after each microbatch; without it the model state stays.
    `smooth` is the model without kernels, see `depths.loss`.
    """

    def loss_sum(params, model_state, batch, step):
        key = jax.random.fold_in(jax.random.key(config.run.seed), step)
        own = jax.random.fold_in(key, 1) if family.flags.random else None
        rows = batch.get("rows", jnp.arange(len(batch["tokens"])))
        drawn = depths.draw(config.recurrence, family, key, step, rows)
        if config.mesh.expert > 1:
            drawn = depths.as_deep_together(drawn, EXPERT)
        kept = depths.kept_states(config.recurrence, family)
        passed = forward(family, params, model_state, batch, drawn, config.training.remat, own, kept_states=kept)
        keys = None
        if smooth is not None:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 2), batch["rows"])
        loss, logged = depths.loss(config.recurrence, family, params, passed, batch, keys, smooth)
        if config.training.looping:
            alike, targets = likeness(family, params, config.training.looping_layers), jnp.sum(batch["loss_mask"])
            loss, logged = (
                loss + config.training.looping * targets * (1 - alike),
                {"last_loss": loss, **logged, "likeness": targets * alike},
            )
        return loss, (passed.counts, logged)

    def of_rows(weights, *rest):
        # Differentiated as float32, so that gradients are. The model casts back at once: nothing of it is computed.
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
        sums, gradients = jax.value_and_grad(loss_sum, has_aux=True)(wide, *rest)
        return sums, divided(gradients) if divided else gradients

    def after(model_state, sums, step):
        return balanced(model_state, sums[1][0], step) if balanced else model_state

    def of_batch(weights, model_state, batch, step):
        if config.training.microbatches == 1:
            sums, gradients = of_rows(weights, model_state, batch, step)
            return sums, gradients, after(model_state, sums, step)
        split = {k: v.reshape(config.training.microbatches, -1, *v.shape[1:]) for k, v in batch.items()}

        def accumulate(carry, rows):
            total, model_state = carry
            found = of_rows(weights, model_state, rows, step)
            return (jax.tree.map(jnp.add, total, found), after(model_state, found[0], step)), None

        shapes = jax.eval_shape(of_rows, weights, model_state, {k: v[0] for k, v in split.items()}, step)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        ((sums, gradients), model_state), _ = jax.lax.scan(accumulate, (zeros, model_state), split)
        return sums, gradients, model_state

    return of_batch


def _numbers(batch: Batch, mesh: Mesh) -> jax.Array:
    """[B] of this device's rows in the global batch."""
    count = batch["tokens"].shape[0]
    return jax.lax.axis_index(mesh.axis_names) * count + jnp.arange(count)


def family_on(config: Config, mesh: Mesh) -> Family:
    """The model of a configuration, with the operations of a train step on a mesh."""
    plain = build(config.model)
    depths.check(config.recurrence, plain)
    check_likeness(config, plain)
    deepest = max(plain.depth, depths.deepest(config.recurrence, plain))
    training = config.training
    operations = operations_of(
        config.model.implementation, training.gradient_depths, deepest, recompute=training.remat == "attention"
    )
    return build(config.model, parallel_operations(operations, config.mesh.exchange, mesh.shape[EXPERT]))


def make_evaluation_step(config: Config, mesh: Mesh, deepest: int | None = None) -> Callable[..., Metrics]:
    """The jitted evaluation of a batch: (params, model state, batch) -> sums over each row of the whole batch [B].

    With `deepest` it takes the depth as well, a number at run time up to that: (params, model state, batch, depth). One
    program then serves all depths. It makes a pass for each: where a step knows how many are left, what a pass has come
    to at some depth isn't what a pass of that depth comes to.

    Keys: `loss` and `targets` over all targets of the loss mask; `answers` and `exact`, the documents with an
    answer and those whose every answer token is the most likely one given the true tokens before it. That is
    exactly when greedy decoding from the prompt would produce the answer.
    """
    family = family_on(config, mesh)
    layouts = parameter_layouts(family.boxed, mesh)
    length = config.data.places

    def evaluate(params, model_state, batch: Batch, *depth: jax.Array) -> Metrics:
        params = gather(params, layouts, family.cast)
        drawn = Drawn(depth[0], deepest) if deepest is not None else None
        losses, correct = family.evaluate(params, forward(family, params, model_state, batch, drawn), batch)
        mask, answer = batch["loss_mask"], batch["answer_mask"]
        wrong = answer & ~correct

        def per_document(flags):  # [B, S] -> [B, S + 1], documents of a row counted from 1
            rows = jnp.arange(flags.shape[0])[:, None]
            return jnp.zeros((flags.shape[0], length + 1), jnp.int32).at[rows, batch["segment_ids"]].add(flags)

        has_answer = per_document(answer) > 0
        exact = has_answer & (per_document(wrong) == 0)
        rows = {"loss": losses.reshape(mask.shape) * mask, "targets": mask, "answers": has_answer, "exact": exact}
        return sum_over(mesh, {name: in_place(jnp.sum(its, axis=1), batch) for name, its in rows.items()})

    def in_place(own, batch: Batch):  # [B of this device] -> [B of all], zero where others have theirs
        return jnp.zeros(mesh.size * len(own), own.dtype).at[_numbers(batch, mesh)].set(own)

    specs = jax.tree.map(lambda layout: layout.spec, layouts)
    depth = () if deepest is None else (P(),)
    sharded = jax.shard_map(
        evaluate, mesh=mesh, in_specs=(specs, P(), batch_spec(mesh), *depth), out_specs=P(), check_vma=False
    )
    return jax.jit(sharded)
