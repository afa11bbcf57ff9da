"""A run directory with random weights, made without training."""

from __future__ import annotations

from pathlib import Path

from dreamer_jax.config import load_config
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.checkpoints import Checkpoints
from dreamer_jax.runs.folders import open_run
from dreamer_jax.training.state import create_state

CONFIG = """
model: {{variant: {variant}, depth: 3, hidden_size: 16, vocab_size: 259, sa_heads: 2, sa_kv_heads: 1, sa_head_size: 8,
  da_head_size: 8, num_experts: 6, experts_per_token: 2, expert_size: 8, router_size: 8, dtype: float32}}
data: {{source: task, task: boolean, difficulty: 2, loss: answer, sequence_length: 64, heldout_records: 30}}
training: {{steps: 3, batch_size: 8, warmup_steps: 2}}
run: {{dir: {directory}}}
"""


def make_run(directory: Path, variant: str) -> Path:
    """A run at step 0, as `dreamer train` would have saved it."""
    directory.mkdir(parents=True)
    written = directory.parent / f"{directory.name}.yaml"
    written.write_text(CONFIG.format(variant=variant, directory=directory), encoding="utf-8")
    loaded = load_config(written)
    checkpoints = Checkpoints(open_run(loaded).local, loaded.config.checkpoint, {"data": "", "tokenizer": ""})
    checkpoints.save(create_state(loaded.config, make_mesh(loaded.config.mesh)))
    checkpoints.close()
    return directory
