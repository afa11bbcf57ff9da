"""The model that the runs of these tests train, and what they train it on; programs that they share."""

import contextlib
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_kept(folder: Path):
    """What one test has compiled is there for the others, as for the commands of a user."""
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


TINY = """\
model:
  variant: {variant}
  depth: {depth}
  hidden_size: 16
  vocab_size: 259
  sa_heads: 2
  sa_kv_heads: 1
  sa_head_size: 8
  da_head_size: 8
  num_experts: 6
  experts_per_token: 2
  expert_size: 8
  router_size: 8
  dtype: float32
data:
  task: boolean
  difficulty: 2
  loss: answer
  sequence_length: 64
  heldout_records: 6
"""
