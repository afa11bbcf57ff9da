"""`dreamer analyze`: the folder it writes, the choice of sequences, and the report in a browser."""

from __future__ import annotations

import dataclasses
import errno
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dreamer_jax.analysis import analyze
from dreamer_jax.analysis.collection import sample_sequences
from dreamer_jax.analysis.drawing import DARK
from dreamer_jax.analysis.figures import layered_curve, make_figures
from dreamer_jax.analysis.report import numbers
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.errors import UserError
from tests.analysis.cases import draw_without_files, make_run
from tests.families.cases import TINY_MODELS
from tests.training.cases import tiny_config

FIGURES = {
    "depth_attention": ("LA+DA", "DR+DA"),
    "depth_given_expert": ("DR", "DR+DA"),
    "expert_given_depth": ("DR", "DR+DA"),
    "attention_experts": ("DR", "DR+DA"),
    "lorenz": ("LA", "LA+DA", "DR", "DR+DA"),
    "lens": ("LA", "LA+DA", "DR", "DR+DA"),
    "residual": ("LA", "LA+DA", "DR", "DR+DA"),
    "routers": ("LA", "LA+DA", "DR", "DR+DA"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {variant: make_run(folder / variant.lower().replace("+", "_"), variant) for variant in ("LA", "DR", "DR+DA")}


@pytest.fixture(scope="module")
def analysed(runs) -> Path:
    """DR+DA's folder, drawn beside LA."""
    assert main(["analyze", str(runs["DR+DA"]), "--compare", str(runs["LA"])]) == 0
    return runs["DR+DA"] / "analysis"


@pytest.mark.parametrize("variant", ["DR", "LA"])
@pytest.mark.slow
def test_every_variant_gets_the_figures_that_apply(runs, variant, tmp_path, capsys, monkeypatch):
    draw_without_files(monkeypatch)
    assert main(["analyze", str(runs[variant]), "--out", str(tmp_path), "--sequences", "9"]) == 0
    assert "9 sequences" in capsys.readouterr().out
    names = {name for name, variants in FIGURES.items() if variant in variants}
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == names
    summary = json.loads((tmp_path / "analysis.json").read_text())
    assert summary["sequences"] == 9 and summary["model"]["variant"] == variant


def test_folder_is_complete_and_consistent(analysed, runs, tmp_path, monkeypatch):
    draw_without_files(monkeypatch)
    layered = tmp_path / "layered"
    assert main(["analyze", str(runs["LA"]), "--out", str(layered)]) == 0
    summary = json.loads((analysed / "analysis.json").read_text())
    assert {path.name for path in (analysed / "figures").iterdir()} == {
        f"{n}.{k}" for n in FIGURES for k in ("png", "svg")
    }
    assert all(path.stat().st_size > 5000 for path in (analysed / "figures").iterdir())
    assert summary["sequences"] == 30 and summary["compared_with"] == "la"
    # LA has 6 experts in each of 3 layers, DR+DA 6 in all.
    other = json.loads((layered / "analysis.json").read_text())["experts"]
    expected = np.array(summary["experts"]["used"]) / 6 / (np.mean(other["used"]) / 18)
    np.testing.assert_allclose(summary["against_layered"], expected)
    counts = np.array(summary["routers"]["expert_attention"]["counts"])
    assert (counts.sum(axis=1) == 2 * summary["tokens"]).all()  # k = 2 experts a token, at every depth
    for name in ("sequence_attention", "depth_attention"):
        assert (np.array(summary["routers"][name]["counts"]).sum(axis=1) == summary["tokens"]).all()
    scores = np.array(summary["depth_attention"]["scores"])
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-6)
    assert (np.triu(scores, 1) == 0).all()
    for router in summary["routers"].values():
        assert all(0 < value <= router["largest_entropy"] + 1e-6 for value in router["entropy"])
        np.testing.assert_allclose(np.sum(router["score_histogram"], axis=1), 1)


def test_report_has_every_number_and_nothing_to_fetch(analysed):
    page = html.unescape((analysed / "report.html").read_text(encoding="utf-8"))
    summary = json.loads((analysed / "analysis.json").read_text())
    for label, value, _ in numbers(summary):
        assert label in page and value in page
    assert page.count("<section>") == len(FIGURES) == page.count("data:image/svg+xml;base64,") / 2
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", page) and "<script" not in page and "url(" not in page


def test_figures_say_the_same_twice_and_differ_in_the_dark(analysed):
    figures = make_figures(json.loads((analysed / "analysis.json").read_text()))
    lens = next(figure for figure in figures if figure.name == "lens")
    light = lens.render("svg")
    assert light == lens.render("svg") == (analysed / "figures" / "lens.svg").read_bytes()
    assert light != lens.render("svg", DARK)


def test_a_place_that_can_not_be_written_is_said_before_the_work(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(analyze, "examine", lambda *_: pytest.fail("computed"))
    (tmp_path / "file").write_text("")
    assert main(["analyze", str(runs["DR"]), "--out", str(tmp_path / "file" / "x")]) == 2
    assert f"{tmp_path}/file is a file; name a folder" in capsys.readouterr().err
    monkeypatch.setattr(analyze.os, "access", lambda *_: False)
    assert main(["analyze", str(runs["DR"]), "--out", str(tmp_path / "closed" / "x")]) == 2
    assert f"{tmp_path} is closed to you; name another folder" in capsys.readouterr().err


def test_an_analysis_that_fails_leaves_the_one_before(runs, tmp_path, capsys, monkeypatch):
    draw_without_files(monkeypatch)
    out = tmp_path / "out"
    words = ["analyze", str(runs["DR"]), "--sequences", "3", "--out", str(out)]
    assert main(words) == 0
    before = (out / "analysis.json").read_bytes()

    def full(summary, layered):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(analyze, "make_figures", full)
    assert main([*words, "--seed", "1"]) == 2
    assert (out / "analysis.json").read_bytes() == before


def test_a_checkpoint_has_a_folder_of_its_own():
    assert [analyze._folder(name).name for name in ("runs/a", "runs/a/checkpoints/10")] == ["analysis", "analysis-10"]
    assert analyze._folder("runs/a/checkpoints/10").parent == analyze._folder("runs/a").parent


def test_curve_of_la_is_the_average_layer_among_all_experts():
    layered = {"routers": {"expert_attention": {"counts": [[3, 1, 0], [0, 2, 2]]}}}
    x, y = layered_curve(layered)
    np.testing.assert_allclose(x, [0, 5 / 8, 1])  # busiest 3 and 2, next 1 and 2
    np.testing.assert_allclose(y, [0, 1 / 6, 2 / 6])


def batches_of(rows: list[int]):
    """Batches of two rows with so many documents of two tokens each; every token tells its document."""
    number = 0
    for first in range(0, len(rows), 2):
        segment_ids, tokens = np.zeros((2, 10), np.int32), np.zeros((2, 10), np.int32)
        for row, documents in enumerate(rows[first : first + 2]):
            for segment in range(1, documents + 1):
                number += 1
                segment_ids[row, 2 * segment - 2 : 2 * segment] = segment
                tokens[row, 2 * segment - 2 : 2 * segment] = number
        real = segment_ids > 0
        yield {"segment_ids": segment_ids, "tokens": tokens, "loss_mask": real, "answer_mask": real}


def chosen_documents(sequences: int, seed: int) -> list[int]:
    chosen: list[int] = []
    for batch in sample_sequences(lambda: batches_of([3, 0, 5, 1, 2]), sequences, 3, seed):
        assert batch["tokens"].shape == (3, 10)
        np.testing.assert_array_equal(batch["loss_mask"], batch["segment_ids"] > 0)
        numbers_, times = np.unique(batch["tokens"][batch["segment_ids"] > 0], return_counts=True)
        assert (times == 2).all()
        chosen += numbers_.tolist()
    return chosen


def test_sequences_are_chosen_at_random_without_repeats():
    assert chosen_documents(100, 0) == list(range(1, 12))
    times = np.zeros(12)
    for seed in range(400):
        chosen = chosen_documents(4, seed)
        assert len(set(chosen)) == len(chosen) == 4
        times[chosen] += 1
    np.testing.assert_allclose(times[1:] / 400, 4 / 11, atol=0.1)


def test_other_data(runs, tmp_path, capsys, monkeypatch):
    draw_without_files(monkeypatch)
    path = tmp_path / "more.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} =", "answer": str(i)}) + "\n" for i in range(7)))
    assert main(["analyze", str(runs["DR"]), "--data", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "7 sequences" in (said := capsys.readouterr().out) and "left out" not in said
    assert "more.jsonl" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_records_that_no_row_takes_are_counted(runs, tmp_path, capsys, monkeypatch):
    draw_without_files(monkeypatch)
    path = tmp_path / "more.jsonl"
    answers = ["1", "2" * 500, "3", "4" * 500]
    path.write_text("".join(json.dumps({"question": "0 =", "answer": answer}) + "\n" for answer in answers))
    assert main(["analyze", str(runs["DR"]), "--data", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "2 sequences" in (said := capsys.readouterr().out) and "; left out: 2 longer than a row" in said


def test_compare_of_la_is_refused_before_anything_is_measured(runs, monkeypatch):
    monkeypatch.setattr(analyze, "examine", None)
    with pytest.raises(UserError, match="this run is LA itself"):
        analyze.analyze(runs["LA"], compare=runs["LA"])


def test_other_data_of_a_run_that_was_shown_its_steps():
    """Nobody knows the steps of another file; all else of the recurrence stays."""
    config = load_config("quickstart", ["--recurrence.settling", "0.5"]).config
    found = analyze._with_data(config, __file__)
    assert config.recurrence.steps and not found.recurrence.steps and found.data.source == "jsonl"
    assert found.recurrence.settling == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--seed", "-1"], "not an integer of 0 or more"),
        (["RUN", "--sequences", "0"], "at least one sequence"),
        (["nowhere"], "not a run directory"),
        (["RUN", "--data", "nowhere.jsonl"], "no such file"),
        (["RUN", "--compare", "RUN"], "needs an LA run"),
        (["RUN", "--out", "RUN/config.yaml"], "is a file; name a folder"),
        (["RUN", "--colour"], "lists the options"),
    ],
)
def test_mistakes_are_explained(runs, words, message, capsys):
    assert main(["analyze", *(word.replace("RUN", str(runs["DR"])) for word in words)]) == 2
    assert message in capsys.readouterr().err


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("needs Chromium, e.g. the Debian package chromium")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for Chromium where Linux has it")
def test_a_family_with_experts_of_another_kind_is_not_called_one_without(monkeypatch):
    config = dataclasses.replace(tiny_config(), model=TINY_MODELS["moeut"])
    monkeypatch.setattr(analyze, "examine", lambda *_: ({"routers": {"experts_0": {}}}, config))
    monkeypatch.setattr(analyze, "locate_run", lambda _: SimpleNamespace(config=config))
    with pytest.raises(UserError, match="Dreamer's experts, and this model has none: it is MoEUT"):
        analyze.analyze("run", compare="la", out="nowhere")


def test_report_opens_in_a_browser_light_and_dark(analysed, tmp_path):
    from matplotlib.image import imread

    program, page = browser(), (analysed / "report.html").as_uri()
    shares = []
    for name, scheme in (("light", "1"), ("dark", "0")):
        shot = tmp_path / f"{name}.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,5200"]
        options += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={shot}"]
        done = subprocess.run([program, *options, page], capture_output=True, text=True, timeout=300)
        assert shot.exists(), done.stderr[-2000:]
        pixels = imread(shot)[..., :3].mean(axis=-1)
        background = float(np.median(pixels))
        assert background > 0.95 if name == "light" else background < 0.15
        drawn = np.abs(pixels - background) > 0.2
        shares.append(float(drawn.mean()))
        # Every fifth of the page has something on it: text alone would be under 5 %, the maps fill far more.
        assert all(part.any() for part in np.array_split(drawn, 5)) and shares[-1] > 0.05
    assert shares[0] == pytest.approx(shares[1], rel=0.6)
    words = [program, *options[:-2], "--dump-dom", page]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=300).stdout
    assert dom.count("<section>") == len(FIGURES) and "Gini coefficient of all experts" in dom
