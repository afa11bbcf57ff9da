"""What the tests of the launcher share: a fake cloud, a place for state, and no pauses."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The tests are imported one by one, so what they share is put where `import fake_gcloud` finds it.
_spec = importlib.util.spec_from_file_location("fake_gcloud", Path(__file__).with_name("fake_gcloud.py"))
assert _spec and _spec.loader
sys.modules["fake_gcloud"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["fake_gcloud"])


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A folder for the launcher's state, no pauses, little patience, and an archive that is quick to make."""
    monkeypatch.setenv("DREAMER_LAUNCH_DIR", str(tmp_path / "launch"))
    monkeypatch.setenv("DREAMER_LAUNCH_PACE", "0")
    monkeypatch.setattr("dreamer_jax.launching.supervisor.PATIENCE", 4)
    monkeypatch.setattr("dreamer_jax.launching.machine.DELETE_TRIES", 8)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(
        "dreamer_jax.launching.machine.pack", lambda root, target: target.write_bytes(b"x") and "0" * 64
    )
    return tmp_path / "launch"
