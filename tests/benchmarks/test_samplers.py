"""`dreamer bench samplers`: what is counted of each sampler, on a model whose texts the engine gives too."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dreamer_jax.benchmarks import sampler_figures, samplers
from dreamer_jax.benchmarks.sampler_questions import Questions, of_records, of_task
from dreamer_jax.benchmarks.samplers import Setting
from dreamer_jax.cli.main import main
from dreamer_jax.cli.sampler_grid import read_grids
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.scoring import mean
from dreamer_jax.inference import SAMPLERS, Adaptive, Engine, LanguageModel, Lossless, Speculative, Static, fold
from tests.evaluation.cases import GSM8K, write_benchmarks
from tests.families.test_ouro import TINY, drawn_params

COMPARED = [Setting(Static()), Setting(Static(), 1), Setting(Adaptive("argmax-stability")), Setting(Speculative(2))]
PROMPTS = ("one", "another")


class Letters:
    """A tokenizer of 23 letters."""

    vocab_size, bos, eos, pad, fingerprint = 23, 1, 22, 0, ""

    def encode(self, text):
        return [ord(letter) % 23 for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token) for token in ids)


@functools.cache
def folded():
    return fold(TINY, drawn_params(TINY), {})


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run of three depths, and a file of two prompts."""
    config = SimpleNamespace(data=SimpleNamespace(prompt="{question}", source="jsonl"), model=TINY)
    model = SimpleNamespace(config=config, params=drawn_params(TINY), model_state={}, tokenizer=Letters())
    monkeypatch.setattr("dreamer_jax.model.load", lambda path, cache: model)
    monkeypatch.setattr(samplers, "settings_for", lambda depth: COMPARED)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return str(path)


def bench(run, *words):
    """The exit code, and what was written."""
    path = f"{run}.json"
    data = [] if "--data" in words else ["--data", run]
    code = main(["bench", "samplers", "x", *data, "--rounds", "1", "--json", path, *words])
    return code, json.loads(open(path).read()) if code == 0 else {}


@pytest.mark.slow
def test_a_setting_that_does_not_fit_is_left_out_and_named(run, capsys, monkeypatch, tmp_path):
    """The others are measured; of a figure's points only those that every batch size has are drawn. Without full depth
    there is nothing to compare with, and one line says so."""
    compiled = samplers.Side.compile

    def full(*labels):
        def compile_(side):
            engine = side._engine
            if len(side._groups[0]) == 2 and engine.model.total_depth in labels:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            compiled(side)

        monkeypatch.setattr(samplers.Side, "compile", compile_)

    full(1)
    words = ["--tokens", "4", "--batch", "1", "--batch", "2", "--depths", "1,2"]
    code, found = bench(run, *words, "--figure", str(tmp_path / "figures"))
    assert code == 0 and found["refused"] == {"static, depth 1, batch 2": "it doesn't fit into memory"}
    both = ["static", "static, depth 1", "static, depth 2"]
    assert [list(its) for its in found["batches"].values()] == [both, [both[0], both[2]]]
    full(3)
    capsys.readouterr()
    assert bench(run, *words)[0] == 2 and "memory" in capsys.readouterr().err


def test_counts_are_those_of_the_engine(run, capsys):
    code, found = bench(run, "--tokens", "6", "--batch", "2")
    assert code == 0 and found["refused"] == {} and found["questions"] == 2
    full, fewer, adaptive, speculative = found["batches"]["2"].values()
    assert list(found["batches"]["2"])[1] == "static, depth 1"
    assert full["steps"] == full["work"] == 3 and full["agreement"] == full["speedup"] == 1
    assert full["acceptance"] is None and full["accuracy"] == {}
    assert fewer["steps"] == 1 and fewer["agreement"] < 1
    assert 1 <= adaptive["steps"] <= 3  # it needs six checks, so it takes all
    assert adaptive["agreement"] == 1
    assert speculative["agreement"] == 1 and 0 <= speculative["acceptance"] <= 1
    sides = found["batches"]["2"].values()
    assert all(side["tokens_per_second"] > 0 for side in sides)
    assert speculative["speedup"] == speculative["tokens_per_second"] / full["tokens_per_second"]
    rows = Engine(folded(), Speculative(2)).generate([[1, *Letters().encode(text)] for text in PROMPTS], 6)
    assert speculative["steps"] == sum(row.steps for row in rows) / 10
    table = capsys.readouterr().out
    assert "agreement" in table and "speculative-lookahead-2" in table


