"""What a user with an NVIDIA GPU gets by default, lowered for one on a machine without: traces, and calls cuDNN."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from dreamer_jax.benchmarks.kernels import kernel_cases
from dreamer_jax.blocks.operations import operations_of
from dreamer_jax.parallel.mesh import make_mesh
from dreamer_jax.training.state import abstract_state
from dreamer_jax.training.train_step import make_train_step
from pallas_kernels.depth_attention import DepthCache
from pallas_kernels.expert_mlp import reference
from tests.training.cases import random_batch, tiny_config


@pytest.fixture(autouse=True)
def gpu():
    """The platform, and cuDNN with its flash attention, pretended: jax asks for both when it traces."""
    with (
        mock.patch("jax.default_backend", lambda: "gpu"),
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


@pytest.mark.parametrize(
    ("length", "size", "dtype", "taken"),
    [
        (256, 128, jnp.bfloat16, {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}),
        (256, 128, jnp.float32, set()),
        (255, 128, jnp.bfloat16, set()),
    ],
)
def test_sequence_attention(length, size, dtype, taken):
    """cuDNN forward and backward where it takes the shape and dtype, XLA otherwise."""
    q, kv = (shape(2, length, heads, size, dtype=dtype) for heads in (4, 2))
    operation = with_gradient(lambda ids, q, k, v: operations_of().sequence_attention(q, k, v, ids))
    assert calls(lowered(operation, shape(2, length, dtype=jnp.int32), q, kv, kv)) == taken


def test_depth_attention_and_linear_experts():
    """XLA's operations only: no kernel, and nothing that interprets one."""
    operations, tokens = operations_of(), 64
    cache = DepthCache(shape(4, tokens, 256), shape(4, tokens, 256))  # type: ignore[arg-type]
    attend = with_gradient(lambda depth, q, k, v, cache: operations.depth_attention(q, k, v, cache, depth))
    rows = [shape(tokens, heads, 128) for heads in (4, 2, 2)]
    assert not calls(lowered(attend, shape(dtype=jnp.int32), *rows, cache))

    linear = with_gradient(lambda index, x, *rest: operations.expert_linear(x, index, *rest))
    index, score = (shape(tokens, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    assert not calls(lowered(linear, index, shape(tokens, 128), score, shape(6, 128, 256), shape(128, 256)))


@pytest.mark.parametrize(
    ("operation", "dense"), [(lambda *a: operations_of().expert_mlp(*a), False), (reference.expert_mlp, True)]
)
def test_experts_are_not_made_dense(operation, dense):
    """Forward and gradient hold no expert's matrix for every token or choice; the definition does."""
    tokens, choices, experts, size, hidden = 512, 3, 6, 24, 128
    mlp = with_gradient(lambda indices, x, *rest: operation(x, indices, *rest))
    matrices = shape(experts, 2 * size, hidden), shape(experts, size, hidden)
    chosen, weights = (shape(tokens, choices, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    text = lowered(mlp, chosen, shape(tokens, hidden), weights, *matrices)
    assert not calls(text)
    every = rf"({tokens}x{choices}|{tokens * choices}|{tokens}|{tokens}x{experts})"
    assert bool(re.search(rf"tensor<{every}x({size}|{2 * size})x{hidden}x(bf16|f32)>", text)) == dense


def test_what_bench_kernels_measures():
    """Every case traces, and ours and XLA's grouped products have the same results' shapes."""
    for case in kernel_cases(platform="gpu"):
        arguments = *jax.eval_shape(case.arguments, jax.random.key(0)), shape(dtype=jnp.int32)
        ours, theirs = (jax.eval_shape(function, *arguments) for function in (case.kernel, case.xla))
        if case.name.startswith("expert"):
            assert jax.tree.map(lambda a: a.shape, ours) == jax.tree.map(lambda a: a.shape, theirs), case.name


def test_train_step():
    """The whole default step, with cuDNN in it."""
    config = tiny_config(model__dtype="bfloat16")
    mesh = make_mesh(config.mesh)
    batch = {name: shape(*value.shape, dtype=value.dtype) for name, value in random_batch(0).items()}
    text = lowered(make_train_step(config, mesh), abstract_state(config, mesh), batch)
    assert {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"} <= calls(text)
    assert not [name for name in calls(text) if "callback" in name]  # nothing is interpreted
