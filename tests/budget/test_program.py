"""The lowered program against the analytic count, and the counter of lowered programs against known ones."""

import dataclasses
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.budget import analytic, lowered, memory, program
from dreamer_jax.config.models.cotformer import CotformerConfig
from dreamer_jax.config.models.depth_recurrent import DepthRecurrentConfig
from dreamer_jax.config.models.dreamer import DreamerConfig, Mixing, Variant
from dreamer_jax.config.models.huginn import HuginnConfig
from dreamer_jax.config.models.ouro import OuroConfig
from dreamer_jax.config.models.ponder import PonderConfig
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import Config, TrainingConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import build, forward
from dreamer_jax.training.train_step import make_loss_and_gradient
from dreamer_jax.training.work import work_of
from pallas_kernels.depth_attention import DepthCache
from tests.families.cases import apply


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(function, *arguments) -> int:
    return lowered.matmul_flops(jax.jit(function).lower(*arguments))


@st.composite
def models(draw, variant: Variant) -> DreamerConfig:
    def size(smallest: int, largest: int, multiple: int = 1) -> int:
        return multiple * draw(st.integers(smallest, largest))

    experts = size(1, 20)
    sa_kv, da_kv = size(1, 3), size(1, 2)
    return DreamerConfig(
        variant=variant,
        mixing=draw(st.sampled_from(get_args(Mixing))),
        depth=size(1, 6),
        hidden_size=size(1, 40),
        vocab_size=size(2, 90),
        sa_heads=sa_kv * size(1, 3),
        sa_kv_heads=sa_kv,
        sa_head_size=size(1, 12, multiple=2),
        da_heads=da_kv * size(1, 3),
        da_kv_heads=da_kv,
        da_head_size=size(1, 6, multiple=4),
        num_experts=experts,
        experts_per_token=size(1, experts),
        expert_size=size(1, 24),
        router_size=size(1, 6, multiple=4),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


@pytest.mark.slow_but("LA+DA", "DR")
@pytest.mark.parametrize("variant", get_args(Variant))
@settings(max_examples=5)
@given(data=st.data())
def test_program_and_arithmetic_agree(variant: Variant, data: st.DataObject) -> None:
    model = data.draw(models(variant))
    length, rows = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    found, expected = program.count(model, length, rows), program.expected(model, length)
    assert found.parameters == expected.parameters
    assert found.flops_per_token == pytest.approx(expected.flops_per_token, rel=1e-3)


@pytest.mark.parametrize("part", ["attention_experts", "shared_expert", "residual_norm", "router_depth_code"])
def test_program_and_arithmetic_agree_without_a_part_of_section_3_7(part: str) -> None:
    sizes = {"depth": 3, "hidden_size": 24, "num_experts": 8, "expert_size": 16}
    whole, without = DreamerConfig(**sizes), DreamerConfig(**sizes, **{part: False})
    assert program.count(without, 6) == program.expected(without, 6)
    same = part in ("residual_norm", "router_depth_code")  # a norm of the stream once or at each depth is one scale
    assert (program.expected(without, 6).parameters == program.expected(whole, 6).parameters) == same


def test_program_and_arithmetic_agree_on_injection() -> None:
    """A matrix at every depth; stored once."""
    sizes = {"variant": "DR", "depth": 3, "hidden_size": 24, "num_experts": 8, "expert_size": 16}
    plain, injected = DreamerConfig(**sizes), DreamerConfig(**sizes, injection="diagonal", residual_scale="depth")
    found = program.count(injected, 6)
    assert found == program.expected(injected, 6)
    assert found.parameters - program.expected(plain, 6).parameters == 24 * 24 + 3 * 24
    assert found.flops_per_token - program.expected(plain, 6).flops_per_token == 3 * 2 * 24 * 24


def test_program_and_arithmetic_agree_on_learned_slots() -> None:
    sizes = {"depth": 3, "hidden_size": 24, "num_experts": 8, "expert_size": 16}
    model = DreamerConfig(**sizes, pa_slots=7, pa_heads=2, pa_head_size=8)
    found = program.count(model, 6)
    assert found == program.expected(model, 6)
    more = found.flops_per_token - program.expected(DreamerConfig(**sizes), 6).flops_per_token
    assert more == 3 * 4 * 2 * 8 * (24 + 7)


@pytest.mark.parametrize("variant", ["LA", "DR"])
def test_program_and_arithmetic_agree_on_texts(variant: Variant) -> None:
    """Maps in place of slots; of them keys and values are made once a pass, in LA by every layer."""
    sizes = {"variant": variant, "depth": 3, "hidden_size": 24, "num_experts": 8, "expert_size": 16}
    slots = {"pa_slots": 7, "pa_heads": 2, "pa_head_size": 8}
    latents, texts = (
        DreamerConfig(**sizes, **slots),
        DreamerConfig(**sizes, **slots, pa_source="texts", pa_embedding_size=5),
    )
    copies = 3 if variant == "LA" else 1
    for rows in (1, 2):
        found = program.count(texts, 6, rows)
        assert found == program.expected(texts, 6, rows)
        more = found.flops_per_token - program.expected(latents, 6).flops_per_token
        assert more * rows * 6 == pytest.approx(copies * 2 * 2 * 7 * 5 * 16)
    assert program.expected(latents, 6).parameters - found.parameters == copies * 2 * 16 * (7 - 5)
    family = build(texts)
    assert analytic.untrained(family) == 7 * 5 and analytic.untrained(family, folded=True) == 0
    folded = [int(analytic.total(analytic.parameters(build(its), folded=True))) for its in (texts, latents)]
    assert folded[0] == folded[1]
    held, without = (memory.training(build(its), 6, 1, "full") for its in (texts, latents))
    assert held["texts"] == 4 * 7 * 5 and "texts" not in without


@pytest.mark.parametrize("depth", [2, 5, 8, 11])
def test_turns_are_those_of_the_depths_that_a_step_goes_to(depth: int) -> None:
    """One turn in two depths and two in five, not a quarter of them."""
    sizes = {"hidden_size": 24, "sa_heads": 2, "sa_kv_heads": 1, "num_experts": 8, "expert_size": 16, "vocab_size": 50}
    model = DreamerConfig(variant="DR", depth=8, sa_every=4, pa_slots=5, pa_every=2, **sizes)
    family = build(model, program.COUNTING)
    params, state = nn.meta.unbox(family.shapes)

    def logits(params, state, tokens):
        passed = forward(family, params, state, {"tokens": tokens}, depth)
        return family.logits(params, family.readout(params, passed.state, passed.memory, passed.context)[0])

    found = flops(logits, params, state, jax.ShapeDtypeStruct((6, 1), jnp.int32)) / 6
    whole, last = (analytic.Work(1.0, depth, its) for its in (depth, 1))
    assert analytic.training_flops(family, 1, [whole])[0] == pytest.approx(3 * found, rel=1e-9)
    attention = next(share for share in family.blocks() if share.part == "SA")
    assert analytic.applied(family, attention, last)[1] == (depth == 5)  # of 2, 5, 8 and 11 it is the last of 5 alone


def test_program_and_arithmetic_agree_on_learned_depths() -> None:
    sizes = {"depth": 3, "hidden_size": 24, "num_experts": 8, "expert_size": 16, "depth_counters": "learned"}
    for variant in ("DR", "DR+DA"):
        model = DreamerConfig(variant=variant, **sizes)
        assert program.count(model, 6) == program.expected(model, 6)


@pytest.mark.parametrize("variant", ["LA", "DR+DA"])
def test_the_count_is_the_same_over_a_mesh(variant: Variant) -> None:
    model = DreamerConfig(variant=variant, depth=3, hidden_size=24, num_experts=8, expert_size=16)
    assert program.count(model, 6, batch=8, devices=8) == program.count(model, 6) == program.expected(model, 6)
    with pytest.raises(UserError, match="3 rows can't be spread over 8 devices"):
        program.count(model, 6, batch=3, devices=8)


def test_the_paper_scale_model_is_counted_without_allocating_it() -> None:
    model = DreamerConfig(
        variant="DR+DA", depth=32, hidden_size=1024, vocab_size=128256, sa_heads=16, sa_kv_heads=8, sa_head_size=128,
        da_head_size=128, num_experts=1097, experts_per_token=8, expert_size=472, router_size=128,
    )  # fmt: skip
    assert program.count(model, 64) == program.expected(model, 64)


def test_the_counted_operations_compute_what_the_shipped_ones_do() -> None:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32)

    documents = np.array([[1, 1, 1, 2, 2, 2, 2]] * 2)
    choices = np.array([[0, 3], [3, 1], [2, 0], [1, 2], [3, 2]])
    arguments = {
        "sequence_attention": (normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8), documents),
        "depth_attention": (
            *(normal(5, heads, 8) for heads in (4, 2, 2)),
            DepthCache(normal(3, 5, 16), normal(3, 5, 16)),
            np.int32(1),
        ),
        "expert_mlp": (normal(5, 8), choices, normal(5, 2), normal(4, 12, 8), normal(4, 6, 8)),
        "expert_linear": (normal(5, 8), choices[:, 0], normal(5), normal(4, 8, 6), normal(8, 6)),
    }
    for name, values in arguments.items():
        both = (program.COUNTING, operations_of("xla"))
        counted, shipped = (jax.jit(getattr(operations, name))(*values) for operations in both)
        for ours, theirs in zip(jax.tree.leaves(counted), jax.tree.leaves(shipped), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_gradient_takes_the_factors_of_the_training_count(remat: str) -> None:
    model = DreamerConfig(variant="LA", depth=3, hidden_size=24, num_experts=8, expert_size=16, dtype="float32")
    tokens = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    params, state = nn.meta.unbox(build(model).shapes)

    def loss(params, bias, tokens):
        output = apply(model, params, bias, tokens, remat=remat, operations=program.COUNTING)
        return jnp.sum(output.logits**2)

    step = flops(jax.grad(loss), params, state["balancing"], tokens) / 6
    forward = analytic.matmul_flops(build(model), context=6)
    again = analytic.total(forward) - forward["head"] if remat == "full" else 0
    assert step == pytest.approx(3 * analytic.total(forward) + again, rel=1e-3)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "model",
    [
        HuginnConfig(depth=3, gradient_recurrences=3, hidden_size=24, heads=2, kv_heads=2, head_size=8, mlp_size=40),
        CotformerConfig(depth=3, middle_layers=2, hidden_size=24, heads=2, mlp_size=40),
        PonderConfig(depth=3, layers=2, hidden_size=24, heads=2, kv_heads=2, head_size=8, mlp_size=40),
    ],
    ids=lambda model: model.family,
)
def test_what_the_gradient_computes_again(model: Any, remat: Any) -> None:
    """Layers before and after the recurrence, and a pondering's logits, whatever the policy is."""
    family = build(dataclasses.replace(model, vocab_size=50, dtype="float32"), program.COUNTING)
    params, state = nn.meta.unbox(family.shapes)

    def loss(params, tokens):
        passed = forward(family, params, state, {"tokens": tokens}, None, remat)
        hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
        return jnp.sum(family.logits(params, hidden) ** 2)

    step = flops(jax.grad(loss), params, jax.ShapeDtypeStruct((6, 1), jnp.int32)) / 6
    assert step == pytest.approx(analytic.executed_training_flops(family, 1, remat == "full")[0], rel=0.02)


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
def test_what_a_larger_vocabulary_costs_a_pondering_model(remat: Any) -> None:
    """A thought is kept under remat "attention" too."""

    def counted(vocabulary: int) -> tuple[float, float]:
        sizes = {"hidden_size": 24, "heads": 2, "kv_heads": 2, "head_size": 8, "mlp_size": 40, "dtype": "float32"}
        family = build(PonderConfig(depth=3, layers=1, vocab_size=vocabulary, **sizes), program.COUNTING)
        params, state = nn.meta.unbox(family.shapes)

        def loss(params, tokens):
            passed = forward(family, params, state, {"tokens": tokens}, None, remat)
            return jnp.sum(family.logits(params, passed.state.h) ** 2)

        step = flops(jax.grad(loss), params, jax.ShapeDtypeStruct((6, 1), jnp.int32)) / 6
        return step, analytic.executed_training_flops(family, 1, remat == "full")[0]

    (less, expected_less), (more, expected_more) = counted(50), counted(80)
    assert more - less == expected_more - expected_less


