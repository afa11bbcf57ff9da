"""A run directory with random weights, made without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from dreamer_jax.analysis.drawing import LIGHT, Figure
from dreamer_jax.config import load_config, to_yaml
from dreamer_jax.data import open_data
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
HUGINN = """
model: {family: huginn, depth: 3, prelude_layers: 1, core_layers: 2, coda_layers: 1, hidden_size: 16, vocab_size: 259,
  heads: 2, kv_heads: 2, head_size: 8, mlp_size: 24, dtype: float32}
"""


def make_run(directory: Path, variant: str = "DR", model: str = "") -> Path:
    """A run at step 0, as `dreamer train` would have saved it; `model` takes the place of Dreamer's section."""
    directory.mkdir(parents=True)
    written = directory.parent / f"{directory.name}.yaml"
    text = CONFIG.format(variant=variant, directory=directory)
    if model:
        text = model + text[text.index("data:") :]
    written.write_text(text, encoding="utf-8")
    loaded = load_config(written)
    meta = {"data": "", "tokenizer": open_data(loaded.config).tokenizer.fingerprint, "config": to_yaml(loaded.config)}
    checkpoints = Checkpoints(open_run(loaded).local, loaded.config.checkpoint, meta)
    checkpoints.save(create_state(loaded.config, make_mesh(loaded.config.mesh)))
    checkpoints.close()
    return directory


def draw_without_files(patch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but their files hold only a name: what matplotlib does to write one takes most of a second."""

    def render(figure: Figure, kind: str, theme: dict[str, Any] = LIGHT) -> bytes:
        figure.draw(Canvas(figsize=figure.size), theme)
        return f"{figure.name} {kind}".encode()

    patch.setattr(Figure, "render", render)
