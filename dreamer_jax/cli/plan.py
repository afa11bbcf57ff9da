"""`dreamer plan CONFIG --topology v5p:4x4x4`: does the train step compile and fit there, and how fast could it be?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.config import Config, LoadedConfig, load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.planning.topology import Topology, parse_topology


def run(arguments: list[str]) -> int:
    """Print the plan of the configuration that the words name; returns 0, or 1 when it doesn't fit."""
    words, overrides = split_overrides(arguments)
    parser = _parser()
    options = parser.parse_args(words)
    topology = parse_topology(options.topology, options.slices)
    loaded = load_config(options.config, overrides)
    if options.sweep:
        return _sweep(loaded.config, topology, options.compile, options.json)
    return _plan(with_mesh(loaded, topology), topology, options)


def with_mesh(loaded: LoadedConfig, topology: Topology) -> Config:
    """The configuration, with the torus of the topology as its mesh where it sets none."""
    config, origins = loaded.config, loaded.origins
    if any(origins[f"mesh.{field.name}"] != "default" for field in dataclasses.fields(MeshConfig)):
        return config
    return dataclasses.replace(config, mesh=MeshConfig(slices=topology.slices, data=topology.shape))


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer plan",
        description="Compile the train step for a TPU topology on this machine (no TPU needed), and bound its speed.",
        epilog="Any `--section.key value` overrides a value of CONFIG. How to read the numbers: docs/pods.md.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a name such as dr_da_32")
    parser.add_argument("--topology", required=True, help="chip and shape of a slice, such as v5p:4x4x4 or v5e:16x16")
    parser.add_argument("--slices", type=positive, default=1, help="slices of that shape (1)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--roofline", action="store_true", help="only the bound, without compiling")
    parser.add_argument("--hlo", type=Path, help="also write the compiled program's text to this file")
    parser.add_argument("--sweep", action="store_true", help="try meshes, microbatches and remat policies; rank them")
    parser.add_argument("--compile", type=positive, default=3, help="candidates of a sweep to compile that fit (3)")
    return parser


def _plan(config: Config, topology: Topology, options) -> int:
    # These import jax.
    from dreamer_jax.planning.compiling import check_mesh, compile_step, roomier_buffers
    from dreamer_jax.planning.report import describe, render
    from dreamer_jax.planning.roofline import roofline

    check_mesh(config, topology)
    compiled = None
    if not options.roofline:
        compiled = compile_step(config, topology, options.hlo)
        if not compiled.fits:
            compiled = roomier_buffers(config, topology, compiled)
    plan = describe(config, topology, compiled, roofline(config, topology, compiled.collectives if compiled else None))
    print(json.dumps(plan, indent=2) if options.json else render(plan))
    return 0 if compiled is None or compiled.fits else 1


def _sweep(config: Config, topology: Topology, most: int, as_json: bool) -> int:
    from dreamer_jax.planning.report import describe, render_sweep
    from dreamer_jax.planning.sweep import sweep

    found = sweep(config, topology, most, lambda line: say(f"compiling {line}"))
    plans = [describe(c.config, topology, c.compiled, c.bound) for c in found]
    print(json.dumps(plans, indent=2) if as_json else render_sweep(plans))
    return 0 if found[0].compiled and found[0].compiled.fits else 1