def test_smaller_batches_count_the_same_and_answers_are_judged(run):
    """Texts end where those of `dreamer eval` do, and each is right or wrong; the counts are those of all prompts."""
    prompts = [[1, *Letters().encode(text)] for text in PROMPTS]
    whole = LanguageModel(Engine(folded()), Letters()).generate(prompts, 6)
    stop = whole[1].text[3:5]  # ends the second text
    texts = LanguageModel(Engine(folded()), Letters()).generate(prompts, 6, stop=[stop])
    assert len(texts[1].text) < len(whole[1].text)
    golds = [f" {texts[0].text}\n", "wrong"]
    records = [{"prompt": text, "answer": gold} for text, gold in zip(PROMPTS, golds, strict=True)]
    with open(run, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    words = ["--tokens", "6", "--batch", "1", "--limit", "2", "--stop", stop, "--vary", "speculative.lookahead=2"]
    found = bench(run, *words)[1]
    full, speculative = found["batches"]["1"].values()
    for side in (full, speculative):
        assert side["agreement"] == 1
        assert side["accuracy"]["exact"] == {"value": 0.5, "error": mean([1, 0]).error}
    assert full["steps"] == 3
    assert found["grids"] == {
        "speculative.lookahead": [{"value": "2", "others": "", "label": "speculative-lookahead-2"}]
    }


def test_what_a_model_refuses_is_named(run, capsys):
    words = ["--tokens", "2", "--batch", "1", "--depths", "2", "--vary", "lossless.guess_depth=7"]
    code, found = bench(run, *words, "--vary", "cache=none")
    assert code == 0 and list(found["batches"]["1"]) == ["static", "static, depth 2"]
    assert "less than the depth of the model" in found["refused"]["lossless-guess_depth-7"]
    assert "model.cache: expected one of loops, " in found["refused"]["static, cache none"]
    assert "lossless-guess_depth-7: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "1", "--tokens", "1"], "take 2 or more"),
        (["--batch", "9"], "2 prompts are too few for a batch of 9"),
        (["--data", "missing.jsonl"], "no such file"),
        (["--figure", "f"], "name one with --vary or --depths"),
        (["--vary", "x"], "--vary 'x': give SAMPLER.KEY=VALUE"),
        (["--vary", "adaptive.threshold"], "SAMPLER.KEY=VALUE"),
        (["--vary", "adaptiv.threshold=1"], "did you mean 'adaptive'"),
        (["--vary", "adaptive.treshold=1"], "did you mean '--vary adaptive.threshold'"),
        (["--vary", "adaptive.threshold=1,1"], "given twice"),
        (["--vary", "adaptive.every=1", "--vary", "adaptive.every=2"], "one takes all values"),
        (["--vary", "adaptive.every=x"], "--vary adaptive.every"),
        (["--vary", "adaptive.every=1", "lossless.wavefront=2"], "are two samplers"),
        (["--depths", "4,x"], "'x' is not an integer"),
        (["--task", "ppl"], "answered in texts: gsm8k, math"),
    ],
)
def test_mistakes_are_explained(run, capsys, words, message):
    assert bench(run, *words)[0] == 2
    assert message in capsys.readouterr().err


