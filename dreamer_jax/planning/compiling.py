"""The train step compiled for a topology in a process of its own, and what the compiled program says.

A process of its own because libtpu wants its environment set at start, prints warnings about machines that aren't
there, and may crash; what was found before is kept.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamer_jax.chips import CUBES
from dreamer_jax.config import Config, to_yaml
from dreamer_jax.errors import UserError
from dreamer_jax.planning.collectives import Collective
from dreamer_jax.planning.kept_reports import KeptReport
from dreamer_jax.planning.memory import Buffer, reserved_bytes
from dreamer_jax.planning.topology import Topology, child_environment, parse_topology, require_libtpu

PROGRAM = "*.jit_step.*after_optimizations.txt"
"""The compiled program among the files of a dump."""
TIMEOUT = 3600
"""Seconds after which a compilation is given up."""
DUMP = "--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=^jit_step"
"""Has the compiler write down the program, and where it puts what."""


@dataclass(frozen=True)
class Compiled:
    """What compiling a train step told.

    Attributes:
        fits: whether the program fits the chip's HBM.
        message: the compiler's, when it doesn't fit.
        seconds: CPU seconds of tracing and of compiling.
        memory: bytes a chip: arguments, outputs, aliased (outputs that lie in arguments), temp, code; and
            reported_temp, as `memory_analysis()` has it, see memory.py.
        collectives: of the program; None when its text could not be had.
        buffers: the largest values alive at the fullest moment.
        named_bytes: all values alive then, by the program's text.
        weight_all_reduces: large arrays, gradients or parts of them, that are summed in full on every chip.
        weight_copies: copies within HBM with the shape of a weight.
        problem: why a part is missing, if one is.
        kept: the report of an earlier compilation of the same step.
    """

    fits: bool
    message: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    collectives: tuple[Collective, ...] | None = None
    buffers: tuple[Buffer, ...] = ()
    named_bytes: int = 0
    weight_all_reduces: tuple[str, ...] = ()
    weight_copies: tuple[str, ...] = ()
    problem: str = ""
    kept: bool = False

    @property
    def total(self) -> int:
        """Bytes of HBM a chip needs: arguments, what of the results doesn't lie in them, temporaries and code."""
        its = self.memory
        return its["arguments"] + its["outputs"] - its["aliased"] + its["temp"] + its["code"] if its else 0


def compile_step(config: Config, topology: Topology, keep_text: Path | None = None) -> Compiled:
    """Compile the train step of a configuration for a topology, or read what compiling it told before.

    Args:
        config: its mesh must take every chip.
        topology: the chips.
        keep_text: write the compiled program (HLO) there too, for which it is compiled in any case.

    Raises:
        UserError: libtpu is missing, or the step can't be built for that mesh; the message says why.
    """
    require_libtpu()
    check_mesh(config, topology)
    report = KeptReport(config, topology)
    told = None if keep_text else report.read()
    if told is not None:
        return _compiled(told, 0, kept=True)
    with tempfile.TemporaryDirectory() as folder:
        settings, result, dump = (Path(folder) / name for name in ("config.yaml", "result.jsonl", "dump"))
        settings.write_text(to_yaml(config))
        command = [sys.executable, "-m", "dreamer_jax.planning.worker", str(settings), str(result)]
        command += [topology.name, str(topology.slices), str(dump)]
        environment = child_environment() | {"XLA_FLAGS": DUMP.format(folder=dump)}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        told = {}
        if result.exists():
            for line in result.read_text().splitlines():
                told.update(json.loads(line))
        if keep_text:
            for path in dump.glob(PROGRAM):
                shutil.copy(path, keep_text)
        for path in dump.glob("*after_optimizations-buffer-assignment.txt"):
            reserved = reserved_bytes(path.read_text())
            if reserved is not None and "memory" in told:
                told["memory"]["temp"] = reserved
    if "user_error" in told:
        raise UserError(told["user_error"])
    if "error" in told:
        raise RuntimeError(f"compiling for {topology.name} failed: {told['error']}")
    if "fits" not in told:
        tail = "\n".join(child.stderr.splitlines()[-15:])
        raise RuntimeError(f"the compiler for {topology.name} stopped with code {child.returncode}:\n{tail}")
    if child.returncode == 0:
        report.write(told)
    return _compiled(told, child.returncode)


def roomier_buffers(config: Config, topology: Topology, failed: Compiled) -> Compiled:
    """What fills the memory of a step that doesn't fit, from compiling it where it does.

    libtpu names no buffers when it refuses a program. The same program for as many v5p chips has the same arrays; where
    that is too large too, the step with more microbatches has smaller ones of the same names.
    """
    for other_config, other_topology, where in _roomier(config, topology):
        try:
            other = compile_step(other_config, other_topology)
        except RuntimeError:
            continue
        if other.fits:
            note = f"{failed.message}\nBuffers below: the same step compiled {where}, where it fits."
            return dataclasses.replace(failed, message=note, buffers=other.buffers, named_bytes=other.named_bytes)
    return failed


def _roomier(config: Config, topology: Topology) -> Iterator[tuple[Config, Topology, str]]:
    """Where a step that doesn't fit may: (configuration, topology, in words)."""
    shapes = [parse_topology(f"v5p:{shape}", topology.slices) for shape in CUBES]
    roomier = next((t for t in shapes if t.chips == topology.chips), topology)
    if topology.chip.name != "v5p" and roomier is not topology:
        yield config, roomier, f"for {roomier.name}"
    rows = config.training.batch_size // config.mesh.size
    microbatches = 2 * config.training.microbatches
    while rows % microbatches == 0:
        training = dataclasses.replace(config.training, microbatches=microbatches)
        where = f"for {roomier.name} with {microbatches} microbatches"
        yield dataclasses.replace(config, training=training), roomier, where
        microbatches *= 2


def check_mesh(config: Config, topology: Topology) -> None:
    """Raises UserError unless the mesh of the configuration takes every chip; other bad meshes are the schema's."""
    mesh = config.mesh
    if mesh.size != topology.chips or mesh.slices != topology.slices:
        per_slice = mesh.size // mesh.slices
        sides = ",".join(map(str, topology.shape))
        raise UserError(
            f"mesh: {mesh.slices} x {per_slice} devices (slices x data {'x'.join(map(str, mesh.data))} x expert "
            f"{mesh.expert}), but {topology.name}{f' x {topology.slices} slices' if topology.slices > 1 else ''} has "
            f"{topology.slices} x {topology.chips // topology.slices}; use e.g. --mesh.slices {topology.slices} "
            f"--mesh.data {sides} --mesh.expert 1"
        )


def _compiled(told: dict[str, Any], returncode: int, kept: bool = False) -> Compiled:
    collectives = told.get("collectives")
    if collectives is not None:
        collectives = tuple(Collective(**_tuples(one)) for one in collectives)
    problem = told.get("problem", "")
    if told["fits"] and collectives is None and not problem:
        problem = f"the compiler didn't write the program as text (code {returncode})"
    return Compiled(
        fits=told["fits"],
        message=told.get("message", ""),
        seconds=told.get("seconds", {}),
        memory=told.get("memory", {}),
        collectives=collectives,
        buffers=tuple(Buffer(**one) for one in told.get("buffers", ())),
        named_bytes=told.get("named_bytes", 0),
        weight_all_reduces=tuple(told.get("weight_all_reduces", ())),
        weight_copies=tuple(told.get("weight_copies", ())),
        problem=problem,
        kept=kept,
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