@pytest.mark.parametrize("scored", [1, 3])
def test_what_losses_before_the_last_compute_again(scored: int) -> None:
    """The coda and the head."""
    sizes = {"hidden_size": 24, "heads": 2, "kv_heads": 2, "head_size": 8, "mlp_size": 40, "vocab_size": 50}
    model = HuginnConfig(depth=3, coda_layers=2, dtype="float32", **sizes)
    recurrence = RecurrenceConfig(draw="fixed", scored=scored)
    training = TrainingConfig(steps=10, batch_size=6, remat="none")
    config = Config(model=model, recurrence=recurrence, training=training)
    family = build(model, program.COUNTING)
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    batch = {name: jax.ShapeDtypeStruct((6, 1), jnp.int32) for name in names}
    params, state = nn.meta.unbox(family.shapes)
    step = flops(make_loss_and_gradient(config, family), params, state, batch, jax.ShapeDtypeStruct((), jnp.int32)) / 6
    assert step == pytest.approx(analytic.executed_training_flops(family, 1, False, work_of(config))[0], rel=0.02)


@pytest.mark.parametrize("loss_at", ["last", "every"])
def test_a_classifier_reads_as_many_states_as_the_loss(loss_at: Any) -> None:
    """Rows of two tokens, of which both are read."""
    sizes = {"hidden_size": 24, "heads": 2, "mlp_size": 10, "vocab_size": 5, "depth_min": 4, "depth": 4}
    model = DepthRecurrentConfig(loss_at=loss_at, readout="pair", dtype="float32", **sizes)
    family = build(model, program.COUNTING)
    params, state = nn.meta.unbox(family.shapes)

    def loss(params, tokens):
        batch = {"tokens": tokens, "targets": tokens, "loss_mask": jnp.ones(tokens.shape, bool)}
        batch["read"] = jnp.broadcast_to(jnp.arange(2), tokens.shape)
        return family.loss(params, forward(family, params, state, batch, None, "none"), batch)[0]

    step = flops(jax.grad(loss), params, jax.ShapeDtypeStruct((6, 2), jnp.int32)) / 12
    assert step == pytest.approx(analytic.executed_training_flops(family, 2, False)[0], rel=0.01)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_frozen_model_has_no_backward_pass(remat: Any) -> None:
    """Ouro's second stage reads every loop and teaches the gate alone."""
    sizes = {"hidden_size": 24, "heads": 2, "kv_heads": 2, "head_size": 8, "mlp_size": 40, "vocab_size": 50}
    family = build(OuroConfig(depth=3, stage=2, dtype="float32", **sizes), program.COUNTING)
    params, state = nn.meta.unbox(family.shapes)

    def loss(params, tokens):
        batch = {"tokens": tokens, "targets": tokens, "loss_mask": jnp.ones(tokens.shape)}
        return family.loss(params, forward(family, params, state, batch, None, remat), batch)[0]

    step = flops(jax.grad(loss), params, jax.ShapeDtypeStruct((6, 1), jnp.int32)) / 6
    heads = 2 * 24 * 50 * 2  # beyond that of the last loop
    assert step == pytest.approx(analytic.total(analytic.matmul_flops(family, 1)) + heads, rel=1e-3)
    assert step == pytest.approx(analytic.executed_training_flops(family, 1, remat == "full")[0], rel=1e-3)


