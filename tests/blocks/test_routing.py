"""The routers' arithmetic: float32 at highest precision, which a CPU can't show and a compiled program can."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from dreamer_jax.blocks.positions import Depth, DepthCode
from dreamer_jax.blocks.routing import Router

T, H, E, R = 6, 8, 5, 4


def products(jaxpr):
    """All matrix products, those of inner calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_products_at_highest_precision(dtype):
    """A TPU multiplies float32 in bfloat16 unless told otherwise, and a rounded logit selects another expert. So the
    product with the keys, and both of its gradients, say so; the one that makes queries has factors in `dtype`."""
    router = Router(H, E, R, 2, DepthCode(10_000.0, "both", "none", 3), 0.1)
    depth = Depth(jnp.int32(1), jnp.int32(3))
    x = jnp.ones((T, H), dtype)
    params = nn.meta.unbox(router.init(jax.random.key(0), x, depth))

    def total(params, x):
        return router.apply(params, x, depth).sum()

    found = list(products(jax.make_jaxpr(jax.grad(total, (0, 1)))(params, x).jaxpr))
    shapes = [{v.aval.shape for v in (*one.invars, *one.outvars)} for one in found]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    with_keys = [one for one, of in zip(found, shapes, strict=True) if of == {(T, R), (E, R), (T, E)} or (E, T) in of]
    assert len(with_keys) == 3, "the logits, and the gradients of queries and keys"
    for one in with_keys:
        assert one.params["precision"] == highest and one.invars[0].aval.dtype == jnp.float32
