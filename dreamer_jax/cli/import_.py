"""`dreamer import DIR RUN`: an exported or published folder, perhaps fine-tuned in PyTorch, as a run for JAX."""

from __future__ import annotations

import shlex
from pathlib import Path

from dreamer_jax.errors import UserError

USAGE = """\
usage: dreamer import DIR RUN

DIR  a folder written by `dreamer export`, or by save_pretrained from one, or a published model of the type
     huginn_raven or ouro, or a state dict of MoEUT (docs/export.md); none of its code is executed
RUN  the run directory to write; nothing may exist there

The run has one checkpoint, of the step that was exported, and a fresh optimizer; `dreamer train RUN/config.yaml` goes
on with it. Where all steps were done, give it more: --training.steps MORE, and unless the learning rate is constant
--checkpoint.allow learning_rate. A published model brings no data: train on yours with --training.initial_weights RUN
and another --run.dir. Shared experts that were folded stay folded: the run's are zero. Export with --keep-shared to
keep them."""


def run(arguments: list[str]) -> int:
    """Write the run; returns the exit code."""
    if any(word in ("--help", "-h") for word in arguments):
        print(USAGE)
        return 0
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        raise UserError(f"import: expected a folder and a run directory\n{USAGE}")
    folder, out = map(Path, arguments)
    from dreamer_jax.export.description import form_of
    from dreamer_jax.export.form import note_on_tokenizer
    from dreamer_jax.export.reading import import_run
    from dreamer_jax.families import build

    description = import_run(folder, out)
    print(f"imported {folder}: {build(description.model).headline()}, step {description.step}")
    of_a_run = bool(description.meta.get("data"))
    if form_of(description.config).texts:
        spec = description.config.data.tokenizer
        print(f"tokenizer: {spec}{'' if of_a_run else note_on_tokenizer(spec)}")
    training, place = description.config.training, shlex.quote(str(out))
    command = f"dreamer train {shlex.quote(str(out / 'config.yaml'))}"
    if not of_a_run:  # whose data it could go on with
        command += f" --training.initial_weights {place} --run.dir NEW"
    elif description.step >= training.steps:  # the run was complete, and as long as it was nothing is left to train
        command += " --training.steps MORE"
        command += "" if training.schedule == "constant" else " --checkpoint.allow learning_rate"
    print(f"done: {out}; go on with `{command}`")
    return 0
