"""Compiles a served engine's programs for one chip of a topology and prints what was found; a process of its own."""

import json
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.config import load_config
from dreamer_jax.families import build
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds
from dreamer_jax.inference.samplers import Lossless, Sampler
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.planning.topology import devices_of, parse_topology
from dreamer_jax.serving import programs

ROWS, CONTEXT, PAGE, CHUNK, STOPS = 16, 2048, 16, 64, 8
PAGES = ROWS * CONTEXT // PAGE


def model_of(name: str) -> FoldedModel:
    """A model of the package in bfloat16, with shapes in place of arrays."""
    family = build(load_config(name, []).config.model)
    params, state = nn.meta.unbox(family.shapes)
    return FoldedModel(jax.eval_shape(family.fold, params), state, family, family.depth)


def shapes(sampler: Sampler, model: FoldedModel) -> dict[str, tuple[Any, ...]]:
    """Program -> its arguments, without what is static."""
    place = jax.ShapeDtypeStruct
    pool = jax.eval_shape(lambda: programs.pool(model, PAGES, PAGE))
    numbers = jax.tree.map(lambda leaf: place((ROWS, *leaf.shape), leaf.dtype), Sampling(1.0).numbers())
    settings = jax.tree.map(lambda leaf: place((ROWS, *leaf.shape), leaf.dtype), sampler.numbers())
    table, one = place((ROWS, CONTEXT // PAGE), jnp.int32), place((), jnp.int32)
    rows = programs.Rows(table, place((ROWS,), bool), place((ROWS, STOPS), jnp.int32), numbers, settings, one, one)
    progress, carried = jax.eval_shape(lambda: (programs.nobody(ROWS), sampler.carry(model, ROWS)))
    hidden = place((1, model.family.readout_size), model.config.dtype)
    prompt = place((1, CONTEXT // PAGE), jnp.int32), place((1, CHUNK), jnp.int32)
    return {
        "tick": (model, pool, progress, carried, rows),
        "chunk": (model, pool, *prompt, one, one, one, hidden),
    }


def main(topology: str, name: str) -> None:
    """Compile for one device of it."""
    device = devices_of(parse_topology(topology))[0]
    where, mesh = jax.sharding.SingleDeviceSharding(device), jax.sharding.Mesh(np.array([device]), ("chip",))
    model = model_of(name)
    for sampler in (programs.OneByOne("latent-diff"), Lossless().at(model.total_depth)):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            for program, its in shapes(sampler, model).items():
                its = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), its)
                begun = time.monotonic()
                if program == "tick":
                    kinds = Kinds(Choosing(True), sampler.program)
                    lowered = programs.tick.lower(kinds, *its, 32)
                elif isinstance(sampler, Lossless):
                    continue  # prompts are the same for all
                else:
                    lowered = programs.chunk.lower(*its)
                compiled = lowered.compile()
                memory: Any = compiled.memory_analysis()
                pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(its[1]))
                found = {
                    "program": f"{program} {sampler.name}",
                    "seconds": round(time.monotonic() - begun, 1),
                    "reads_pages": "ragged_paged_attention" in str(compiled.as_text()),
                    "temporary": memory.temp_size_in_bytes,
                    "aliased": memory.alias_size_in_bytes,
                    "pool": pool,
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
