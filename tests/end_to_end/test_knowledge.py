"""Texts embedded by one run, attended to by another, through the command line: train, resume, generate, other texts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import dreamer_jax
from dreamer_jax.cli.main import main
from dreamer_jax.config.values import knowledge_of
from dreamer_jax.families import KNOWLEDGE
from dreamer_jax.runs.knowledge import read_embeddings
from dreamer_jax.runs.models import load_run
from tests.end_to_end.cases import TINY
from tests.export.cases import WHY_SKIPPED

TEXTS = ["T&F is F", "T|F is T", "not a thing"]
TRAINING = """\
training:
  steps: 2
  batch_size: 8
  learning_rate: 1e-2
  warmup_steps: 1
  log_every: 1
checkpoint:
  every: 50
evaluation:
  every: 50
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`embedder`, a run; `facts.safetensors`, its embeddings of TEXTS; `run`, trained for 2 steps with them."""
    folder = tmp_path_factory.mktemp("knowledge")
    config, texts = folder / "tiny.yaml", folder / "texts.jsonl"
    config.write_text(TINY.format(variant="DR", depth=2) + TRAINING)
    texts.write_text("".join(json.dumps({"fact": text}) + "\n" for text in TEXTS))
    assert main(["train", str(config), "--run.dir", str(folder / "embedder"), "--training.steps", "1"]) == 0
    out = str(folder / "facts.safetensors")
    assert main(["embed", str(folder / "embedder"), str(texts), "--field", "fact", "--out", out]) == 0
    assert main(["train", str(config), *settings(folder)]) == 0
    return folder


def settings(folder: Path, texts: int = 3, size: int = 16) -> list[str]:
    slots = ["--model.pa_slots", str(texts), "--model.pa_embedding_size", str(size), "--model.pa_head_size", "8"]
    bank = ["--model.pa_source", "texts", "--data.knowledge", str(folder / "facts.safetensors")]
    return [*slots, *bank, "--run.dir", str(folder / "run")]


def test_embeddings_are_means_of_the_last_states(folder: Path) -> None:
    """Of each text alone, without padding, begin-of-text left out."""
    model = dreamer_jax.load(folder / "embedder")
    for text, found in zip(TEXTS, model.embed(TEXTS, batch_size=2), strict=True):
        mean = np.asarray(model.states([model.encode(text)])[-1, 0, 1:], np.float64).mean(axis=0)
        np.testing.assert_allclose(found, mean / np.sqrt((mean**2).mean()), rtol=1e-4, atol=1e-5)
    stored = read_embeddings(folder / "facts.safetensors", load_run(folder / "run").config.model)
    np.testing.assert_allclose(stored, model.embed(TEXTS), rtol=1e-5, atol=1e-6)
    assert [json.loads(line)["text"] for line in (folder / "facts.jsonl").read_text().splitlines()] == TEXTS


@pytest.mark.parametrize("taken", ["mine.safetensors", "mine.jsonl"])
def test_files_that_exist_are_not_replaced(tmp_path: Path, capsys, taken) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / taken).write_text("my only copy")
    words = ["embed", "runs/none", str(tmp_path / "texts.jsonl"), "--out", str(tmp_path / "mine.safetensors")]
    assert main(words) == 2
    assert f"{tmp_path / taken} exists" in capsys.readouterr().err
    assert (tmp_path / taken).read_text() == "my only copy"


@pytest.mark.slow
def test_training_keeps_the_texts_and_changes_what_reads_them(folder: Path, capsys) -> None:
    """Also in a run that goes on, which doesn't ask for the file; and what is attended to decides what is said."""
    first, bank = load_run(folder / "run"), folder / "facts.safetensors"
    texts = read_embeddings(bank, first.config.model)
    np.testing.assert_array_equal(first.model_state[KNOWLEDGE]["texts"], texts)
    moved = bank.rename(folder / "moved.safetensors")
    again = ["train", str(folder / "tiny.yaml"), *settings(folder), "--training.steps", "4"]
    assert main(again) == 0
    last = load_run(folder / "run")
    assert last.step == 4
    np.testing.assert_array_equal(last.model_state[KNOWLEDGE]["texts"], texts)
    before, after = (its.params["layer"]["parameter_attention"] for its in (first, last))
    assert all(np.any(np.asarray(before[name]) != after[name]) for name in ("keys", "values", "query", "output"))
    capsys.readouterr()
    assert main(["generate", str(folder / "run"), "--prompt", "(T&F)=", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out
    moved.rename(bank)


@pytest.mark.slow
def test_other_texts(folder: Path, capsys) -> None:
    """Any number of them; the same ones change nothing."""
    two, out = folder / "two.jsonl", folder / "other.safetensors"
    two.write_text('{"text": "F&F is F"}\n{"text": "a"}\n')
    assert main(["embed", str(folder / "embedder"), str(two), "--out", str(out)]) == 0
    run = str(folder / "run")
    own, same, other = (
        dreamer_jax.load(run, knowledge=its) for its in (None, str(folder / "facts.safetensors"), str(out))
    )
    tokens = [own.encode("(T&F)=")]
    jax.tree.map(np.testing.assert_array_equal, own.logits(tokens), same.logits(tokens))
    assert (
        knowledge_of(other.config.model) == (2, 16) and np.abs(own.logits(tokens) - other.logits(tokens)).max() > 1e-6
    )
    greedy = other.generate("(T&F)=", max_tokens=2)[0].tokens
    row = list(tokens[0])
    for token in greedy:
        assert token == int(np.argmax(other.logits([row])[0, -1]))
        row.append(token)
    words = ["generate", run, "--prompt", "(T&F)=", "--max-tokens", "2", "--knowledge"]
    assert main([*words, str(out)]) == 0
    text = folder / "text.txt"
    text.write_text("((T&F)|T)=T. " * 20)
    evaluation = ["eval", run, "--tasks", "ppl", "--text", str(text), "--knowledge", str(out)]
    assert main(evaluation) == 0
    assert all("-knowledge-other-" in each.name for each in (folder / "run" / "evaluation").iterdir())
    capsys.readouterr()
    assert main([*words[:1], str(folder / "embedder"), *words[2:], str(out)]) == 2
    assert "this model attends to no texts; train one with model.pa_source texts" in capsys.readouterr().err


@pytest.mark.slow
def test_which_texts_are_read(folder: Path) -> None:
    """By their words, at every depth."""
    out = folder / "analysis"
    assert main(["analyze", str(folder / "run"), "--out", str(out), "--sequences", "2"]) == 0
    for depth in json.loads((out / "analysis.json").read_text())["slots"]["most"]:
        assert sorted(its["text"] for its in depth) == sorted(TEXTS)
        assert sum(its["weight"] for its in depth) == pytest.approx(1, abs=1e-4)
        assert all(its["text"] == TEXTS[its["slot"]] for its in depth)
    assert "read most at depth 1, of 3: text &quot;" in (out / "report.html").read_text()


def test_the_texts_leave_with_the_model(folder: Path) -> None:
    """An exported folder, verified by the command, answers as the run does, and becomes a run again."""
    pytest.importorskip("torch", reason=WHY_SKIPPED)
    out, back = str(folder / "exported"), str(folder / "back")
    assert main(["export", str(folder / "run"), out]) == 0
    own, exported = (dreamer_jax.load(path) for path in (folder / "run", out))
    tokens = [own.encode("(T&F)=")]
    np.testing.assert_allclose(exported.logits(tokens), own.logits(tokens), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(exported.model_state[KNOWLEDGE]["texts"], own.model_state[KNOWLEDGE]["texts"])
    assert main(["import", out, back]) == 0
    np.testing.assert_array_equal(load_run(back).model_state[KNOWLEDGE]["texts"], own.model_state[KNOWLEDGE]["texts"])
    assert main(["export", str(folder / "run"), str(folder / "half"), "--dtype", "bfloat16"]) == 0


def test_what_does_not_fit_is_said(folder: Path, capsys) -> None:
    wrong = (
        (settings(folder, texts=4), "data.knowledge: {}/facts.safetensors holds 3 texts; model.pa_slots is 4"),
        (settings(folder, size=8), "data.knowledge: {}/facts.safetensors holds embeddings of 16 numbers"),
    )
    for number, (its, message) in enumerate(wrong):
        fresh = ["--run.dir", str(folder / f"refused_{number}")]
        assert main(["train", str(folder / "tiny.yaml"), *its[:-2], *fresh]) == 2
        assert message.format(folder) in capsys.readouterr().err
        assert not Path(fresh[1]).exists()  # so that the next try, with the right file, is a new run
    for words, message in (
        (["texts.jsonl", "--out", "x.safetensors"], "line 1: field 'text' must hold a text"),
        (["texts.jsonl", "--field", "fact", "--out", "texts.safetensors"], "is what is read; choose another name"),
        (["texts.jsonl", "--field", "fact", "--out", "x.npy"], "must end in .safetensors"),
        (["none.jsonl", "--out", "x.safetensors"], "there is no such file"),
    ):
        paths = [str(folder / word) if "." in word else word for word in words]
        assert main(["embed", str(folder / "embedder"), *paths]) == 2
        assert message in capsys.readouterr().err
