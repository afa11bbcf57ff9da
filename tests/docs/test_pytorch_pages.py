"""The Python of docs/export.md and docs/finetune.md, and of docs/evaluation.md's adapter, as it stands there.

Slow: each form is trained for two steps, exported with its proof, and loaded by transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
SMALL = [
    *("--training.steps=2", "--training.batch_size=2", "--data.sequence_length=64", "--data.heldout_records=4"),
    *("--data.difficulty=2", "--training.warmup_steps=1", "--model.vocab_size=259"),
]
DREAMER = ["quickstart", "--model.depth=2", "--model.hidden_size=16", "--evaluation.harder=3"]
DATA = ["--data.task=boolean", "--data.loss=answer"]
FORMS = {
    "Using it": DREAMER,
    "Huginn": ["huginn/tiny", *DATA],
    "Ouro": ["ouro/tiny", *DATA],
    "MoEUT": ["moeut/tiny", *DATA],
    "depth_recurrent": ["graph_laptop", "--training.steps=2", "--training.warmup_steps=1", "--training.batch_size=2"],
}
"""Heading of docs/export.md -> the run whose folder its Python uses."""
PREPARE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = torch.tensor([[256, 84, 114, 117, 101]])
if HAS_TEXT:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    states = torch.zeros(1, 5, AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).config.n_embd) \
        if HUGINN else None
else:
    tokens, read = torch.zeros((2, 16), dtype=torch.long), torch.zeros((2, 2), dtype=torch.long)
    visible = torch.ones((2, 16, 16), dtype=torch.bool)
"""


def sections() -> dict[str, list[str]]:
    """Heading -> the ```python blocks below it, of docs/export.md."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs/export.md").read_text(), flags=re.MULTILINE)[1:]
    found = {title: blocks_of(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}
    return {title: blocks for title, blocks in found.items() if blocks}


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def dreamer(place: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dreamer_jax", *words], cwd=place, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def python(place: Path, code: str) -> str:
    """What a process of its own prints; transformers keeps the classes of a folder that it has loaded."""
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Heading -> a place with `folder`, the export of its run."""
    made: dict[str, Path] = {}

    def make(title: str) -> Path:
        pytest.importorskip("transformers", reason="needs the extra export")
        if title not in made:
            made[title] = place = tmp_path_factory.mktemp("place")
            small = SMALL if title != "depth_recurrent" else []
            dreamer(place, "train", *FORMS[title], *small, "--run.dir=run")
            dreamer(place, "export", "run", "folder")
        return made[title]

    return make


def test_all_blocks_of_the_page_are_here():
    assert set(sections()) == {*FORMS, "Training in PyTorch"}


@pytest.mark.parametrize("title", [title for title in FORMS if title != "Using it"])
def test_a_form(title, folder_of):
    place = folder_of(title)
    known = f"FOLDER, HAS_TEXT, HUGINN = 'folder', {title != 'depth_recurrent'}, {title == 'Huginn'}\n"
    path = "import sys; sys.path.insert(0, 'folder')\n" if title == "depth_recurrent" else ""
    python(place, known + path + PREPARE + "\n".join(sections()[title]))


def test_without_and_with_transformers_and_training(folder_of):
    place = folder_of("Using it")
    alone, beside = sections()["Using it"]
    printed = python(place / "folder", "import sys; sys.path.insert(0, '.')\n" + alone)
    assert printed.count("tensor(") == 2
    tokenizing = "batch = tokenizer('true and', return_tensors='pt')\nimport torch\n"
    tokenizing += "optimizer = torch.optim.AdamW(model.parameters())\n"
    (training,) = sections()["Training in PyTorch"]
    python(place, beside + tokenizing + training)


def test_fine_tuning_and_back(folder_of):
    place = folder_of("Using it")
    (block,) = blocks_of((ROOT / "docs/finetune.md").read_text())
    python(place, block)
    assert "imported tuned" in dreamer(place, "import", "tuned", "back")


def test_the_adapter_for_the_harness(folder_of, tmp_path):
    """With the page's own task file, whose placeholder is this installation's."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
    text = (ROOT / "docs/evaluation.md").read_text()
    (block,) = blocks_of(text)
    (task,) = re.findall(r"^```yaml\n(include:.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_tasks").mkdir()
    task = (
        task.replace("/path/to/lm_eval", str(Path(lm_eval.__file__).parent)) + "generation_kwargs: {max_gen_toks: 4}\n"
    )
    (tmp_path / "my_tasks/my_task.yaml").write_text(task)
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    records = [{"question": f"{a} + 1?", "answer": f"#### {a + 1}"} for a in range(8)]
    for name in ("train", "test"):
        (tmp_path / f"data/gsm8k/{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/gsm8k_la").symlink_to(folder_of("Using it") / "run")
    assert "exact_match" in python(tmp_path, "import os; os.environ['HF_DATASETS_OFFLINE'] = '1'\n" + block)
