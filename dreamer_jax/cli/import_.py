"""`dreamer import DIR RUN`: an exported folder, perhaps fine-tuned in PyTorch, as a run that JAX goes on with."""

from __future__ import annotations

from pathlib import Path

from dreamer_jax.errors import UserError

USAGE = """\
usage: dreamer import DIR RUN

DIR  a folder written by `dreamer export`, or by save_pretrained from one; none of its code is executed
RUN  the run directory to write; nothing may exist there

The run has one checkpoint and a fresh optimizer; `dreamer train RUN/config.yaml` goes on with it. Shared experts
that were folded stay folded: the run's are zero. Export with --keep-shared to keep them."""


def run(arguments: list[str]) -> int:
    """Write the run; returns the exit code."""
    if any(word in ("--help", "-h") for word in arguments):
        print(USAGE)
        return 0
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        raise UserError(f"import: expected a folder and a run directory\n{USAGE}")
    folder, out = map(Path, arguments)
    from dreamer_jax.export.reading import import_run

    description = import_run(folder, out)
    model = description.model
    print(f"imported {folder}: {model.variant}, depth {model.depth}, step {description.step}")
    print(f"done: {out}; go on with `dreamer train {out / 'config.yaml'}`")
    return 0
