"""The child process of `compiling.py`: traces and compiles one train step and writes what it finds, step by step.

`python -m dreamer_jax.planning.worker CONFIG RESULT TOPOLOGY SLICES DUMP`. RESULT gets one JSON object a line. DUMP is
the folder to which `XLA_FLAGS` has the compiler write the program: asked for its text, some versions of libtpu fail.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from dreamer_jax.config import Config, load_config
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.parallel.layout import parameter_layouts
from dreamer_jax.parallel.mesh import batch_spec, make_mesh
from dreamer_jax.planning.collectives import find_collectives, large_all_reduces, weight_copies
from dreamer_jax.planning.compiling import PROGRAM
from dreamer_jax.planning.hlo import parse_program
from dreamer_jax.planning.memory import largest_buffers, peak_bytes
from dreamer_jax.planning.topology import devices_of, parse_topology
from dreamer_jax.training.batch import batch_entries
from dreamer_jax.training.state import abstract_state
from dreamer_jax.training.train_step import make_train_step

SMALLEST_WEIGHT = 1 << 18
"""Elements from which on a parameter counts as a weight whose copies and reductions are looked for."""


def main(words: list[str]) -> int:
    """Compile; the exit code is 0 unless the process crashes."""
    settings, result, name, slices, dump = words
    with Path(result).open("w") as file:

        def tell(**facts: Any) -> None:
            file.write(json.dumps(facts) + "\n")
            file.flush()

        try:
            _compile(load_config(settings).config, name, int(slices), Path(dump), tell)
        except UserError as error:
            tell(user_error=str(error))
        except Exception as error:  # any other failure of the compiler is the parent's to show
            tell(error=f"{type(error).__name__}: {error}")
    return 0


def abstract_batch(config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of a step as shapes, divided over the mesh."""
    sharding = NamedSharding(mesh, batch_spec(mesh))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, (shape, dtype) in batch_entries(config).items()
    }


def weight_shapes(config: Config, mesh: jax.sharding.Mesh) -> set[tuple[int, ...]]:
    """Shapes of the larger weights as a step computes with them, the padding of experts included.

    A weight one of whose sizes is the number of tokens at hand is left out: activations have such shapes too.
    """
    tokens = config.training.batch_size * config.data.places
    tokens //= mesh.size * config.training.microbatches
    shapes = set()
    for layout in jax.tree.leaves(parameter_layouts(build(config.model).boxed, mesh)):
        shape = layout.shape
        if layout.expert_dim is not None and layout.padded:
            own = layout.padded // mesh.shape["expert"]
            shape = (*shape[: layout.expert_dim], own, *shape[layout.expert_dim + 1 :])
        if len(shape) > 1 and math.prod(shape) >= SMALLEST_WEIGHT and tokens not in shape:
            shapes.add(shape)
    return shapes


def _compile(config: Config, name: str, slices: int, dump: Path, tell) -> None:
    topology = parse_topology(name, slices)
    mesh = make_mesh(config.mesh, devices_of(topology))
    start = time.process_time()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = make_train_step(config, mesh)
        lowered = step.lower(abstract_state(config, mesh), abstract_batch(config, mesh))
    traced = time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tell(fits=False, message=str(error), seconds={"tracing": traced - start})
        return
    seconds = {"tracing": traced - start, "compiling": time.process_time() - traced}
    its: Any = compiled.memory_analysis()
    memory = {
        "arguments": its.argument_size_in_bytes,
        "outputs": its.output_size_in_bytes,
        "aliased": its.alias_size_in_bytes,
        "temp": its.temp_size_in_bytes,
        "reported_temp": its.temp_size_in_bytes,
        "code": its.generated_code_size_in_bytes,
    }
    tell(fits=True, seconds=seconds, memory=memory)
    texts = list(dump.glob(PROGRAM))
    if texts:
        tell(**read_program(texts[0].read_text(), dict(mesh.shape), weight_shapes(config, mesh)))


def read_program(text: str, mesh_shape: dict[str, int], shapes: set[tuple[int, ...]]) -> dict[str, Any]:
    """What the program's text says, as plain data."""
    program = parse_program(text)
    collectives = find_collectives(program, mesh_shape)
    return {
        "collectives": [dataclasses.asdict(c) for c in collectives],
        "weight_all_reduces": large_all_reduces(collectives, SMALLEST_WEIGHT),
        "weight_copies": weight_copies(program, shapes),
        "buffers": [buffer.as_dict() for buffer in largest_buffers(program)],
        "named_bytes": peak_bytes(program),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
