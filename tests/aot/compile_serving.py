"""Compiles a served engine's programs for a topology and prints what was found; a process of its own.

python -m tests.aot.compile_serving v5e:2x2 dr_da_16       for one chip of it
python -m tests.aot.compile_serving v5e:2x2 dr_da_16 4     for all of them, along `expert` four
"""

import json
import math
import re
import sys
import time
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

from dreamer_jax.blocks.operations import in_int8
from dreamer_jax.config import load_config
from dreamer_jax.families import build
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.programs import Kinds
from dreamer_jax.inference.samplers import Lossless, Sampler
from dreamer_jax.inference.samplers.contract import Carried, Choosing
from dreamer_jax.inference.sampling import Sampling
from dreamer_jax.inference.sharding import ModelSharding, divided
from dreamer_jax.planning.collectives import find_collectives
from dreamer_jax.planning.hlo import parse_program
from dreamer_jax.planning.topology import devices_of, parse_topology
from dreamer_jax.serving import programs

ROWS, PLACES, CONTEXT, PAGE, CHUNK, STOPS = 16, 32, 2048, 16, 64, 8
"""Rows and places of a chip."""
PAGES = PLACES * CONTEXT // PAGE
HUGINN = {"depth": 8, "hidden_size": 1024, "heads": 8, "kv_heads": 8, "head_size": 128, "mlp_size": 4096}
ODD_HEADS = {"depth": 32, "sa_heads": 8, "sa_kv_heads": 4, "sa_head_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "huginn": ("huginn/tiny", HUGINN | {"vocab_size": 32768, "dtype": "bfloat16"}),
    "odd_heads": ("dr_da_tiny", ODD_HEADS | {"dtype": "bfloat16"}),
    "odd_heads_single": ("dr_da_tiny", ODD_HEADS),
    "single": ("dr_da_16", {"dtype": "float32"}),
    "odd_sizes": ("huginn/tiny", HUGINN | {"hidden_size": 1096, "vocab_size": 32768, "dtype": "bfloat16"}),
    "two_keys": ("dr_da_tiny", {"depth": 32, "sa_kv_heads": 2, "sa_head_size": 128, "dtype": "bfloat16"}),
}
"""Name -> a configuration of the package and what is different."""


def model_of(name: str) -> FoldedModel:
    """A model, with shapes in place of arrays; experts in eight bits after the name's " int8"."""
    name, _, form = name.partition(" ")
    base, changes = MODELS.get(name, (name, {}))
    family = build(load_config(base, [f"--model.{key}={value}" for key, value in changes.items()]).config.model)
    folding = build(family.config, in_int8(family.operations)) if form == "int8" else family
    params, state = nn.meta.unbox(family.shapes)
    return FoldedModel(jax.eval_shape(folding.fold, params), state, family, family.depth)


def on_mesh(model: FoldedModel, mesh: Mesh) -> tuple[FoldedModel, ModelSharding]:
    """The model as a mesh has it, and how it is divided."""
    found: list[ModelSharding] = []

    def divide(model: FoldedModel) -> FoldedModel:
        model, sharding = divided(model, mesh, apart=True)
        found.append(sharding)
        return model

    return jax.eval_shape(divide, model), found[0]