def test_products_of_any_shape() -> None:
    assert flops(lambda a, b: a @ b, array(3, 5), array(5, 7)) == 2 * 3 * 5 * 7
    batched = flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), array(2, 3, 5), array(2, 5, 7))
    assert batched == 2 * 2 * 3 * 5 * 7
    assert flops(lambda a, b: jnp.einsum("bij,bij->b", a, b), array(2, 3, 5), array(2, 3, 5)) == 2 * 2 * 3 * 5
    assert flops(lambda a: jnp.tanh(a) + 1, array(3, 5)) == 0


def test_loops_are_multiplied_and_nested_loops_too() -> None:
    def inner(c):
        return jax.lax.fori_loop(2, 9, lambda i, c: c @ c, c)

    def outer(c):
        return jax.lax.scan(lambda c, _: (inner(c), None), c, None, length=5)[0]

    assert flops(outer, array(4, 4)) == 5 * 7 * 2 * 4**3
    assert flops(lambda c: jax.lax.fori_loop(0, 0, lambda i, c: c @ c, c), array(4, 4)) == 0


def test_a_limit_carried_by_the_loop_is_found() -> None:
    def function(c):
        return jax.lax.fori_loop(0, jnp.asarray(6), lambda i, c: c @ c, c)

    assert flops(jax.jit(function), array(4, 4)) == 6 * 2 * 4**3


