"""What a user with an NVIDIA GPU gets by default, lowered for one on a machine without: our kernels, or cuDNN."""

import contextlib
import dataclasses
import importlib.util
import re
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from dreamer_jax.benchmarks.kernels import kernel_cases
from dreamer_jax.blocks.operations import in_int8, operations_of
from dreamer_jax.families import build, initialise
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.parallel.mesh import make_mesh
from dreamer_jax.training.state import abstract_state
from dreamer_jax.training.train_step import make_train_step
from pallas_kernels.depth_attention import DepthCache
from pallas_kernels.expert_mlp import reference
from pallas_kernels.weights import OutputRows
from tests.families.cases import TINY_MODELS
from tests.training.cases import random_batch, tiny_config


@pytest.fixture(autouse=True)
def gpu():
    """The platform, and cuDNN with its flash attention, pretended: jax asks for both when it traces."""
    named = contextlib.nullcontext()
    if importlib.util.find_spec("jax._src.pallas.triton.gpu_info"):  # from jax 0.11 on the lowering asks for its name
        hopper = types.SimpleNamespace(compute_capability=90)
        named = mock.patch("jax._src.pallas.triton.gpu_info.get_gpu_info", lambda: hopper)
    with (
        mock.patch("jax.default_backend", lambda: "gpu"),
        named,
        mock.patch.object(cudnn, "check_cudnn_version", lambda: 91002),
        mock.patch.object(cudnn, "check_compute_capability", lambda capability: True),
        mock.patch.object(cudnn, "is_cuda_compute_capability_equal", lambda capability: False),
    ):
        yield


