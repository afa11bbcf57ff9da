"""`dreamer plan CONFIG --topology v5p:4x4x4`: does the train step compile and fit there, and how fast could it be?

With `--serve`: how many requests fit there, and how many tokens a second could they get?
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, positive, say, split_overrides
from dreamer_jax.config import Config, LoadedConfig, load_config
from dreamer_jax.config.sections import MeshConfig
from dreamer_jax.errors import UserError
from dreamer_jax.planning.topology import Topology, parse_topology

ROWS, CONTEXT, PAGE = 16, 4096, 16
"""Of a plan to serve, where nothing else is said."""
COMPILED = 3
"""Candidates of a sweep, likewise."""
DIVIDED = 6144
"""Rows that the chips of every slice divide: a mesh for another slice is refused as such, not for its rows."""


def run(arguments: list[str]) -> int:
    """Print the plan of the configuration that the words name; returns 0, or 1 when it doesn't fit."""
    words, overrides = split_overrides(arguments)
    parser = _parser()
    options = parser.parse_args(words)
    topology = parse_topology(options.topology, options.slices)
    check_options(options)
    if options.serve:  # there is no batch that a mesh of the configuration would have to divide
        given = {word.partition("=")[0] for word in overrides}
        rows = {"--training.batch_size": math.lcm(topology.chips, DIVIDED), "--training.microbatches": 1}
        overrides = [*overrides, *(f"{key}={count}" for key, count in rows.items() if key not in given)]
    loaded = load_config(options.config, overrides)
    if options.explain:
        return _explain(with_mesh(loaded, topology), topology, options.json)
    if options.sweep:
        return _sweep(loaded.config, topology, options.compile or COMPILED, options.json)
    if options.serve:
        return _serving(with_mesh(loaded, topology, serving=True), topology, options)
    return _plan(with_mesh(loaded, topology), topology, options)


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that belong to another kind of plan.

    Raises:
        UserError: there are some.
    """
    given = [f"--{name}" for name in ("rows", "context", "page", "mean_depth") if getattr(options, name) is not None]
    if given and not options.serve:
        raise UserError(f"{given[0].replace('_', '-')} is about serving; give --serve too")
    if options.serve and (options.sweep or options.hlo is not None):
        raise UserError("--serve compiles nothing; leave --sweep and --hlo out")
    if options.explain and (options.serve or options.sweep or options.hlo is not None):
        raise UserError("--explain compiles nothing and stands alone; leave --serve, --sweep and --hlo out")
    if options.sweep and options.hlo is not None:
        raise UserError("--sweep compiles several programs; plan the one that it ranks first with --hlo")
    if options.roofline and (options.serve or options.explain):
        raise UserError("--roofline is a plan of its own; leave --serve and --explain out")
    if options.roofline and (options.sweep or options.hlo is not None):
        raise UserError("--roofline compiles nothing; leave --sweep and --hlo out")
    if options.hlo is not None and (options.hlo.is_dir() or not options.hlo.parent.is_dir()):
        raise UserError(f"--hlo {options.hlo}: name a file in a folder that is there")
    if options.compile is not None and not options.sweep:
        raise UserError("--compile is about a sweep; give --sweep too")


def with_mesh(loaded: LoadedConfig, topology: Topology, serving: bool = False) -> Config:
    """The configuration, with the torus of the topology as its mesh where it sets none. A training batch that the mesh
    doesn't divide is refused, but for serving, where there is none."""
    config, origins = loaded.config, loaded.origins
    if any(origins[f"mesh.{field.name}"] != "default" for field in dataclasses.fields(MeshConfig)):
        return config
    mesh, training = MeshConfig(slices=topology.slices, data=topology.shape), config.training
    if serving:
        training = dataclasses.replace(training, batch_size=mesh.size, microbatches=1)
    return dataclasses.replace(config, mesh=mesh, training=training)


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
    parser.add_argument("--explain", action="store_true", help="what bounds the step, and what would shorten it")
    parser.add_argument("--sweep", action="store_true", help="try meshes, microbatches and remat policies; rank them")
    parser.add_argument("--compile", type=positive, help=f"candidates of a sweep to compile that fit ({COMPILED})")
    parser.add_argument("--serve", action="store_true", help="plan `dreamer serve` there instead of training")
    parser.add_argument("--rows", type=positive, help=f"--serve: requests that a step of each chip computes ({ROWS})")
    parser.add_argument("--context", type=positive, help=f"--serve: positions of a request ({CONTEXT})")
    parser.add_argument("--page", type=positive, help=f"--serve: positions of a page ({PAGE})")
    parser.add_argument("--mean-depth", type=float, help="--serve: depths of a token on average (all)")
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


def _explain(config: Config, topology: Topology, as_json: bool) -> int:
    from dreamer_jax.planning.compiling import check_mesh
    from dreamer_jax.planning.explain import as_data, explain, render

    check_mesh(config, topology)
    reasons = explain(config, topology)
    print(json.dumps(as_data(reasons), indent=2) if as_json else render(reasons, topology))
    return 0


def _serving(config: Config, topology: Topology, options: argparse.Namespace) -> int:
    from dreamer_jax.planning.serving import describe, plan_serving, render

    sizes = options.rows or ROWS, options.context or CONTEXT, options.page or PAGE
    plan = plan_serving(config, topology, *sizes, options.mean_depth)
    print(json.dumps(describe(plan), indent=2) if options.json else render(plan))
    return 0 if plan.fits else 1


def _sweep(config: Config, topology: Topology, most: int, as_json: bool) -> int:
    from dreamer_jax.planning.report import describe, render_sweep
    from dreamer_jax.planning.sweep import sweep

    found = sweep(config, topology, most, lambda line: say(f"compiling {line}"))
    plans = [describe(c.config, topology, c.compiled, c.bound) for c in found]
    print(json.dumps(plans, indent=2) if as_json else render_sweep(plans))
    return 0 if found[0].compiled and found[0].compiled.fits else 1