def test_a_place_that_takes_no_file_is_said_before_anything_is_measured(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    assert main(["bench", "samplers", "no run", "--data", str(prompts), "--json", str(tmp_path)]) == 2
    assert f"--json {tmp_path}: is a folder; name a file" in capsys.readouterr().err


def test_what_is_compared():
    """Full depth first; parts of it that are fewer depths; every criterion; every sampler."""
    every = list(samplers.settings_for(8))
    assert every[0] == Setting(Static())
    assert [its.depth for its in every if its.sampler == Static()] == [None, 1, 2, 4]
    assert {its.sampler.name for its in every} == set(SAMPLERS)
    assert [its.depth for its in samplers.settings_for(2) if its.sampler == Static()] == [None, 1]


def test_grids_cross_the_settings_of_a_sampler():
    depths, crossed, caches = read_grids(
        [["lossless.guess_depth=1,2", "lossless.wavefront=4,8"], ["cache=full,latest", "adaptive.criterion=kl"]], "4,8"
    )
    assert [point[2] for point in depths.points] == [Setting(Static(), 4), Setting(Static(), 8)]
    assert crossed.name == "lossless.guess_depth"
    assert list(crossed.points) == [
        (str(depth), f"wavefront {lanes}", Setting(Lossless(depth, lanes))) for depth in (1, 2) for lanes in (4, 8)
    ]
    assert caches.points[1] == ("latest", "criterion kl", Setting(Adaptive("kl"), None, "latest"))
    assert caches.points[1][2].label == "adaptive-criterion-kl, cache latest"


def test_answers_of_a_benchmark_are_judged_by_its_rules(tmp_path):
    data = write_benchmarks(tmp_path / "data")
    questions = of_task("gsm8k", str(data), 0, True).first(3)
    assert questions.prompts[0] == f"Question: {GSM8K[0][0]}\nAnswer: " and questions.max_tokens == 256
    found = questions.accuracy(["#### 7", "it is 12,500", "no"])
    assert (found["strict"].value, found["flexible"].value) == (1 / 3, 2 / 3)
    # Records without prompt and answer of their own have nothing to be judged by.
    assert of_records([({"question": "?", "answer": "!"}, "? ")]) == Questions(["? "], [])


def test_figures_show_speed_against_shares():
    """Three points on two curves: their places, and the cross of full depth."""
    from matplotlib.figure import Figure

    def side(steps, speedup, agreement, accuracy):
        its = {"steps": steps, "speedup": speedup, "agreement": agreement}
        return its | {"accuracy": {"exact": {"value": accuracy, "error": 0.1}}}

    sides = {
        "static": side(8, 1, 1, 0.9),
        "a": side(4, 1.5, 0.8, 0.6),
        "b": side(2, 3, 0.5, 0.4),
        "c": side(1, 4, 0, 0),
    }
    points = [{"value": v, "others": o, "label": v} for v, o in (("a", "x 1"), ("b", "x 1"), ("c", "x 2"))]
    canvas = Figure()
    theme = {"lines": ("red", "blue"), "text": "black"}
    sampler_figures._panels(canvas, theme, {"batches": {"1": sides}}, "name", points)
    steps, speeds = canvas.axes
    lines = {line.get_label(): np.array(line.get_data()).T.tolist() for line in steps.lines}
    assert lines["exact, x 1"] == [[2, 0.6], [4, 0.4]] and lines["agreement, x 2"] == [[8, 0]]
    assert np.array(speeds.lines[0].get_data()).T.tolist() == [[1.5, 0.6], [3, 0.4]]
    crosses = [line.get_data() for line in steps.lines if line.get_marker() == "x"]
    assert [float(np.asarray(y).item()) for _, y in crosses] == [0.9, 1]
    assert [text.get_text() for text in steps.texts][:2] == ["a", "b"]


def test_texts_without_a_second_token_have_no_speed(tmp_path):
    """Every text ended with the token that comes of the prompt."""
    side = {"steps": 0, "speedup": None, "agreement": 1.0, "accuracy": {}}
    found = {"batches": {"1": {"static": side, "a": side}}, "refused": {}}
    found["grids"] = {"depth": [{"value": "2", "others": "", "label": "a"}]}
    assert [path.name for path in sampler_figures.draw(found, tmp_path)] == ["depth.png", "depth.svg"]


def test_a_single_prompt_has_no_standard_error_and_a_single_token_no_speed(run, tmp_path, capsys):
    (tmp_path / "one.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n')
    words = ["--data", str(tmp_path / "one.jsonl"), "--batch", "1", "--tokens", "2", "--rounds", "1"]
    words += [word for letter in Letters().decode(range(23)) for word in ("--stop", letter)]
    file = tmp_path / "found.json"
    assert main(["bench", "samplers", "x", *words, "--json", str(file)]) == 0
    side = json.loads(file.read_text(), parse_constant=pytest.fail)["batches"]["1"]["static"]
    assert [side[key] for key in ("tokens_per_second", "speedup", "steps", "work")] == [None] * 4
    assert side["accuracy"] == {"exact": {"value": 0.0, "error": None}}
    table = capsys.readouterr().out
    assert "1 prompt, up to 2 tokens" in table and "nan" not in table
    assert ["static", *["-"] * 4, "100.0%"] in [line.split()[:6] for line in table.splitlines()]


def test_too_few_prompts():
    with pytest.raises(UserError, match="too few"):
        samplers.Task(Questions(["a"]), [2])
