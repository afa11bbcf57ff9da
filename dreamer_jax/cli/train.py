"""`dreamer train CONFIG`: train a model, or go on with the run in `run.dir`."""

from __future__ import annotations

from dreamer_jax.cli.arguments import read_config


def run(arguments: list[str]) -> int:
    """Train by the configuration that the words name; returns the exit code."""
    loaded = read_config("train", arguments)
    if loaded is None:
        return 0
    from dreamer_jax.training.loop import train  # after the checks: importing jax takes a second

    return train(loaded)
