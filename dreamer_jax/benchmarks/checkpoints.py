"""What checkpoints cost: time taken from training, and memory while restoring."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath

from dreamer_jax.benchmarks.training import OurStep, machine, random_batch
from dreamer_jax.config import Config
from dreamer_jax.errors import UserError
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.integrity import problem_of
from dreamer_jax.training.state import abstract_state

META = {"data": "", "tokenizer": ""}


def bench_checkpoint(config: Config, steps: int, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Time blocks of train steps with and without a save at their start, in turns, and restore in a new process.

    The block with a save ends when everything is on disk and described, so all that the save takes from training is
    in it, whether it blocks the loop or competes for the processor.

    Args:
        config: model, batch, recipe and `checkpoint.every`.
        steps: of a block.
        pairs: of blocks.
        say: gets a line of progress now and then.
    Returns:
        `machine`; `step_seconds`; `blocking_seconds` and `extra_seconds` of a save (medians; and all `differences`);
        `overhead` (extra time of a save over that of checkpoint.every steps); `verify_seconds`; `state_bytes`; and of
        the restore `restore_seconds` and `restore_memory` (largest growth of the process over the state's bytes).
    """
    say("compiling the train step ...")
    step = OurStep(config)
    number = 0
    with tempfile.TemporaryDirectory(prefix="dreamer-bench-") as folder:
        checkpoints = Checkpoints(folder, config.checkpoint, META)
        blocking: list[float] = []

        def block(save: bool) -> float:
            nonlocal number
            began = time.perf_counter()
            if save:
                checkpoints.save(step.state)
                blocking.append(time.perf_counter() - began)
            for _ in range(steps):
                step(*random_batch(config, number))
                number += 1
            checkpoints.settle(wait=True)
            return time.perf_counter() - began

        block(save=True)  # the first of everything takes longer
        blocking.clear()
        plain, saving = [], []
        for pair in range(pairs):
            for save in (pair % 2 == 0, pair % 2 == 1):
                (saving if save else plain).append(block(save))
            say(f"pair {pair + 1}/{pairs}: {plain[-1]:.2f} s, with a save {saving[-1]:.2f} s")
        saved = checkpoints.saved
        checkpoints.close()
        if saved is None:
            raise UserError(f"nothing could be saved in {folder}")
        began = time.perf_counter()
        problem_of(epath.Path(folder) / "checkpoints" / str(saved))
        result = {"verify_seconds": time.perf_counter() - began}
        result |= _in_a_process_of_its_own(config, folder)
    taken = _overhead(plain, saving, steps, config.checkpoint.every)
    return {"machine": machine(), "blocking_seconds": statistics.median(blocking), **taken, **result}


def _overhead(plain: list[float], saving: list[float], steps: int, every: int) -> dict[str, Any]:
    """What a save takes, from the seconds of blocks without and with one."""
    differences = [a - b for a, b in zip(saving, plain, strict=True)]
    seconds, extra = statistics.median(plain) / steps, statistics.median(differences)
    return {
        "step_seconds": seconds,
        "extra_seconds": extra,
        "differences": differences,
        "every": every,
        "overhead": extra / (seconds * every),
    }


def _in_a_process_of_its_own(config: Config, folder: str) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_restore, (config, folder))


def measure_restore(config: Config, folder: str) -> dict[str, float]:
    """Restore the newest checkpoint; how long it takes, and how far the process grows meanwhile."""
    checkpoints = Checkpoints(folder, config.checkpoint, META)
    like = abstract_state(config, make_mesh(config.mesh))
    before = _memory("VmRSS")
    _forget_peak()
    began = time.perf_counter()
    state = jax.block_until_ready(checkpoints.restore(like, checkpoints.saved))
    seconds = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    grown = _memory("VmHWM") - before
    return {"state_bytes": size, "restore_seconds": seconds, "restore_memory": grown / size}


def _memory(kind: str) -> int:
    """Bytes of this process: resident now (VmRSS) or at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise UserError("memory can be measured on Linux only")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
