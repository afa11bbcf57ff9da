"""The tutorial from its first command to its last, with a small model and few steps in place of its own."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dreamer_jax.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALL = [
    *("--model.depth", "2", "--model.hidden_size", "16", "--model.num_experts", "4", "--training.steps", "3"),
    *("--training.batch_size", "2", "--training.warmup_steps", "1", "--data.heldout_records", "4"),
    *("--data.difficulty", "2", "--evaluation.harder", "3"),
]
"""For `dreamer train`, whose runs all other commands read; the page says what to shorten for a first look."""

pytestmark = pytest.mark.slow  # trains two models and exports one with its proof


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("dreamer ")]


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    done = []
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "tutorial.md", "exec"), names)
            continue
        for words in commands(block):
            if words[0] == "export":
                pytest.importorskip("torch", reason="the last step needs the extra export")
            assert main([*words, *SMALL] if words[0] == "train" else words) == 0
            done.append(words[0])
    assert done == ["data", "budget", "train", "generate", "train", "compare", "match", "depth", "analyze", "export"]
    assert names["states"].shape[0] == 3 and Path("compare.png").is_file()
    assert Path("runs/tutorial/analysis/figures/depth_attention.png").is_file()
    assert json.loads(Path("runs/tutorial/depth.json").read_text())["depths"]
    assert Path("exported/model.safetensors").is_file()
