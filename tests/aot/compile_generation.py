"""Compiles a generation engine's programs for one chip and prints what was found; a process of its own.

python -m tests.aot.compile_generation v5e:2x2 dr_da_16
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, SingleDeviceSharding

from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds, Programs, programs_for
from dreamer_jax.inference.samplers import Lossless, Sampler, Static
from dreamer_jax.inference.samplers.contract import Asked, Choosing, Progress
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.planning.topology import devices_of, parse_topology
from tests.aot.compile_serving import model_of, report

ROWS, LENGTH, CHUNK = 16, 2048, 64

of = jax.ShapeDtypeStruct


def prompts(model: FoldedModel, slots: Any) -> tuple[Any, ...]:
    """What `prefill` gets beside the model."""
    each, hidden = of((ROWS,), jnp.int32), of((ROWS, model.family.readout_size), model.config.dtype)
    return of((ROWS, CHUNK), jnp.int32), each, each, slots, hidden


def tokens(model: FoldedModel, slots: Any, sampler: Sampler) -> tuple[Any, ...]:
    """What `decode` gets beside the model."""
    each = of((ROWS,), jnp.int32)
    carried = jax.eval_shape(lambda model: sampler.carry(model, ROWS), model)
    asked = Asked(of((), jnp.int32), of((1,), jnp.int32), Sampling().numbers(), sampler.numbers())
    return Progress(each, each, of((ROWS,), bool), each, each, each), slots, carried, asked


def main(topology: str, name: str) -> None:
    """Compile for one of its chips."""
    chip = next(iter(devices_of(parse_topology(topology))))
    mesh, only, compiled = Mesh(np.array([chip]), ("chip",)), SingleDeviceSharding(chip), programs_for(None)

    def placed(leaf: Any) -> Any:
        return of(leaf.shape, leaf.dtype, sharding=only) if hasattr(leaf, "shape") else leaf

    def by_rows(leaf: Any) -> Any:  # as an engine has weights
        return of(leaf.shape, leaf.dtype, sharding=Format(Layout(major_to_minor=tuple(range(leaf.ndim))), only))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = model_of(name)
        model = model.replace(params=jax.tree.map(by_rows, model.params), state=jax.tree.map(placed, model.state))
        slots = jax.eval_shape(lambda model: compiled.empty_slots(model, ROWS, LENGTH), model)
        for sampler in (None, Static(), Lossless().at(model.total_depth)):
            begun = time.monotonic()
            own = prompts(model, slots) if sampler is None else tokens(model, slots, sampler)
            lowered = _program(compiled, sampler).lower(_kinds(sampler), model, *jax.tree.map(placed, own))
            what = "prompts" if sampler is None else f"tokens {sampler.name}"
            print(json.dumps(report(what, lowered.compile(), slots, mesh, time.monotonic() - begun)), flush=True)


def _program(compiled: Programs, sampler: Sampler | None) -> Any:
    return compiled.prefill if sampler is None else compiled.decode


def _kinds(sampler: Sampler | None) -> Kinds:
    return Kinds() if sampler is None else Kinds(Choosing(), sampler.program)


if __name__ == "__main__":
    main(*sys.argv[1:])
