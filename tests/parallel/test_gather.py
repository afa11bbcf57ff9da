"""Gradients that travel in bfloat16: each device's are rounded once along an axis, and summed in float32 on arrival."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.parallel import make_mesh
from dreamer_jax.parallel.gather import scatter
from dreamer_jax.parallel.layout import Layout, _divide
from dreamer_jax.parallel.mesh import collective_axes


def scattered(gradients, data, dtype):
    """[devices, ...], each device's own gradient -> their sum, [...]."""
    mesh = make_mesh(MeshConfig(data=data))
    shape = gradients.shape[1:]
    layout = Layout(shape, _divide(list(shape), collective_axes(mesh.shape)))
    everywhere = P(mesh.axis_names)
    run = jax.shard_map(
        lambda its: scatter(its[0], layout, mesh, dtype),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=layout.spec,
        check_vma=False,
    )
    return np.asarray(jax.jit(run)(gradients))


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


@pytest.mark.parametrize("shape", [(32, 24), (3, 64, 8), (8, 5)])
def test_each_is_rounded_once_an_axis_and_summed_in_float32(shape):
    """Along the first axis the four devices' own, along the second the two sums; nothing else is lost. A sum in
    bfloat16 would be off by more."""
    gradients = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    found = scattered(gradients, (4, 2), "bfloat16")
    assert found.dtype == np.float32
    firsts = rounded(gradients.reshape(4, 2, *shape)).sum(axis=0, dtype=np.float32)
    np.testing.assert_allclose(found, rounded(firsts).sum(axis=0, dtype=np.float32), rtol=0, atol=1e-6)
    exact = scattered(gradients, (4, 2), "float32")
    np.testing.assert_allclose(exact, gradients.sum(axis=0), rtol=0, atol=1e-5)
    assert 0 < np.linalg.norm(found - exact) < 2**-8 * np.linalg.norm(exact)


def test_long_axes_stay_float32():
    """An all-to-all over a ring of eight would take longer than the reduce-scatter in float32."""
    gradients = np.random.default_rng(0).normal(size=(8, 16, 8)).astype(np.float32)
    narrow, wide = (scattered(gradients, (8,), dtype) for dtype in ("bfloat16", "float32"))
    np.testing.assert_array_equal(narrow, wide)


def test_halves_what_travels():
    """In the program: all-to-alls of bfloat16 and no reduce-scatter."""
    mesh = make_mesh(MeshConfig(data=(4, 2)))
    layout = Layout((32, 24), _divide([32, 24], collective_axes(mesh.shape)))
    run = jax.shard_map(
        lambda its: scatter(its, layout, mesh, "bfloat16"),
        mesh=mesh,
        in_specs=P(),
        out_specs=layout.spec,
        check_vma=False,
    )
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((32, 24), jnp.float32)).as_text()
    moved = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(moved) == 2 and all("bf16" in line for line in moved) and "reduce_scatter" not in text
