"""Compiled programs are kept from one process to the next, and nothing that lies in the folder can do harm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dreamer_jax import program_cache

COMPILE = """
import os
from dreamer_jax import program_cache
os.environ.update(program_cache.settings())
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
x = jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.full((8, 8), 0.1))
print(float(x), sum(event.endswith("cache_hits") for event in hits))
"""


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty; jax's switches as a user has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("JAX_ENABLE_COMPILATION", "JAX_COMPILATION", "JAX_PERSISTENT")):
            monkeypatch.delenv(name)
    return tmp_path


def compiled(expect_hits: bool) -> str:
    """What a process computes that compiles a program, and whether it found it."""
    process = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True)
    assert "Error" not in process.stderr and "Warning" not in process.stderr, process.stderr
    value, hits = process.stdout.split()
    assert bool(int(hits)) == expect_hits
    return value


def test_a_second_process_compiles_nothing(caches: Path) -> None:
    value = compiled(expect_hits=False)
    assert compiled(expect_hits=True) == value
    # A process that was killed while it wrote leaves part of an entry, without the time of its last use.
    for entry in program_cache.folder().glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
        entry.with_name(entry.name.replace("-cache", "-atime")).unlink()
    assert compiled(expect_hits=False) == value
    assert f"{program_cache.folder()} (0 MiB of at most 1024)" == program_cache.described()


def test_jaxs_own_switches_go_first(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert program_cache.settings() == {}
    assert program_cache.described() == "/elsewhere (0 MiB)"
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    assert program_cache.settings() == {}
    assert "not kept" in program_cache.described()
    assert not list(caches.iterdir())


def test_where_nothing_can_be_written_nothing_is_kept(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (caches / "dreamer-jax").write_text("a file in the way")
    assert program_cache.settings() == {}
    (caches / "dreamer-jax").unlink()
    monkeypatch.setattr(program_cache, "SPARE", 1 << 60)
    assert program_cache.settings() == {}


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again(caches: Path) -> None:
    """jax says so in a warning, and goes on."""
    value = compiled(expect_hits=False)
    for entry in program_cache.folder().glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    process = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True)
    assert process.stdout.split()[0] == value and "Error reading persistent compilation cache" in process.stderr


@pytest.mark.slow
def test_two_processes_may_write_at_once(caches: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    values = {process.communicate()[0].split()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert values == {compiled(expect_hits=True)}
