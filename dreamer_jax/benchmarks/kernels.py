"""`dreamer bench kernels`: every kernel's time, predicted from its schedule and bytes, or measured on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.planning.schedule import CLOCKS, DUMP_FLAGS, Schedule, read_schedule
from dreamer_jax.planning.topology import Topology, child_environment, devices_of, parse_topology, require_libtpu

Row = dict[str, Any]


def kernel_cases(match: str = "", platform: str = "tpu") -> list[Any]:
    """All cases (see kernel_case.py) whose name and shape contain `match`. A room's kernels are added here.

    Args:
        match: part of a name or shape.
        platform: "tpu", or "gpu" for what runs there in the kernels' place.

    Raises:
        UserError: when there is none.
    """
    from dreamer_jax.benchmarks.attention_cases import attention_cases
    from dreamer_jax.benchmarks.decoding_cases import decoding_cases
    from dreamer_jax.benchmarks.expert_cases import expert_cases
    from dreamer_jax.benchmarks.gpu_cases import gpu_cases
    from dreamer_jax.benchmarks.window_cases import window_cases

    here = gpu_cases, attention_cases, window_cases, expert_cases, decoding_cases
    cases = [case for make in (here[:1] if platform == "gpu" else here[1:]) for case in make()]
    found = [case for case in cases if match in f"{case.name} {case.shape}"]
    if not found:
        names = "; ".join(sorted({case.name for case in cases}))
        raise UserError(f"no kernel matches '{match}'; there are: {names}")
    return found


def predict(topology: Topology, match: str, say: Callable[[str], None], compare: bool = True) -> list[Row]:
    """One row a kernel and shape, by compiling for one chip of the topology in processes of their own.

    Times are seconds. Keys: `name`, `shape`; `seconds` = the sum over launches of the longer of `compute_seconds`
    (bundles over clock) and `memory_seconds` (bytes over bandwidth); `roofline_seconds` (least bytes, matrix FLOPs);
    `temporary`, bytes; `launch_seconds`, of each launch; `schedules`, Pallas kernel -> bundles of a grid step (`grid`)
    and of its innermost loops (`loops`), the matrix unit's share of its capacity (`matrix`); `figures`, those of the
    case.

    With `compare`, also `xla_seconds`, the same of what XLA compiles the work to, by the bytes and FLOPs it counts
    itself, and `xla_temporary`; or `xla_error`, where XLA compiles it to nothing.

    Raises:
        UserError: libtpu is missing, no kernel matches, or the chip's clock isn't known.
    """
    require_libtpu()
    kernel_cases(match)
    if topology.chip.name not in CLOCKS:
        known = ", ".join(CLOCKS)
        raise UserError(f"bench kernels: the clock of {topology.chip.name} isn't known; take one of {known}")
    with tempfile.TemporaryDirectory() as directory:
        dump = {"LIBTPU_INIT_ARGS": DUMP_FLAGS.format(directory=directory)}
        rows = _child([topology.name, match, directory], dump, say)
    if compare:  # without the dump, which would take far longer than XLA
        found = {(row["name"], row["shape"]): row for row in _child([topology.name, match], {}, say)}
        rows = [row | found[row["name"], row["shape"]] for row in rows]
    return rows


def _child(words: list[str], environment: dict[str, str], say: Callable[[str], None]) -> list[Row]:
    """The rows that `main` prints in a process of its own."""
    command = [sys.executable, "-m", "dreamer_jax.benchmarks.kernels", *words]
    rows = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=child_environment() | environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    say(f"compiled {rows[-1]['name']}, {rows[-1]['shape']}" + (" by XLA" if len(words) == 2 else ""))
        if child.returncode:
            errors.seek(0)
            raise RuntimeError(f"compiling kernels for {words[0]} failed:\n{errors.read()[-4000:]}")
    return rows


def predict_case(case: Any, topology: Topology, directory: Path) -> Row:
    """The row of one case, without XLA's; in a process that was started with DUMP_FLAGS for `directory`."""
    from pallas_kernels import tiles

    device, chip, clock = devices_of(topology)[0], topology.chip, CLOCKS[topology.chip.name]
    seen: dict[str, Schedule] = {}

    def read(name: str) -> Schedule:
        seen[name] = read_schedule(directory, name)
        return seen[name]

    with _on(device):
        target = tiles.generation()
        assert target is not None
        program = _compile(case, case.kernel, device)
        launches = case.launches(read, target)
    compute, memory = (
        [launch.bundles / clock for launch in launches],
        [launch.bytes / chip.bandwidth for launch in launches],
    )
    return {
        "name": case.name,
        "shape": case.shape,
        "seconds": sum(map(max, compute, memory)),
        "launch_seconds": list(map(max, compute, memory)),
        "compute_seconds": sum(compute),
        "memory_seconds": sum(memory),
        "roofline_seconds": max(case.flops / chip.peak_flops, case.least_bytes / chip.bandwidth),
        "temporary": program.memory_analysis().temp_size_in_bytes,
        "schedules": {
            name: {
                "grid": s.loops[0].bundles,
                "loops": [loop.bundles for loop in s.leaves],
                "matrix": s.matrix_busy,
            }
            for name, s in seen.items()
        },
        "figures": case.figures(target),
    }