def test_a_trip_count_known_only_at_run_time_is_refused() -> None:
    def function(c, n):
        return jax.lax.fori_loop(0, n, lambda i, c: c @ c, c)

    with pytest.raises(ValueError, match="depends on an input"):
        flops(function, array(4, 4), jax.ShapeDtypeStruct((), jnp.int32))

    def until_small(c):
        return jax.lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c @ c, c)

    with pytest.raises(ValueError, match="count"):
        flops(until_small, array(4, 4))


def test_a_function_called_twice_counts_twice_and_of_branches_the_dearest() -> None:
    called = jax.jit(lambda c: c @ c)
    assert flops(lambda c: called(called(c)), array(4, 4)) == 2 * 2 * 4**3

    def branches(c, which):
        return jax.lax.cond(which, lambda c: c @ c @ c, lambda c: c @ c, c)

    assert flops(branches, array(4, 4), jax.ShapeDtypeStruct((), jnp.bool_)) == 2 * 2 * 4**3


def test_a_region_per_device_counts_once_a_device() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))

    def on_mesh(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def function(a, b):
        spec = PartitionSpec("data")
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(a, b)

    traced = jax.jit(function).trace(on_mesh((8, 3), "data"), on_mesh((3, 5)))
    both_axes = lowered.matmul_flops(traced.lower(lowering_platforms=("cpu",)))
    assert both_axes == 2 * (2 * 8 * 3 * 5)  # the devices along "model" all do the same


def test_an_unknown_product_is_refused() -> None:
    def convolve(image, kernel):
        return jax.lax.conv(image, kernel, (1, 1), "SAME")

    with pytest.raises(ValueError, match="convolution"):
        flops(convolve, array(1, 3, 8, 8), array(4, 3, 3, 3))