def shape(*sizes, dtype=jnp.bfloat16):
    """An argument."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(function, *arguments) -> str:
    """StableHLO for CUDA."""
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> set[str]:
    """The custom calls in it."""
    return set(re.findall(r"custom_call @([\w$.]+)", text))


def with_gradient(operation):
    """Jitted: (integers, *floats) -> value and gradients in all floats."""

    def run(integers, *floats):
        value, vjp = jax.vjp(lambda *floats: operation(integers, *floats), *floats)
        return value, vjp(value)

    return jax.jit(run)


TRITON = {"__gpu$xla.gpu.triton"}
CUDNN = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}


@pytest.mark.parametrize(
    ("length", "size", "dtype", "taken"),
    [
        (256, 128, jnp.bfloat16, TRITON),
        (250, 128, jnp.bfloat16, CUDNN),
        (256, 128, jnp.float32, set()),
        (255, 128, jnp.bfloat16, set()),
    ],
)
def test_sequence_attention(length, size, dtype, taken):
    """Our kernels, or else cuDNN, forward and backward, where they take the shape and dtype, XLA otherwise."""
    q, kv = (shape(2, length, heads, size, dtype=dtype) for heads in (4, 2))
    operation = with_gradient(lambda ids, q, k, v: operations_of().sequence_attention(q, k, v, ids))
    assert calls(lowered(operation, shape(2, length, dtype=jnp.int32), q, kv, kv)) == taken


@pytest.mark.parametrize(("implementation", "taken"), [("auto", TRITON), ("xla", set())])
def test_depth_attention_and_linear_experts(implementation, taken):
    """Our kernels, or XLA's operations only; nothing is interpreted."""
    operations, tokens = operations_of(implementation), 64
    cache = DepthCache(shape(4, tokens, 256), shape(4, tokens, 256))  # type: ignore[arg-type]
    attend = jax.jit(lambda depth, q, k, v, cache: operations.depth_attention(q, k, v, cache, depth))
    rows = [shape(tokens, heads, 128) for heads in (4, 2, 2)]
    assert calls(lowered(attend, shape(dtype=jnp.int32), *rows, cache)) == taken

    linear = with_gradient(lambda index, x, *rest: operations.expert_linear(x, index, *rest))
    index, score = (shape(tokens, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    assert calls(lowered(linear, index, shape(tokens, 128), score, shape(6, 128, 256), shape(128, 256))) == taken


@pytest.mark.parametrize("of", [(), (4,)])
def test_matrices_whose_outputs_are_rows(of):
    """As decoding has those of a feed-forward network that every depth has of its own: the kernel for few rows takes
    others, so they are XLA's."""
    linear = jax.jit(operations_of().expert_linear)
    text = lowered(linear, shape(4, 64), shape(*of, dtype=jnp.int32), None, OutputRows(shape(2, 96, 64)))
    assert calls(text) == set()


@pytest.mark.parametrize(
    ("operation", "dense", "taken"),
    [
        (lambda *a: operations_of().expert_mlp(*a), False, TRITON),
        (lambda *a: operations_of("xla").expert_mlp(*a), False, set()),
        (reference.expert_mlp, True, set()),
    ],
)
def test_experts_are_not_made_dense(operation, dense, taken):
    """Forward and gradient hold no expert's matrix for every token or choice; the definition does."""
    tokens, choices, experts, size, hidden = 512, 3, 6, 24, 128
    mlp = with_gradient(lambda indices, x, *rest: operation(x, indices, *rest))
    matrices = shape(experts, 2 * size, hidden), shape(experts, size, hidden)
    chosen, weights = (shape(tokens, choices, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    text = lowered(mlp, chosen, shape(tokens, hidden), weights, *matrices)
    assert calls(text) == taken
    every = rf"({tokens}x{choices}|{tokens * choices}|{tokens}|{tokens}x{experts})"
    assert bool(re.search(rf"tensor<{every}x({size}|{2 * size})x{hidden}x(bf16|f32)>", text)) == dense


@pytest.mark.slow
def test_what_bench_kernels_measures():
    """Every case traces, and ours and XLA's grouped products have the same results' shapes."""
    for case in kernel_cases(platform="gpu"):
        arguments = *jax.eval_shape(case.arguments, jax.random.key(0)), shape(dtype=jnp.int32)
        ours, theirs = (jax.eval_shape(function, *arguments) for function in (case.kernel, case.xla))
        if case.name.startswith("expert"):
            assert jax.tree.map(lambda a: a.shape, ours) == jax.tree.map(lambda a: a.shape, theirs), case.name


@pytest.mark.parametrize(("tokens", "kernels"), [(2, ["few_swiglu", "few_product"]), (512, ["expert_product"])])
def test_experts_of_few_tokens(tokens, kernels):
    """A step of decoding takes its rows one by one, and sorts nothing; a prompt's are sorted into blocks."""
    experts, size, hidden = 40, 32, 64
    linear = jax.jit(lambda index, x, routed: operations_of().expert_linear(x, index, None, routed))
    one_for_all = shape(dtype=jnp.int32)
    mlp = jax.jit(lambda *a: operations_of().expert_mlp(*a))
    chosen, weights = (shape(tokens, 4, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    matrices = shape(experts, 2 * size, hidden), shape(experts, size, hidden)
    text = lowered(mlp, shape(tokens, hidden), chosen, weights, *matrices)
    assert [name for name in ("few_swiglu", "few_product", "expert_product") if name in text] == kernels
    assert ("stablehlo.sort" in text) == (tokens > 2)
    for index in (one_for_all, shape(tokens, dtype=jnp.int32)):
        text = lowered(linear, index, shape(tokens, hidden), shape(experts, hidden, size))
        assert "few_product" in text and "stablehlo.sort" not in text


def test_experts_in_int8():
    """A step of decoding reads the whole numbers; for a prompt they become matrices again."""
    experts, size, hidden = 40, 32, 64
    operations = in_int8(operations_of())
    matrices = shape(experts, 2 * size, hidden), shape(experts, size, hidden)
    kept = jax.eval_shape(operations.expert_mlp.arrange, *matrices)
    routed = jax.eval_shape(operations.expert_linear.arrange, matrices[1])
    assert {leaf.dtype for leaf in jax.tree.leaves((kept, routed))} == {jnp.dtype("int8"), jnp.dtype("float32")}
    mlp = jax.jit(lambda *a: operations.expert_mlp(*a))
    linear = jax.jit(lambda index, x, routed: operations.expert_linear(x, index, None, routed))
    for tokens, kernels in ((2, {"few_swiglu", "few_product"}), (2048, {"expert_product"})):
        chosen, weights = (shape(tokens, 4, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
        texts = (
            lowered(mlp, shape(tokens, hidden), chosen, weights, *kept),
            lowered(linear, shape(tokens, dtype=jnp.int32), shape(tokens, size), routed),
        )
        names = [{name for name in ("few_swiglu", "few_product", "expert_product") if name in text} for text in texts]
        assert names == [kernels, kernels - {"few_swiglu"}]
    alone = operations_of("xla")
    assert jax.eval_shape(in_int8(alone).expert_linear.arrange, matrices[1]).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("queries", "implementation", "taken"), [(1, "auto", TRITON), (1, "xla", set()), (2, "auto", set())]
)
def test_attention_over_slots(queries, implementation, taken):
    """One position a row has a kernel; several go the plain way."""
    attend = jax.jit(lambda *a: operations_of(implementation).sequence_attention.over_slots(*a))
    keys = shape(3, 2, 64, 2, 16)
    text = lowered(
        attend, shape(2, queries, 4, 16), keys, keys, shape(dtype=jnp.int32), shape(2, queries, dtype=jnp.int32)
    )
    assert calls(text) == taken


SHARINGS = ("cycle", "sequence", "middle_cycle", "middle_sequence")
DECODING = {
    **{name: model for name, model in TINY_MODELS.items() if build(model).flags.generates},
    **{f"recursive {each}": dataclasses.replace(TINY_MODELS["recursive"], layers=3, sharing=each) for each in SHARINGS},
}


@pytest.mark.slow_but("middle_cycle", "dreamer", "ouro", "universal")
@pytest.mark.parametrize("name", DECODING)
def test_every_family_decodes(name):
    """In sizes that kernels take: one position of a row and several, at one depth and at depths of their own."""
    model = DECODING[name]
    sizes = {"hidden_size": 64, "head_size": 32, "sa_head_size": 32, "mlp_size": 96, "expert_size": 32, "rank": 16}
    has = {field.name for field in dataclasses.fields(model)}
    model = dataclasses.replace(model, dtype="bfloat16", **{key: its for key, its in sizes.items() if key in has})
    family = build(model)
    params, state = jax.eval_shape(lambda: initialise(family, jax.random.key(0)))

    def step(params, state, tokens, depth):
        folded = FoldedModel(family.fold(family.prepare(params, state)), state, family, family.depth)
        flight, slots = folded.enter(tokens, tokens, folded.empty_slots(len(tokens), 256))
        flight, slots = folded.step(flight, tokens, depth, slots)
        return folded.logits(folded.leave(flight, tokens, slots)[0])

    for positions in (1, 64):
        tokens = shape(2, positions, dtype=jnp.int32)
        for depth in (shape(dtype=jnp.int32), tokens):
            logits = jax.eval_shape(step, params, state, tokens, depth)
            assert logits.shape == (2, positions, model.vocab_size)


NAMES = ("expert_product", "expert_outer", "depth_attention_backward", "sequence_attention_d_kv")


def test_train_step():
    """The whole default step, with every kernel in it."""
    sizes = {"model__hidden_size": 64, "model__expert_size": 16, "data__sequence_length": 128}
    config = tiny_config(model__dtype="bfloat16", model__sa_head_size=16, **sizes)
    mesh = make_mesh(config.mesh)
    batch = {name: shape(len(value), 128, dtype=value.dtype) for name, value in random_batch(0).items()}
    text = lowered(make_train_step(config, mesh), abstract_state(config, mesh), batch)
    assert calls(text) >= TRITON
    assert not [name for name in calls(text) if "callback" in name or "cudnn" in name]  # nothing is interpreted
    for name in NAMES:
        assert name in text, name
