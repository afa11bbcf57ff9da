"""Programs have no stack frames where an old libtpu would walk them for ever."""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax import stack_frames
from dreamer_jax.inference.sharding import jitted
from dreamer_jax.planning.topology import child_environment


@pytest.fixture
def libtpu(monkeypatch):
    """Says which version is installed, None for none."""
    usual = importlib.metadata.version

    def installed(version: str | None) -> None:
        def answer(name: str) -> str:
            if name != "libtpu":
                return usual(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", answer)
        stack_frames._hangs.cache_clear()

    monkeypatch.delenv(stack_frames.VARIABLE, raising=False)
    yield installed
    stack_frames._hangs.cache_clear()


@pytest.mark.parametrize(
    ("version", "hangs"), [(None, False), ("0.0.42", True), ("0.0.42.1", True), ("0.0.50", False), ("0.1", False)]
)
def test_which_libtpu(libtpu, monkeypatch, version, hangs):
    """What processes that compile for a TPU are started with; what a user has set goes first."""
    libtpu(version)
    assert stack_frames.settings() == ({stack_frames.VARIABLE: "0"} if hangs else {})
    assert child_environment().get(stack_frames.VARIABLE) == ("0" if hangs else None)
    monkeypatch.setenv(stack_frames.VARIABLE, "3")
    assert stack_frames.settings() == {} and child_environment()[stack_frames.VARIABLE] == "3"


@pytest.mark.parametrize("version", ["0.0.42.1", "0.0.50.1"])
def test_programs_of_generation(libtpu, version):
    """A lowered program names this file, or doesn't."""
    libtpu(version)
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)  # where such a libtpu is installed, others have set 0
    try:
        program = jitted(lambda x: jnp.sin(x), None, 0, (), None)
        text = program.lower(1.0).as_text(debug_info=True)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
    assert "sin" in text and (Path(__file__).name in text) == (version == "0.0.50.1")
