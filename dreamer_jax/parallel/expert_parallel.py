"""Expert parallelism: every device of an `expert` group has some of the experts and a share of the tokens.

Dense feed-forward networks are divided in the same way, neuron by neuron (`GatheredNeurons`).

Dropless: every token reaches every expert it selected, whatever the balance. Each class below is an operation in the
place of `Operations.expert_mlp`, with the contract of `ExpertMLP`. The j-th device of a group has the experts `E' j` to
`E' (j + 1) - 1`, E' being the experts of the matrices it is given; the padding among them is selected by no one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dreamer_jax.blocks.operations import Operations
from dreamer_jax.parallel.mesh import EXPERT
from pallas_kernels.kept import keep
from pallas_kernels.tape import Tape
from pallas_kernels.weights import Stacked


@dataclass(frozen=True)
class _Parallel:
    """The experts of a group of devices.

    Attributes:
        local: the operation on one device.
        axis: mesh axis of the group.
        group: devices along it.
    """

    local: Any
    axis: str
    group: int

    def start_tape(self, indices: tuple[int, ...], gate_up: tuple[int, ...], dtype: Any) -> Tape | None:
        """The empty tape: a device may get the tokens of all of its group."""
        return self.local.start_tape((indices[0] * self.group, indices[1]), gate_up, dtype, self.group)

    def arrange(self, gate_up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
        """As of the operation on one device."""
        return self.local.arrange(gate_up, down)

    def own(self, indices: jax.Array, gate_up: Any) -> jax.Array:
        """Indices among the device's own experts; E' for those of other devices."""
        held = (gate_up.values.shape if isinstance(gate_up, Stacked) else gate_up.shape)[-3]
        own = indices - jax.lax.axis_index(self.axis) * held
        return jnp.where((own >= 0) & (own < held), own, held)


@dataclass(frozen=True)
class GatheredExperts(_Parallel):
    """All tokens of the group visit every device, and the results are summed: one all-gather, one reduce-scatter.

    A device sends `(n - 1) T h` numbers each way, n being the devices of the group: for `n <= k` no more than any
    exchange of single choices. Differentiable.
    """

    def __call__(self, x, indices, weights, gate_up, down, tape=None) -> jax.Array:
        """See `ExpertMLP`."""
        # Kept under remat "attention": the backward pass would gather them again.
        x, indices, weights = (keep(jax.lax.all_gather(its, self.axis, tiled=True)) for its in (x, indices, weights))
        out = self.local(x, self.own(indices, gate_up), weights, gate_up, down, tape=tape)
        return jax.lax.psum_scatter(out, self.axis, scatter_dimension=0, tiled=True)


@dataclass(frozen=True)
class SharedRows(_Parallel):
    """All devices of the group have the same tokens, and each computes what its experts have to say: for decoding."""

    def __call__(self, x, indices, weights, gate_up, down, tape=None) -> jax.Array:
        """See `ExpertMLP`."""
        return jax.lax.psum(self.local(x, self.own(indices, gate_up), weights, gate_up, down), self.axis)


@dataclass(frozen=True)
class ExchangedExperts(_Parallel):
    """Every (token, choice) pair visits the device of its expert and comes back, by ragged all-to-alls.

    Off the TPU, where that operation doesn't exist, an all-gather and a selection take its place. A device sends
    `T k h (n - 1) / n` numbers each way if the experts are balanced, and has room for all pairs of the group. The
    operation on one device is called with one choice a row. Differentiable.
    """

    def __call__(self, x, indices, weights, gate_up, down, tape=None) -> jax.Array:
        """See `ExpertMLP`."""
        held, choices = gate_up.shape[0], indices.shape[1]
        flat = indices.reshape(-1)
        order = jnp.argsort(flat)  # by device, and there by expert
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
        trip = _plan_trip(flat // held, self.group, self.axis)

        rows: jax.Array = _copies(x, order, place, choices)  # type: ignore
        received = _travel(rows, trip, self.axis, self.group * order.size)
        nowhere = jnp.full(self.group * order.size, held, flat.dtype)
        wanted = _move(flat[order] % held, nowhere, trip.there, self.axis)
        ones = jnp.ones((wanted.size, 1), jnp.float32)
        answers = self.local(received, wanted[:, None], ones, gate_up, down, tape=tape)
        returned = _travel(answers, trip.back_first, self.axis, order.size)
        by_choice = _permuted(returned, place, order).reshape(*indices.shape, -1)  # [T, k, h]
        return jnp.einsum("tkh,tk->th", by_choice, weights.astype(x.dtype))


@dataclass(frozen=True)
class GatheredNeurons:
    """In place of `Operations.feed_forward`: every device of a group has some of the neurons, which the tokens of the
    whole group visit, and the results are summed: one all-gather, one reduce-scatter. Differentiable.

    Attributes:
        local: the operation on one device.
        axis: mesh axis of the group.
    """

    local: Any
    axis: str

    def __call__(self, x: jax.Array, gate: jax.Array, up: jax.Array, out: jax.Array) -> jax.Array:
        """See `blocks.operations.swiglu`; neurons of padding add nothing."""
        everyone = jax.lax.all_gather(x, self.axis, tiled=True)
        return jax.lax.psum_scatter(self.local(everyone, gate, up, out), self.axis, scatter_dimension=0, tiled=True)


@dataclass(frozen=True)
class SharedNeurons(GatheredNeurons):
    """All devices of the group have the same tokens: for decoding."""

    def __call__(self, x: jax.Array, gate: jax.Array, up: jax.Array, out: jax.Array) -> jax.Array:
        """See `blocks.operations.swiglu`."""
        return jax.lax.psum(self.local(x, gate, up, out), self.axis)


EXCHANGES = {"gather": GatheredExperts, "ragged": ExchangedExperts}
"""`mesh.exchange` -> the operation of training."""


def parallel_operations(operations: Operations, exchange: str, group: int) -> Operations:
    """The operations of a train step on a mesh whose axis `expert` has so many devices."""
    if group == 1:
        return operations
    return replace(
        operations,
        expert_mlp=EXCHANGES[exchange](operations.expert_mlp, EXPERT, group),
        feed_forward=GatheredNeurons(operations.feed_forward, EXPERT),
    )


class Route(NamedTuple):
    """Rows from every device to every other, each [n] int32, as `jax.lax.ragged_all_to_all` takes them.

    Attributes:
        start: where the rows for each device begin here.
        sent: how many they are.
        landing: where they land there.
        received: rows from each device.
    """

    start: jax.Array
    sent: jax.Array
    landing: jax.Array
    received: jax.Array


class Trip(NamedTuple):
    """A route and the way back."""

    there: Route
    back: Route

    @property
    def back_first(self) -> Trip:
        """The way back, as a trip of its own."""
        return Trip(self.back, self.there)


def _plan_trip(owner: jax.Array, group: int, axis: str) -> Trip:
    """The trip of rows sorted by their owner: [P] int32, the device each row is for."""
    counts = jnp.sum(owner[:, None] == jnp.arange(group), axis=0, dtype=jnp.int32)
    table = jax.lax.all_gather(counts, axis)  # [from, to]
    me = jax.lax.axis_index(axis)
    starts = jnp.cumsum(table, axis=1) - table  # of the rows for `to`, at `from`
    landings = jnp.cumsum(table, axis=0) - table  # of the rows of `from`, at `to`
    there = Route(starts[me], table[me], landings[me], table[:, me])
    back = Route(landings[:, me], table[:, me], starts[:, me], table[me])
    return Trip(there, back)


def _travel(rows: jax.Array, trip: Trip, axis: str, room: int) -> jax.Array:
    """Rows [P, h] to where they land, [room, h], zero where none does; gradients take the way back."""
    shape = rows.shape

    @jax.custom_vjp
    def travel(rows, trip):
        return _move(rows, jnp.zeros((room, shape[1]), rows.dtype), trip.there, axis)

    def backward(trip, d_out):
        return _move(d_out, jnp.zeros(shape, d_out.dtype), trip.back, axis), None

    travel.defvjp(lambda rows, trip: (travel(rows, trip), trip), backward)
    return travel(rows, trip)


def _move(rows: jax.Array, out: jax.Array, route: Route, axis: str) -> jax.Array:
    """`out` with the rows that arrive written over it."""

    def ragged(rows, out, route):
        return jax.lax.ragged_all_to_all(
            rows, out, route.start, route.sent, route.landing, route.received, axis_name=axis
        )

    def twin(rows, out, route):
        return ragged_twin(rows, out, route, axis)

    return jax.lax.platform_dependent(rows, out, route, tpu=ragged, default=twin)


def ragged_twin(rows: jax.Array, out: jax.Array, route: Route, axis: str) -> jax.Array:
    """What `jax.lax.ragged_all_to_all` computes, from an all-gather of the rows: for platforms without it."""
    everyone = jax.lax.all_gather((rows, route.start, route.sent, route.landing), axis)
    me = jax.lax.axis_index(axis)
    place = jnp.arange(out.shape[0])
    for source in range(everyone[0].shape[0]):
        sent, start, size, landing = (part[source] for part in everyone)
        offset = place - landing[me]
        arrives = (offset >= 0) & (offset < size[me])
        values = sent.at[jnp.clip(start[me] + offset, 0, rows.shape[0] - 1)].get(mode="promise_in_bounds")
        out = jnp.where(arrives.reshape(-1, *[1] * (rows.ndim - 1)), values, out)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _copies(x: jax.Array, order: jax.Array, place: jax.Array, choices: int) -> jax.Array:
    """Every token's row once for each choice, [T, h] -> [P, h], in the order given; gathers both ways."""
    del place
    return x.at[order // choices].get(mode="promise_in_bounds")


def _copies_forward(x, order, place, choices):
    return _copies(x, order, place, choices), place


def _copies_backward(choices, place, d_rows):
    by_choice = _rows(d_rows, place).reshape(-1, choices, d_rows.shape[1])
    return jnp.sum(by_choice, axis=1, dtype=jnp.float32).astype(d_rows.dtype), None, None


_copies.defvjp(_copies_forward, _copies_backward)


@jax.custom_vjp
def _permuted(rows: jax.Array, place: jax.Array, order: jax.Array) -> jax.Array:
    """rows[place], whose gradient is gathered by the inverse, `order`."""
    del order
    return _rows(rows, place)


def _permuted_forward(rows, place, order):
    return _rows(rows, place), order


def _permuted_backward(order, d_rows):
    return _rows(d_rows, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def _rows(rows: jax.Array, permutation: jax.Array) -> jax.Array:
    return rows.at[permutation].get(mode="promise_in_bounds", unique_indices=True)
