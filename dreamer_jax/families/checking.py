"""Whether a family keeps the contract: its methods are traced as a pass over whole rows and as decoding call them.

What comes from outside of the package is looked at so before it is used. Only shapes are traced, so it takes a moment
whatever the model's size; and a mistake ends in a sentence that names the method, not in the middle of a scan over
depths. What a method raises itself is left as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp

from dreamer_jax.blocks.memory import Context, Memory
from dreamer_jax.blocks.parameters import is_box, roles_of
from dreamer_jax.errors import UserError
from dreamer_jax.families.contract import Family, Flags, Knob, PyTree, depth_of
from dreamer_jax.families.forward import forward
from dreamer_jax.recurrence import Stepped, Weights

ROWS, LENGTH = 2, 3
"""Rows and places of what is traced."""
OF_THE_RUN = {
    *("step", "loss", "gradient_norm", "learning_rate", "counts", "skipped", "tokens", "rollbacks"),
    *("depth", "last_change", "steps_loss", "last_jacobian", "likeness"),
}
"""What a run logs itself, beside `time/...`."""


@functools.lru_cache(maxsize=32)
def check(family: Family) -> None:
    """Trace everything that training, evaluation and decoding ask of a family.

    Raises:
        UserError: what a method returns isn't what the contract says.
    """
    _instance(family, "flags", family.flags, Flags)
    _instance(family, "depth", family.depth, int)
    for method, found in (("knobs", family.knobs()), ("blocks", family.blocks())):
        if not isinstance(found, (tuple, list)):
            _wrong(family, method, f"returns a {_name(found)}, not a tuple or a list of them")
    _check_knobs(family)
    if family.flags.halts and type(family).finished is Family.finished:
        _wrong(family, "flags", "say halts=True, and `finished` isn't there to say when")
    drawn: Any = family.shapes
    _pair(family, "init", drawn, "(params, state)")
    if not isinstance(drawn[1], dict):
        _wrong(family, "init", f"the model's own state is a {_name(drawn[1])}, not a dict of collections")
    roles_of(drawn[0])
    for path, box in jax.tree_util.tree_leaves_with_path(drawn[0], is_leaf=is_box):
        leaf, named, its = box.value, box.axes, f"the parameter {_at(path)}is {_described(box.value)}"
        if leaf.dtype != jnp.float32:
            _wrong(family, "init", f"{its}; parameters are float32")
        if not isinstance(named, tuple) or len(named) != leaf.ndim:
            _wrong(family, "init", f"{its} with axes {named!r}; each axis has a name")
    params, state = nn.meta.unbox(drawn)
    jax.eval_shape(functools.partial(_whole_rows, family), params, state)
    if family.flags.generates:
        whole = family.fresh(ROWS, LENGTH, family.depth).sequence
        if whole is not None and family.slots(ROWS, LENGTH, family.depth) is None:
            _wrong(family, "slots", f"returns None, where a pass has a {_name(whole)}; flags.generates needs them")
        jax.eval_shape(functools.partial(_decoding, family), params, state)


def _check_knobs(family: Family) -> None:
    """That the knobs turn settings of the model's own."""
    settings = [field.name for field in dataclasses.fields(family.config)]
    for knob in family.knobs():
        if not isinstance(knob, Knob):
            _wrong(family, "knobs", f"has a {_name(knob)}, not a Knob")
        if knob.key not in settings:
            _wrong(family, "knobs", f"turns '{knob.key}', which isn't among the settings {', '.join(settings)}")
        if type(value := getattr(family.config, knob.key)) is not int:
            _wrong(family, "knobs", f"turns '{knob.key}', which is {value!r}; what is turned is a whole number")
        if knob.moves not in ("flops_per_token", "params"):
            _wrong(family, "knobs", f"'{knob.key}' moves '{knob.moves}'; what can be matched: flops_per_token, params")
        if knob.part not in family.parts:
            _wrong(family, "knobs", f"'{knob.key}' is about '{knob.part}', which isn't among its parts {family.parts}")


def _whole_rows(family: Family, params: PyTree, state: dict[str, PyTree]) -> None:
    """A pass in training, its loss, and what evaluation and the update of the model's own state make of it."""
    place = (ROWS, LENGTH)
    batch: dict[str, jax.Array] = {name: jnp.zeros(place, jnp.int32) for name in ("tokens", "targets", "positions")}
    batch["segment_ids"] = jnp.ones(place, jnp.int32)
    batch |= {name: jnp.ones(place, bool) for name in ("loss_mask", "answer_mask")}
    batch |= {name: jnp.zeros((ROWS, *shape), dtype) for name, (shape, dtype) in family.row_entries.items()}
    keys = jax.random.split(jax.random.key(0), ROWS)
    context = Context(batch["segment_ids"], batch["positions"], state, keys, None, batch.get("read"), keys[0])
    memory = family.fresh(ROWS, LENGTH, family.depth)
    _instance(family, "fresh", memory, Memory)
    weights = family.weights(family.prepare(params, state))
    _instance(family, "weights", weights, Weights)
    weights = family.cast_weights(weights).at(jnp.int32(0))
    _one_depth(family, params, batch, weights, memory, context, place)

    passed = forward(family, params, state, batch, key=jax.random.key(0))
    found = family.loss(params, passed, batch)
    _pair(family, "loss", found, "(sum over the targets, sums to be logged)")
    if not isinstance(found[1], dict):
        _wrong(family, "loss", f"its second part is a {_name(found[1])}, not a dict of sums to be logged")
    check_logged(family, "loss", found[1])
    for what, sum_ in {"its first part": found[0], **found[1]}.items():
        _shaped(family, "loss", what, sum_, ())
    if family.flags.generates:
        found = family.evaluate(params, passed, batch)
        _pair(family, "evaluate", found, "(losses, whether the target is the likeliest)")
        for what, each in zip(("losses", "hits"), found, strict=True):
            _shaped(family, "evaluate", what, each, place)
    updated = family.update(state, passed.counts, jnp.int32(0))
    _unchanged(family, "update", "the model's own state", state, updated)


