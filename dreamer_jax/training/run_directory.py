"""A run is a directory: config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, figures/, summary.json."""

from __future__ import annotations

from pathlib import Path

from dreamer_jax.config import LoadedConfig, difference, load_config, to_yaml
from dreamer_jax.config.errors import UserError

CHANGEABLE = ("training.steps", "training.log_every", "mesh.", "checkpoint.", "evaluation.", "analysis.", "run.dir")
"""Keys that may change when a run is resumed: they don't alter what a step computes."""


def open_run(loaded: LoadedConfig) -> Path:
    """Create the run directory with its configuration, or check that an existing one holds the same run.

    Raises:
        UserError: if it holds another configuration (the differences are shown) or can't be written.
    """
    directory = Path(loaded.config.run.dir)
    saved = directory / "config.yaml"
    if saved.exists():
        changed = [
            line for line in difference(load_config(saved).config, loaded.config) if not line.startswith(CHANGEABLE)
        ]
        if changed:
            raise UserError(
                f"{directory} holds a run with another configuration:\n  "
                + "\n  ".join(changed)
                + "\nUse another directory (--run.dir NAME), or the old values to go on with that run"
            )
        return directory
    save_configuration(loaded)
    return directory


def save_configuration(loaded: LoadedConfig) -> None:
    """Write config.yaml, which a run that goes on may change where `CHANGEABLE` lets it.

    Raises:
        UserError: if the directory can't be written.
    """
    directory = Path(loaded.config.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.dir: can't write to {directory}: {error.strerror}; choose another with --run.dir"
        ) from error