def compare_case(case: Any, topology: Topology) -> Row:
    """What XLA makes of a case."""
    row: Row = {"name": case.name, "shape": case.shape}
    if case.xla is None:
        return row
    device, chip = devices_of(topology)[0], topology.chip
    try:
        with _on(device):
            program = _compile(case, case.xla, device)
    except Exception as error:  # the compiler's own limits and bugs: the kernel's figures still stand
        return row | {"xla_error": str(error).partition("\n")[0]}
    cost = program.cost_analysis()
    flops, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
    seconds = len(case.steps) * max(flops / chip.peak_flops, moved / chip.bandwidth)
    return row | {"xla_seconds": seconds, "xla_temporary": program.memory_analysis().temp_size_in_bytes}


def _on(device: Any) -> Any:
    """The mesh of one device that needn't be there, as a context."""
    import jax
    import numpy as np

    return jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("chip",)).abstract_mesh)


def _compile(case: Any, function: Callable[..., Any], device: Any) -> Any:
    """One step of the case, compiled for a device that needn't be there."""
    import jax
    import jax.numpy as jnp

    place = jax.sharding.SingleDeviceSharding(device)
    shapes = (*jax.eval_shape(case.arguments, jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32))
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    donated = () if case.carried is None else (case.carried,)
    return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()


def measure(match: str, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """One row a kernel and shape, run on this machine's accelerator: `seconds` and `xla_seconds`, medians of `repeats`.

    `xla_error` instead of the latter where XLA fails; `roofline_seconds` is there for chips whose peak is known.

    Raises:
        UserError: this machine has no accelerator.
    """
    import jax

    from dreamer_jax.chips import chip_of

    if jax.default_backend() == "cpu":
        raise UserError("bench kernels: no accelerator here; predict for one with --topology v5p:2x2x1")
    chip = chip_of(jax.devices()[0].device_kind)
    rows = []
    for case in kernel_cases(match, jax.default_backend()):
        row: Row = {"name": case.name, "shape": case.shape}
        row["seconds"] = time_case(case, case.kernel, repeats)
        if case.xla is not None:
            try:
                row["xla_seconds"] = time_case(case, case.xla, repeats)
            except jax.errors.JaxRuntimeError as error:  # XLA's own limits, such as memory: the kernel's figure stands
                row["xla_error"] = str(error).partition("\n")[0]
        if chip:
            row["roofline_seconds"] = max(case.flops / chip.peak_flops, case.least_bytes / chip.bandwidth)
        rows.append(row)
        say(f"measured {case.name}, {case.shape}")
    return rows


def time_case(case: Any, function: Callable[..., Any], repeats: int) -> float:
    """Seconds of all steps of a case on the default device: the median of `repeats`, after one to compile."""
    import statistics
    import time

    import jax
    import jax.numpy as jnp

    donated = () if case.carried is None else (case.carried,)
    step = jax.jit(function, donate_argnums=donated)
    taken = []
    for _ in range(repeats + 1):
        arguments = list(jax.block_until_ready(jax.jit(case.arguments)(jax.random.key(0))))
        values = [jnp.int32(value) for value in case.steps]
        start = time.perf_counter()
        results: Any = None
        for value in values:
            results = step(*arguments, value)
            if case.carried is not None:
                arguments[case.carried] = results[-1]
        jax.block_until_ready(results)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main(words: Sequence[str]) -> None:
    """A child process of `predict`: TOPOLOGY MATCH [DIRECTORY] -> a line of JSON a case, XLA's without DIRECTORY."""
    topology = parse_topology(words[0])
    for case in kernel_cases(words[1]):
        if len(words) == 2:
            print(json.dumps(compare_case(case, topology)), flush=True)
            continue
        directory = Path(words[2])
        print(json.dumps(predict_case(case, topology, directory)), flush=True)
        for path in directory.iterdir():  # the next case's schedules are the only ones left to find
            os.remove(path)


if __name__ == "__main__":
    main(sys.argv[1:])
