"""Files of embeddings of texts: written, read, and refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dreamer_jax.config.sections import Config, DataConfig
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.runs import knowledge
from dreamer_jax.runs.safetensors_files import Tensor, write_file
from tests.families.cases import small_config

MODEL = small_config(pa_slots=3, pa_source="texts", pa_embedding_size=4)
EMBEDDINGS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32) * 7


def test_rows_are_read_with_a_mean_square_of_one(tmp_path: Path) -> None:
    path = tmp_path / "facts.safetensors"
    knowledge.write(path, EMBEDDINGS, ["one", "zwei\n", "три"])
    found = knowledge.read_embeddings(path, MODEL)
    np.testing.assert_allclose((found**2).mean(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(found[:, :1] / found, EMBEDDINGS[:, :1] / EMBEDDINGS, rtol=1e-5)
    assert found.dtype == np.float32 and (np.sign(found) == np.sign(EMBEDDINGS)).all()
    assert knowledge.read_texts(path, 3) == ["one", "zwei\n", "три"]
    assert json.loads((tmp_path / "facts.jsonl").read_text().splitlines()[1]) == {"text": "zwei\n"}
    assert knowledge.read_texts(path, 4) is None
    assert {each.name for each in tmp_path.iterdir()} == {"facts.safetensors", "facts.jsonl"}
    from safetensors.numpy import load_file

    np.testing.assert_array_equal(load_file(path)["texts"], EMBEDDINGS)
    name, other = knowledge.label(path, found), knowledge.label(path, -found)
    assert name.startswith("facts-") and name != other and knowledge.label(path, found) == name


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the same command can be repeated."""

    def full(self: Path, target: Path) -> None:
        if target.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        os.replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        knowledge.write(tmp_path / "facts.safetensors", EMBEDDINGS, ["a", "b", "c"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"hello", "is not a safetensors file"),
        ({"other": EMBEDDINGS}, r"holds no tensor texts \[N, e\]"),
        ({"texts": EMBEDDINGS[0]}, r"holds no tensor texts \[N, e\]"),
        ({"texts": EMBEDDINGS[:, :3]}, r"embeddings of 3 numbers; model\.pa_embedding_size is 4"),
        ({"texts": EMBEDDINGS[:2]}, r"holds 2 texts; model\.pa_slots is 3"),
        ({"texts": np.where(np.arange(3)[:, None] == 1, np.nan, EMBEDDINGS)}, "text 2 has a number that isn't finite"),
        ({"texts": np.where(np.arange(3)[:, None] == 2, 0, EMBEDDINGS)}, "the embedding of text 3 is zero"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "facts.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        its = [Tensor(name, "F32", rows.shape, lambda a, b, rows=rows: rows[a:b]) for name, rows in content.items()]
        write_file(path, its)
    with pytest.raises(UserError, match=message):
        knowledge.read_embeddings(path, MODEL)


def test_another_number_of_texts_may_be_wanted_but_not_another_model(tmp_path: Path) -> None:
    path = tmp_path / "facts.safetensors"
    knowledge.write(path, EMBEDDINGS[:2], ["a", "b"])
    assert knowledge.read_embeddings(path, MODEL, number=False).shape == (2, 4)
    with pytest.raises(UserError, match="this model attends to no texts"):
        knowledge.read_embeddings(path, small_config())


def test_the_file_belongs_to_a_model_that_attends_to_texts() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.knowledge: is empty; a model with model\.pa_source texts needs a file"
    ):
        Config(model=MODEL)
    with pytest.raises(ConfigError, match=r"data\.knowledge: this model attends to no texts; set model\.pa_source"):
        Config(model=small_config(), data=DataConfig(knowledge="facts.safetensors"))
