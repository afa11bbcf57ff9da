"""The two exchanges of expert parallelism against the operation of one device, and the arithmetic of the ragged one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dreamer_jax.parallel.expert_parallel import ExchangedExperts, GatheredExperts, Route, SharedRows, ragged_twin
from pallas_kernels.expert_mlp import ExpertMLP
from pallas_kernels.expert_mlp.reference import expert_mlp as reference

GROUP, T, K, H, F = 4, 6, 2, 8, 4
EXPERTS, PADDED = 7, 8


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:GROUP]), ("expert",))


def inputs(selection: str):
    """Tokens of all devices and weights padded to eight experts, of which no one selects the last."""
    rng = np.random.default_rng(0)
    tokens = GROUP * T
    indices = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)]).astype(np.int32)
    if selection == "one":  # all to device 1
        indices[:] = [2, 3]
    elif selection == "elsewhere":  # no device keeps any of its own
        owner = np.arange(tokens) // T
        indices[:, 0], indices[:, 1] = (2 * owner + 2) % 6, (2 * owner + 3) % 6
    x, gate_up, down = (
        rng.normal(size=s).astype(np.float32) for s in ((tokens, H), (PADDED, 2 * F, H), (PADDED, F, H))
    )
    return x, indices, rng.random((tokens, K)).astype(np.float32), gate_up, down


@functools.cache
def with_gradients(exchange):
    """The operation by an exchange (None: the definition, on one device), compiled: (out, gradients)."""
    experts = exchange(ExpertMLP("xla"), "expert", GROUP) if exchange else reference

    def run(x, indices, weights, gate_up, down):
        def total(x, weights, gate_up, down):
            out = experts(x, indices, weights, gate_up, down)
            return jnp.sum(jnp.sin(out)), out

        gradients, out = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(x, weights, gate_up, down)
        return out, gradients

    spec = P("expert")
    sharded = jax.shard_map(run, mesh=mesh(), in_specs=(spec,) * 5, out_specs=spec, check_vma=False)
    return jax.jit(sharded if exchange else run)


@pytest.mark.parametrize("selection", ["spread", "one", "elsewhere"])
@pytest.mark.parametrize("exchange", [GatheredExperts, ExchangedExperts])
def test_values_and_gradients_are_those_of_one_device(exchange, selection):
    out, gradients = with_gradients(exchange)(*inputs(selection))
    values, wanted = with_gradients(None)(*inputs(selection))
    np.testing.assert_allclose(out, values, atol=2e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))


@pytest.mark.parametrize("selection", ["spread", "one"])
def test_rows_that_all_devices_share(selection):
    """For decoding: every device has all tokens and adds what its experts have to say."""
    x, indices, weights, gate_up, down = inputs(selection)
    experts = SharedRows(ExpertMLP("xla"), "expert", GROUP)
    specs = (P(), P(), P(), P("expert"), P("expert"))
    run = jax.jit(jax.shard_map(experts, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=False))
    values, _ = with_gradients(None)(x, indices, weights, gate_up, down)
    np.testing.assert_allclose(run(x, indices, weights, gate_up, down), values, atol=2e-5)


@pytest.mark.parametrize("exchange", [GatheredExperts, ExchangedExperts])
def test_the_tape_has_room_for_the_tokens_of_the_group(exchange):
    """Whoever they come from; and there is none where the operation on one device has none."""
    local, shape = ExpertMLP("pallas", 2), (2, 2 * 8, 128)
    tape, alone = (
        its.start_tape((tokens, K), shape, "float32", *group)
        for its, tokens, group in ((exchange(local, "expert", GROUP), T, ()), (local, GROUP * T, (GROUP,)))
    )
    assert tape is not None and jax.tree.map(jnp.shape, tape) == jax.tree.map(jnp.shape, alone)
    assert exchange(ExpertMLP("xla"), "expert", GROUP).start_tape((T, K), shape, "float32") is None


def test_the_twin_moves_rows_as_ragged_all_to_all_is_documented_to():
    """Device s sends `sizes[s, d]` rows to d, from `starts[s, d]` on; they land at `landings[s, d]`."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 4, (GROUP, GROUP)).astype(np.int32)
    sizes[2] = 0  # nothing from device 2
    starts = (np.cumsum(sizes, 1) - sizes).astype(np.int32)
    landings = (np.cumsum(sizes, 0) - sizes + 1).astype(np.int32)  # a row is left free in front
    rows = rng.normal(size=(GROUP, 16, H)).astype(np.float32)
    out = rng.normal(size=(GROUP, 16, H)).astype(np.float32)
    wanted = out.copy()
    for source in range(GROUP):
        for target in range(GROUP):
            for i in range(sizes[source, target]):
                wanted[target, landings[source, target] + i] = rows[source, starts[source, target] + i]

    def local(rows, out, starts, sizes, landings, received):
        route = Route(starts[0], sizes[0], landings[0], received[0])
        return ragged_twin(rows[0], out[0], route, "expert")[None]

    spec = P("expert")
    run = jax.shard_map(local, mesh=mesh(), in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
    found = jax.jit(run)(rows, out, starts, sizes, landings, np.ascontiguousarray(sizes.T))
    np.testing.assert_array_equal(found, wanted)