def check_logged(family: Family, method: str, names: Iterable[str]) -> None:
    """That what a family logs, by its loss or by `log`, takes the place of nothing.

    Raises:
        UserError: it does.
    """
    if taken := sorted(name for name in names if name in OF_THE_RUN or name.startswith("time/")):
        _wrong(family, method, f"logs {', '.join(taken)}, which the run logs itself; give it another name")


def _decoding(family: Family, params: PyTree, state: dict[str, PyTree]) -> None:
    """One position of each row, at depths of their own."""
    place = (ROWS, 1)
    folded = family.fold(family.prepare(params, state))
    positions = jnp.zeros(place, jnp.int32)
    context = Context(jnp.ones(place, jnp.int32), positions, state)
    memory = Memory(family.slots(ROWS, LENGTH, family.depth), family.flight(ROWS, 1, family.depth))
    batch = {"tokens": positions}
    weights = family.weights(folded).of(positions.reshape(-1))
    _one_depth(family, folded, batch, weights, memory, context, place)


def _one_depth(
    family: Family,
    params: PyTree,
    batch: dict[str, jax.Array],
    weights: Weights,
    memory: Memory,
    context: Context,
    place: tuple[int, int],
) -> None:
    """What enters, a step, and what is read out."""
    entering = family.enter(params, batch, memory, context)
    _pair(family, "enter", entering, "(entered, memory)")
    entered, entered_memory = entering
    _unchanged(family, "enter", "the memory", memory, entered_memory)
    state, inputs = family.start(entered, context), family.inputs(entered)
    for method, tree in (("start", state), ("inputs", inputs)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if getattr(leaf, "shape", ())[:2] != place:
                _wrong(family, method, f"{_at(path)}is {_described(leaf)}; it must begin with [B, P] = {list(place)}")
    whole = len(context.positions[0]) > 1
    index = jnp.int32(0) if whole else jnp.zeros(place, jnp.int32)
    depth = depth_of(index, family.depth)
    stepped = family.step(weights, state, inputs, depth, entered_memory, context)
    _instance(family, "step", stepped, Stepped)
    _unchanged(family, "step", "the state", state, stepped.state)
    _unchanged(family, "step", "the memory", entered_memory, stepped.memory)
    _shaped(family, "stream", "it", family.stream(stepped.state), (*place, family.config.hidden_size))
    if family.flags.halts and not whole:
        _shaped(family, "finished", "it", family.finished(params, stepped.state, state, depth), place)

    read = family.readout(params, stepped.state, stepped.memory, context)
    _pair(family, "readout", read, "(hidden, memory)")
    if family.flags.generates:
        wanted = (*place, family.readout_size)
        _shaped(family, "readout", "its first part", read[0], wanted)
        _shaped(family, "head", "it", family.head(params), (family.config.vocab_size, family.readout_size))
        _shaped(family, "logits", "it", family.logits(params, read[0]), (*place, family.config.vocab_size))


def _unchanged(family: Family, method: str, what: str, given: PyTree, found: PyTree) -> None:
    """What one depth hands to the next has to keep its form."""
    before, after = jax.tree.structure(given), jax.tree.structure(found)
    if before != after:
        _wrong(family, method, f"{what} goes in as {before} and comes out as {after}; it must keep its form")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(found), strict=True):
        if _described(old) != _described(new):
            change = f"goes in as {_described(old)} and comes out as {_described(new)}"
            _wrong(family, method, f"{what} {_at(path)}{change}; it must keep its form")


def _pair(family: Family, method: str, found: Any, wanted: str) -> None:
    if not isinstance(found, tuple) or len(found) != 2:
        _wrong(family, method, f"returns a {_name(found)}, not {wanted}")


def _instance(family: Family, method: str, found: Any, wanted: type) -> None:
    if not isinstance(found, wanted):
        hint = "; it lacks @property" if callable(found) else ""
        name = "whole number" if wanted is int else wanted.__name__
        _wrong(family, method, f"returns a {_name(found)}, not a {name}{hint}")


def _shaped(family: Family, method: str, what: str, found: Any, wanted: Sequence[int]) -> None:
    if getattr(found, "shape", None) != tuple(wanted):
        _wrong(family, method, f"{what} is {_described(found)}, not {list(wanted)}")


def _name(found: Any) -> str:
    return type(found).__name__


def _at(path: Any) -> str:
    return f"{jax.tree_util.keystr(path)} " if path else ""


def _described(leaf: Any) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if hasattr(leaf, "shape") else f"a {_name(leaf)}"


def _wrong(family: Family, method: str, what: str) -> NoReturn:
    raise UserError(f"family {family.config.family}: {type(family).__name__}.{method}: {what}")
