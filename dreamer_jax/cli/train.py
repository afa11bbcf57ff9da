"""`dreamer train CONFIG`: train a model, or go on with the run in `run.dir`; alone or as one of several processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback

from dreamer_jax.cli.arguments import read_config, split_words
from dreamer_jax.config import LoadedConfig
from dreamer_jax.config.loading import COMMAND_LINE
from dreamer_jax.errors import RESTART_EXIT_CODE, UserError

FLAGS = ("--coordinator", "--processes", "--process")
PROCESSES = """\
Several processes (one a host) find each other by themselves on TPU VMs, GKE and SLURM; elsewhere name them:
  --coordinator HOST:PORT --processes N --process I      process I of N, from 0; HOST is that of process 0

Exit codes: 0 the run is complete; 2 a person must act; 75 asked to stop or another process was lost: start again.
"""


def run(arguments: list[str]) -> int:
    """Train by the configuration that the words name; returns the exit code."""
    words, flags = _split_flags(arguments)
    loaded = read_config("train", words)
    if loaded is None:
        print(PROCESSES)
        return 0
    _check_place(split_words(words)[0][0], loaded)
    from dreamer_jax.parallel.distributed import named_processes, start_processes  # after the checks: jax is slow

    start_processes(named_processes(*flags) if flags else None)
    import jax

    code = _train(loaded) if jax.process_count() == 1 else _train_together(loaded)
    _flush()
    return code


def _flush() -> None:
    """A log that finds no room, which the console has said, takes nothing from what was trained."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it would be tried again, at exit


def _check_place(file: str, loaded: LoadedConfig) -> None:
    """Refuse the configuration of a run that names another directory, unless the command line says which is meant.

    Raises:
        UserError: the run was copied or moved, or this isn't the working directory that it was started from.
    """
    folder, directory = os.path.dirname(file) or ".", loaded.config.run.dir
    if os.path.basename(file) != "config.yaml" or not os.path.isdir(os.path.join(folder, "checkpoints")):
        return
    if loaded.origins["run.dir"] == COMMAND_LINE or os.path.realpath(folder) == os.path.realpath(directory):
        return
    raise UserError(
        f"{file}: the run in {folder} names another directory, {directory}, since it was copied or moved, or started "
        f"from another working directory; add --run.dir {shlex.quote(folder)} to go on with the run here, or --run.dir "
        "NAME for another"
    )


def _train(loaded: LoadedConfig) -> int:
    from dreamer_jax.analysis.sampling import Sampler
    from dreamer_jax.inference.answering import answer
    from dreamer_jax.training.loop import Extras, train

    benchmarks = None
    if loaded.config.evaluation.tasks:
        from dreamer_jax.evaluation import during_training

        benchmarks = during_training(loaded.config)
    return train(loaded, Extras(benchmarks, Sampler, answer))


def _train_together(loaded: LoadedConfig) -> int:
    """Train as one of several processes. An error ends this one at once, and by that the others.

    A regular exit would first wait minutes for processes that wait for this one.
    """
    import jax

    try:
        return _train(loaded)
    except BrokenPipeError:  # nobody reads what is printed
        code, said = 141, ""
    except UserError as error:
        code, said = 2, f"dreamer: error: process {jax.process_index()}: {error}"
    except Exception as error:
        if _lost_others(error):
            code, said = RESTART_EXIT_CODE, f"dreamer: error: process {jax.process_index()} lost another one: {error}"
        else:
            code, said = 1, traceback.format_exc()
    with contextlib.suppress(OSError):  # an error here would lead to the regular exit
        print(said.rstrip(), file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def _lost_others(error: Exception) -> bool:
    """Whether an error is what the end of another process, or of a device, looks like from here.

    jax raises such as JaxRuntimeError, and what it meets while it dispatches as ValueError.
    """
    import jax

    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" not in text
    signs = (
        "Gloo",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "coordination service",
        "Connection closed",
        "Connection reset",
    )
    return isinstance(error, (ValueError, RuntimeError, OSError)) and any(sign in text for sign in signs)


def _split_flags(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """(the other words, values of FLAGS or None if there are none)."""
    words, values = [], {}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name not in FLAGS:
            words.append(word)
            continue
        if name in values:
            raise UserError(f"train: {name} is given twice")
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if not value:
            raise UserError(f"train: {name} needs a value")
        values[name] = value
    if values and len(values) < len(FLAGS):
        missing = " and ".join(flag for flag in FLAGS if flag not in values)
        raise UserError(f"train: several processes need {', '.join(FLAGS)}; {missing} is missing")
    return words, [values[flag] for flag in FLAGS] if values else None
