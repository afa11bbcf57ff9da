"""Windows of depth attention where the backward pass or the cache is used in unusual ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.families import build, forward
from dreamer_jax.families.contract import Drawn
from pallas_kernels.depth_attention import DepthAttention, Ring, Window, empty_cache, reference, write_slot, xla
from tests.families.cases import random_weights, small_config
from tests.families.test_depth_window import SMALL
from tests.training.cases import random_batch

TOKENS, HEADS, KV, SIZE = 3, 4, 2, 8


def rows(depths):
    rng = np.random.default_rng(7)
    return [rng.normal(size=(depths, TOKENS, n, SIZE)).astype(np.float32) for n in (HEADS, KV, KV)]


def definition(q, k, v, l, window):
    """Eq. 1 for token after token and head after head, over the depths l, l - s, ... in float64."""
    seen = [i for n, i in enumerate(range(l, -1, -window.dilation)) if not window.size or n < window.size]
    out = np.zeros((TOKENS, HEADS, SIZE))
    for t in range(TOKENS):
        for head in range(HEADS):
            shared = head // (HEADS // KV)
            logits = np.array([q[l, t, head].astype(np.float64) @ k[i, t, shared] for i in seen]) / np.sqrt(SIZE)
            weights = np.exp(logits - logits.max())
            out[t, head] = sum(w * v[i, t, shared] for w, i in zip(weights / weights.sum(), seen, strict=True))
    return out


@pytest.mark.slow_but("7-", "1-True")
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 7, 8])
def test_operation_is_its_definition(depths, ring):
    """Of windows and dilations of every size, with a cache of all depths and with a ring."""
    q, k, v = rows(depths)
    for size in (0, 1, 2, 3, 8, 20):
        for dilation in (1, 2, 3, 9):
            window = Window(size, dilation)
            span = window.span(depths)
            cache = empty_cache(span if ring else depths, TOKENS, KV, SIZE, "float32")
            cache = jax.tree.map(lambda part: part + 1e6, cache)  # what was never written must not be seen
            cache = Ring(*cache) if ring and span < depths else cache
            for l in range(depths):
                out, cache = DepthAttention("xla")(q[l], k[l], v[l], cache, jnp.int32(l), window=window)
                np.testing.assert_allclose(out, definition(q, k, v, l, window), atol=2e-6, err_msg=f"{window} {l}")
                if size == 1:
                    np.testing.assert_allclose(out, np.repeat(v[l], HEADS // KV, axis=1), atol=1e-6)


def test_tokens_at_depths_of_their_own_in_a_ring():
    q, k, v = rows(8)
    window, starts = Window(2, 2), np.array([0, 1, 3])
    cache = Ring(*empty_cache(window.span(8), TOKENS, KV, SIZE, "float32"))
    own = np.arange(TOKENS)
    for tick in range(8):
        at = np.maximum(tick - starts, 0)  # who begins later writes depth 0 until then
        out, cache = DepthAttention("xla")(
            q[at, own], k[at, own], v[at, own], cache, jnp.asarray(at, jnp.int32), window=window
        )
        for t, l in enumerate(at):
            np.testing.assert_allclose(out[t], definition(q, k, v, l, window)[t], atol=2e-6)


@functools.cache
def setting():
    config = small_config("DR+DA", **SMALL, da_window=2, da_dilation=2)
    params, bias = random_weights(config)
    batch = {name: jnp.asarray(its) for name, its in random_batch(1).items()}
    return config, build(config), params, {"balancing": bias}, batch


def masked(self, q, k, v, cache, depth, tape=None, window=None):
    """The windowed operation as the plain taped one over all slots, with a mask: nothing of windowed.py."""
    cache = write_slot(cache, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v), depth)

    def attend(q, cache):
        keys, values = cache.heads(q.shape[-1])
        grouped = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[-1])
        logits = jnp.einsum("tgnd,ltgd->ltgn", grouped, keys, precision="highest") * q.shape[-1] ** -0.5
        visible = reference.visible_slots(keys.shape[0], depth, window)[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=0)
        return jnp.einsum("ltgn,ltgd->tgnd", weights, values, precision="highest").reshape(q.shape)

    @jax.custom_vjp
    def taped(q, k, v, cache, tape):
        return attend(q, cache)

    def there(q, k, v, cache, tape):
        return attend(q, cache), (q, cache, tape)

    def back(kept, d_out):
        q, cache, tape = kept
        d_q, d_cache = jax.vjp(attend, q, cache)[1](d_out)
        sums = xla.CacheGradient(tape.keys + d_cache.keys, tape.values + d_cache.values)
        parts = sums.keys, sums.values
        d_k, d_v = (jax.lax.dynamic_index_in_dim(part, depth, 0, False).reshape(k.shape) for part in parts)
        return d_q, d_k, d_v, None, sums

    taped.defvjp(there, back)
    return (attend(q, cache) if tape is None else taped(q, k, v, cache, tape)), cache


def gradients(drawn, batch, remat="full"):
    _, family, params, state, _ = setting()

    def loss(params):
        return family.loss(params, forward(family, params, state, batch, drawn, remat), batch)[0]

    return jax.jit(jax.value_and_grad(loss))(params)


def close(found, wanted, tolerance=1e-5):
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert scale > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale), found, wanted)


@pytest.mark.slow_but("rows")
@pytest.mark.parametrize("how", ["last 2", "last 3", "run time 4", "rows"])
def test_gradients_against_a_masked_cache(how, monkeypatch):
    batch = setting()[-1]
    count = len(batch["tokens"])
    own = jnp.asarray([1 + (3 * i + 1) % 5 for i in range(count)], jnp.int32)
    drawn = {
        "last 2": Drawn(5, 5, gradient_depths=2),
        "last 3": Drawn(5, 5, gradient_depths=3),
        "run time 4": Drawn(jnp.int32(4), 5),
        "rows": Drawn(own, 5, groups=2 if count % 2 == 0 else 1),
    }[how]
    found = gradients(drawn, batch)
    monkeypatch.setattr(DepthAttention, "__call__", masked)
    monkeypatch.setattr(DepthAttention, "start_tape", lambda self, cache, *sizes, **window: xla.start_tape(cache))
    close(found, gradients(drawn, batch))