def shapes(sampler: Sampler, model: FoldedModel, compiled: programs.Programs, chips: int) -> dict[str, tuple[Any, ...]]:
    """Program -> its arrays, those of all chips."""
    place, own = jax.ShapeDtypeStruct, PLACES if sampler.rows_apart else ROWS
    rows = own * chips
    pool = jax.eval_shape(lambda model: compiled.pool(PAGES, PAGE, model), model)
    progress, carried = jax.eval_shape(lambda model: compiled.places(sampler, own, model), model)
    numbers, settings = jax.tree.map(
        lambda leaf: place((rows, *leaf.shape), leaf.dtype), (Sampling(1.0).numbers(), sampler.numbers())
    )
    table, one, each = place((rows, CONTEXT // PAGE), jnp.int32), place((), jnp.int32), place((chips,), jnp.int32)
    stops, share = place((rows, STOPS), jnp.int32), place((), jnp.float32)
    its = programs.Rows(table, place((rows,), bool), stops, numbers, settings, one, share)
    prompts = place((chips, CONTEXT // PAGE), jnp.int32), place((chips, CHUNK), jnp.int32), each, each, each
    return {"tick": (model, pool, progress, carried, its), "chunk": (model, pool, *prompts)}


def placed(program: str, arrays: tuple[Any, ...], device: Any, sharding: ModelSharding | None) -> Any:
    """Arrays with where they lie."""
    if sharding is None:
        only = SingleDeviceSharding(device)
        model, *others = jax.tree.map(lambda its: jax.ShapeDtypeStruct(its.shape, its.dtype, sharding=only), arrays)

        def by_rows(its: Any) -> Any:  # as an engine has them
            where = Format(Layout(major_to_minor=tuple(range(its.ndim))), only)
            return jax.ShapeDtypeStruct(its.shape, its.dtype, sharding=where)

        return model.replace(params=jax.tree.map(by_rows, model.params)), *others
    rows, slots = sharding.rows, sharding.slots
    others = (rows, Carried(rows, slots), rows) if program == "tick" else (rows,) * 5

    def of(where: Any, part: Any) -> Any:
        same = sharding.named(PartitionSpec())
        return jax.tree.map(
            lambda its: jax.ShapeDtypeStruct(its.shape, its.dtype, sharding=where if its.ndim else same), part
        )

    specs = sharding.named((sharding.model, slots, *others))
    return jax.tree.map(of, specs, arrays, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding))


def report(name: str, compiled: Any, pool: Any, mesh: Mesh, seconds: float) -> dict[str, Any]:
    """What a compiled program is like on a chip."""
    memory, text = compiled.memory_analysis(), str(compiled.as_text())
    program = parse_program(text)
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)) // mesh.size
    sizes = {math.prod(leaf.shape) // mesh.size for leaf in jax.tree.leaves(pool)}
    copies = [
        f"{instruction.name}: {array}"
        for _, instruction, _ in program.visits()
        for array in instruction.arrays
        if instruction.opcode in ("copy", "copy-start", "transpose") and math.prod(array.dims) in sizes
    ]
    sent = Counter(
        (its.kind, "+".join(its.axes), its.group, ", ".join(its.arrays), its.bytes, bool(its.loops))
        for its in find_collectives(program, dict(mesh.shape))
    )
    fields = "kind", "axes", "group", "arrays", "bytes", "in_loop", "count"
    return {
        "program": name,
        "seconds": round(seconds, 1),
        "reads_pages": "ragged_paged_attention" in text,
        "eight_bits": sorted(set(re.findall(r"expert_\w+_int8", text))),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "pool": own,
        "copies": copies,
        "collectives": [dict(zip(fields, (*key, count), strict=True)) for key, count in sorted(sent.items())],
    }


def main(topology: str, name: str, expert: str = "0") -> None:
    """Compile for one chip of it, or for all with so many along `expert`."""
    chips = list(devices_of(parse_topology(topology)))
    mesh, sharding = Mesh(np.array(chips[:1]), ("chip",)), None
    if int(expert):
        mesh = Mesh(np.array(chips).reshape(-1, int(expert)), ("data0", "expert"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # weights are folded for the chip, not for this machine
        model = model_of(name)
    if int(expert):
        model, sharding = on_mesh(model, mesh)
    compiled = programs.programs_for(sharding)
    for sampler in (programs.OneByOne("latent-diff"), Lossless().at(model.total_depth)):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            for program, arrays in shapes(sampler, model, compiled, mesh.size).items():
                begun = time.monotonic()
                its = placed(program, arrays, chips[0], sharding)
                if program == "tick":
                    lowered = compiled.tick.lower(Kinds(Choosing(True), sampler.program), 32, ROWS, *its)
                elif isinstance(sampler, Lossless):
                    continue  # prompts are the same for all
                else:
                    lowered = compiled.chunk.lower(*its)
                done: Any = lowered.compile()
                found = report(f"{program} {sampler.name}", done, its[1], mesh, time.monotonic() - begun)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
