"""Studies: what their files say, that members cost the same, what is compared, and that nothing is made twice."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dreamer_jax import program_cache
from dreamer_jax.cli.main import main
from dreamer_jax.config import Config, load_config
from dreamer_jax.config.loading import split_words
from dreamer_jax.configs import names
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.evaluation.comparison import data_efficiency
from dreamer_jax.studies import comparison, jobs
from dreamer_jax.studies import study as study_module
from dreamer_jax.studies.difficulty import difficulties
from dreamer_jax.studies.entrants import describe, entrants, warnings
from dreamer_jax.studies.expert_use import SETTINGS as COUNTED
from dreamer_jax.studies.study import conduct, measured
from dreamer_jax.studies.study_file import only, quick, read_study, settled
from dreamer_jax.studies.study_plan import plan

STUDY = """
baseline: plain
seeds: 2
tasks:
  easy: {tokens: 1000, metric: held-out, data: {difficulty: 1, sequence_length: 32, heldout_records: 8, loss: answer}}
  hard: {tokens: 100, data: {difficulty: 2, sequence_length: 64}, training: {batch_size: 8}}
training: {batch_size: 16, warmup_steps: 2, remat: none, log_every: 4}
model: {vocab_size: 259, hidden_size: 16, dtype: float32, depth: 2}
members:
  plain: {model: {family: ouro, layers: 1, heads: 2, kv_heads: 2, head_size: 8, mlp_size: 40}}
  looped: {model: {family: recursive, layers: 1, heads: 2, kv_heads: 2, head_size: 8}}
  as_is: {match: none, training: {batch_size: 4}, model: {family: ouro, layers: 1, heads: 2, kv_heads: 2, head_size: 8}}
"""


def written(folder: Path, text: str = STUDY) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def test_a_task_comes_before_a_member_and_the_command_line_last(tmp_path):
    study = read_study(written(tmp_path))
    easy, hard = study.tasks
    plain, _, as_is = study.members
    config = study.configuration(hard, plain, []).config
    assert (config.training.batch_size, config.data.sequence_length) == (8, 64)
    assert config.training.steps == 1  # 100 tokens are less than 8 rows of 64
    assert study.configuration(easy, plain, []).config.training.steps == 2  # 1000 / (16 rows of 32), rounded up
    assert study.configuration(easy, plain, [], share=0.5).config.training.steps == 1
    assert study.configuration(hard, as_is, []).config.training.batch_size == 4
    words = split_words(["--training.batch_size", "2"])
    assert study.configuration(hard, as_is, words).config.training.batch_size == 2
    assert quick(study).seeds == 1 and quick(study).tasks[0].tokens == 63
    assert [task.name for task in only(study, ["hard"]).tasks] == ["hard"]
    with pytest.raises(UserError, match="there is no task tough; the study has easy, hard"):
        only(study, ["hard", "tough"])
    with pytest.raises(UserError, match="there is no member spiral; the study has plain, looped, as_is"):
        only(study, members=["spiral"])


def test_a_base_of_a_member_leaves_the_rows_to_the_task(tmp_path):
    """Else members of one table would read rows of other lengths; what the study doesn't say is the base's."""
    (tmp_path / "base.yaml").write_text("model: {depth: 3}\ndata: {sequence_length: 512}\ntraining: {batch_size: 64}\n")
    path = tmp_path / "based.yaml"
    path.write_text(
        "baseline: a\ntraining: {batch_size: 4}\ntasks: {boolean: {tokens: 512, data: {sequence_length: 64}}}\n"
        "members: {a: {base: base.yaml}, b: {base: base.yaml, training: {batch_size: 8}}}\n"
    )
    study = read_study(path)
    a, b = (study.configuration(study.tasks[0], member, []).config for member in study.members)
    assert (a.model.depth, a.data.sequence_length, a.training.batch_size, a.training.steps) == (3, 64, 4, 2)
    assert (b.data.sequence_length, b.training.batch_size) == (64, 8)


def test_steps_of_a_base_are_not_those_of_a_study(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {steps: 7, log_every: 3}\n")
    text = "base: base.yaml\n" + STUDY.replace(", log_every: 4", "")
    study = read_study(written(tmp_path, text))
    training = study.configuration(study.tasks[0], study.members[0], []).config.training
    assert (training.steps, training.log_every) == (2, 3)
    with pytest.raises(ConfigError, match=r"^command line: training\.steps: a study has `tokens`"):
        study.configuration(study.tasks[0], study.members[0], split_words(["--training.steps", "7"]))


def test_a_shorter_run_keeps_the_proportions_of_its_schedule(tmp_path):
    text = STUDY.replace("warmup_steps: 2", "warmup_steps: 8, schedule: trapezoid, cooldown_steps: 16")
    study = read_study(written(tmp_path, text.replace("tokens: 1000", "tokens: 16384")))
    plain, task = study.members[0], study.tasks[0]

    def schedule(study, share=1.0):
        training = study.configuration(study.tasks[0], plain, [], share).config.training
        return training.steps, training.warmup_steps, training.cooldown_steps

    assert schedule(study) == (32, 8, 16)
    assert schedule(study, share=0.25) == (8, 2, 4)
    assert schedule(quick(study)) == (2, 0, 1)
    assert task.tokens == 16 * quick(study).tasks[0].tokens


@pytest.mark.parametrize("name", names(["study"]))
def test_studies_of_the_package_can_be_quick_and_their_sweeps_short(name):
    study = read_study(name)
    if study.sweep:
        tried = quick(study).sweep
        assert tried and tried.values == study.sweep.values[:2] and tried.share == study.sweep.share
    for task, member in itertools.product(study.tasks, study.members):
        for share in (1.0, study.sweep.share if study.sweep else 1.0):
            whole = study.configuration(task, member, [], share).config.training.steps
            short = quick(study).configuration(quick(study).tasks[study.tasks.index(task)], member, [], share)
            assert 1 <= short.config.training.steps < whole


def test_a_layered_member_is_evaluated_at_the_depths_that_it_has(tmp_path, monkeypatch):
    text = STUDY.replace("seeds: 2", "seeds: 1\nmatch: none\ndepths: [1, 2, 4]")
    layered = "{family: dreamer, variant: LA, sa_heads: 2, sa_kv_heads: 1, sa_head_size: 8, num_experts: 4}"
    text += f"  layered: {{model: {layered}}}\n"
    asked: dict[str, str] = {}
    monkeypatch.setattr(
        study_module, "run_jobs", lambda jobs, *_: asked.update((job.name, job.depths) for job in jobs) or 75
    )
    conduct(read_study(written(tmp_path, text)), [], tmp_path, 1, lambda _: None)
    assert asked["easy/layered/seed0"] == "1,2" and asked["easy/plain/seed0"] == "1,2,4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("baseline: plain", "baseline: none", "small.yaml:2: baseline: there is no member 'none'; there are plain"),
        ("baseline: plain", "", "small.yaml: 'baseline:' is missing"),
        ("seeds: 2", "seeds: 0", "small.yaml:3: seeds: 0: must be 1 or more"),
        ("seeds: 2", "seed: 2", "small.yaml:3: unknown key 'seed'; a study has baseline, seeds"),
        ("tokens: 100,", "", "tasks.hard: 'tokens:' is missing"),
        ("metric: held-out", "metric: heldout", "small.yaml:5: metric: 'heldout' is none of loss, held-out, gsm8k"),
        ("match: none", "match: no", "match: 'no' is none of both, flops, params, none"),
        ("match: none", "macht: none", "small.yaml:12: members.as_is: unknown key 'macht'"),
        ("as_is:", "../as:", "'../as' can't be the name of a folder"),
        ("layers: 1, heads", "layres: 1, heads", "model.layres"),
        ("seeds: 2", "sweep: {key: training.learning_rate, values: 3, share: 0.5}", "sweep.values: expected a list"),
        (
            "seeds: 2",
            "sweep: {key: training.learning_rate, values: [1], share: 2}",
            "sweep.share: 2.0: must be above 0",
        ),
        ("seeds: 2", "sweep: {key: training.learning_rate, values: [], share: 1}", "sweep.values: expected a list"),
        (
            "seeds: 2",
            "sweep: {key: training.learning_rate, values: [1e-3, 0.001], share: 1}",
            "sweep.values: 0.001 stands there twice",
        ),
        ("seeds: 2", "sweep: {key: training.learning_rate, values: [1]}", "sweep: 'share:' is missing; it needs key"),
        ("seeds: 2", "depths: [0, 2]", "small.yaml:3: depths: 0: must be 1 or more"),
        ("metric: held-out", "metric: gsm8k", "metric gsm8k is no benchmark of evaluation.tasks"),
        ("batch_size: 16,", "batch_size: 16, steps: 3,", "training.steps: a study has `tokens` in its place"),
        ("\ntraining: {", "\nrun: {seed: 7}\ntraining: {", "run.seed: a study has `seeds` in its place"),
        ("\ntraining: {", "\nrun: {dir: x}\ntraining: {", "run.dir: a study has --out in its place"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_one_line(tmp_path, capsys, old, new, message):
    path = written(tmp_path, STUDY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r".*") as error:
        study = read_study(path)
        for task, member in itertools.product(study.tasks, study.members):
            study.configuration(task, member, [])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert main(["study", str(path), "--plan", "--slice", "v5e:1x1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_of_a_study_lie_in_its_folder(tmp_path, capsys):
    assert main(["study", str(written(tmp_path)), "--plan", "--run.dir", "x"]) == 2
    assert "name the folder with --out" in capsys.readouterr().err
    assert main(["study", str(written(tmp_path)), "--plan", "--run.seed", "7"]) == 2
    assert "name the seeds of its runs with --seeds" in capsys.readouterr().err
    assert read_study(written(tmp_path, STUDY.replace("seeds: 2", "instances: 0"))).instances == 0


def test_a_folder_that_can_not_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["study", str(written(tmp_path)), "--out", str(folder)]) == 2
        assert f"{folder} can't be made: " in capsys.readouterr().err


def test_a_value_at_which_all_is_lost_is_shown_as_such():
    member = {"swept": {"1e-3": 2.0, "1e9": None}, "chosen": {"training.learning_rate": "1e-3"}}
    assert comparison.sweep_table({"members": {"a": member}}).splitlines()[2] == "| a | **2.000** | diverged |"


def test_members_are_given_the_costs_of_the_baseline(tmp_path):
    every = entrants(read_study(written(tmp_path)), [])
    assert [(each.task.name, each.member.name) for each in every[:3]] == [
        ("easy", "plain"),
        ("easy", "looped"),
        ("easy", "as_is"),
    ]
    plain, looped, as_is = map(describe, every[:3])
    assert abs(looped["flops_per_token"] / plain["flops_per_token"] - 1) < 0.01
    assert looped["matched"]["mlp_size"] != 384 and "matched" not in as_is  # 384 is what isn't asked for
    assert looped["gaps_percent"]["flops_per_token"] == pytest.approx(
        100 * (looped["flops_per_token"] / plain["flops_per_token"] - 1), abs=0.01
    )


def test_a_member_that_cannot_have_the_cost_is_named(tmp_path, monkeypatch):
    """Before anything is trained, and in the plan: the smallest feed-forward there is leaves it with too much else."""
    said: list[str] = []
    monkeypatch.setattr(study_module, "run_jobs", lambda *_: 75)
    conduct(read_study(written(tmp_path)), [], tmp_path, 1, said.append)
    assert not any("cost" in line for line in said)
    study = read_study(written(tmp_path, STUDY.replace("{family: recursive,", "{family: recursive, hidden_size: 32,")))
    conduct(study, [], tmp_path, 1, said.append)
    lines = [line for line in said if "isn't of plain's cost" in line]
    plain, looped = map(describe, entrants(study, [])[:2])
    more = 100 * (looped["flops_per_token"] / plain["flops_per_token"] - 1)
    assert more > 10 and f"easy/looped isn't of plain's cost: +{more:.1f} % FLOPs/token" in lines[0]
    assert [line.split()[0] for line in lines] == ["easy/looped", "hard/looped"]
    assert all(line in plan(study, [], "v5e:1x1", lambda _: None) for line in lines)


def test_members_whose_runs_end_in_their_warm_up_are_named(tmp_path):
    lines = warnings(entrants(read_study(written(tmp_path)), []), "plain")
    assert [line.split()[0] for line in lines] == ["hard/plain", "hard/looped", "hard/as_is"]
    assert lines[0].endswith("its runs end in their warm-up, after 1 of training.warmup_steps 2")


def test_a_cost_that_is_not_asked_for_is_not_missed(tmp_path):
    members = "members:\n  plain: {model: {variant: LA, num_experts: 16}}\n"
    for hold in ("flops", "params"):
        members += f"  {hold}: {{match: {hold}, model: {{variant: DR, num_experts: 8, expert_size: 8}}}}\n"
    study = read_study(written(tmp_path, STUDY.partition("members:")[0] + members))
    every = entrants(study, [])
    flops, params = (describe(each)["gaps_percent"] for each in every[1:3])
    assert abs(flops["flops_per_token"]) < 1 < abs(flops["params"])
    assert abs(params["params"]) < 1 < abs(params["flops_per_token"])
    assert [line for line in warnings(every, "plain") if "cost" in line] == []


def test_some_members_of_a_study_are_what_they_are_in_all_of_it(tmp_path):
    """The costs of a baseline that isn't trained itself are theirs all the same."""
    study = read_study(written(tmp_path))
    every = [each for each in entrants(study, []) if each.member.name != "plain"]
    some = entrants(only(study, members=["as_is", "looped"]), [])
    assert [each.loaded.config for each in some] == [each.loaded.config for each in every] and len(some) == 4


def test_a_study_is_given_more_seeds(tmp_path, monkeypatch):
    """Those that are named are run, also beyond the file's; a study that picks its seeds can't be told."""
    names: list[str] = []
    monkeypatch.setattr(study_module, "run_jobs", lambda jobs, *_: names.extend(job.name for job in jobs) or 75)
    more = only(read_study(written(tmp_path)), ["easy"], ["looped", "plain"], [4, 3, 4])
    conduct(more, [], tmp_path, 1, lambda _: None)
    assert names == ["easy/plain/seed4", "easy/looped/seed4", "easy/plain/seed3", "easy/looped/seed3"]
    assert "2 runs of each" in plan(more, [], "v5e:1x1", lambda _: None)
    assert quick(more).run_seeds == (4,)
    with pytest.raises(UserError, match="leave --seeds out"):
        only(dataclasses.replace(more, tries=2), seeds=[1])


def test_copies_cost_as_much_as_depth(tmp_path):
    """A token that stands twice in a model of half the depth costs what it costs once in the whole; tokens are counted
    once."""
    members = (
        STUDY.partition("members:")[0].replace("depth: 2", "depth: 4")
        + """members:
  plain: {model: {variant: DR, num_experts: 8, expert_size: 64}}
  copied: {model: {variant: DR, depth: 2}, data: {copies: 2}}
"""
    )
    plain, copied = map(describe, entrants(read_study(written(tmp_path, members)), [])[:2])
    assert copied["tokens"] == plain["tokens"]
    for name, within in (("flops_per_token", 0.01), ("parameters", 0.01), ("training_flops_per_token", 0.05)):
        assert abs(copied[name] / plain[name] - 1) < within, name


@pytest.mark.parametrize(("all_of_them", "alone"), [("{copies: 2}", "{}"), ("{}", "{copies: 2}")])
def test_a_baseline_of_copies_costs_what_it_costs_with_them(tmp_path, all_of_them, alone):
    members = (
        STUDY.partition("members:")[0].replace("depth: 2", "depth: 4")
        + f"""data: {all_of_them}
members:
  plain: {{model: {{variant: DR, num_experts: 16, expert_size: 64}}, data: {alone}}}
  other: {{model: {{variant: DR}}}}
"""
    )
    plain, other = map(describe, entrants(read_study(written(tmp_path, members)), [])[:2])
    for name in ("flops_per_token", "parameters", "training_flops_per_token"):
        assert abs(other[name] / plain[name] - 1) < 0.05, name


def test_a_plan_counts_all_runs(tmp_path):
    study = read_study(written(tmp_path))
    text = plan(study, [], "v5e:1x1", lambda _: None)
    total = sum(
        2 * describe(each)["training_flops_per_token"] * describe(each)["tokens"] for each in entrants(study, [])
    )
    assert f"2 runs of each: {total:.2e} training FLOPs" in text
    with pytest.raises(UserError, match="has 4 chips, and training"):
        plan(study, split_words(["--training.batch_size", "1"]), "v5e:2x2", lambda _: None)


def test_what_a_file_asks_for_since_then_is_made_up_for(tmp_path, monkeypatch):
    """A run that is complete but for an evaluation isn't; what is damaged is said."""
    made: list[str] = []
    monkeypatch.setattr(study_module, "run_jobs", lambda jobs, *_: made.extend(job.name for job in jobs) or 75)
    monkeypatch.setattr(jobs, "open_run", lambda loaded: None)
    monkeypatch.setattr(jobs, "locate_run", lambda run: SimpleNamespace(step=2))
    monkeypatch.setattr(study_module, "measured", lambda run, metric: {})
    run = tmp_path / "easy/plain/seed0"
    run.mkdir(parents=True)
    (run / "summary.json").write_text("{}")

    def missing(known: dict, asked: str = "depths: [1, 2]\ninstances: 4") -> bool:
        (run / "depth.json").write_text(json.dumps(known))
        made.clear()
        study = read_study(written(tmp_path, STUDY.replace("seeds: 2", asked)))
        conduct(only(study, ["easy"], ["plain"]), [], tmp_path, 1, lambda _: None)
        return made == ["easy/plain/seed0"]

    found = {"loss": 1.0}, {f"{level}/{depth}": 0.5 for level in (1, 2) for depth in (1, 2)}
    whole = {
        "step": 2,
        "depths": dict.fromkeys("12", found[0]),
        "difficulty": {"settings": {"instances": 4}, "found": found[1]},
        "experts": {"settings": COUNTED, "found": {"gini": {}}},
    }
    assert not missing(whole)
    assert missing(whole, "depths: [1, 2, 4]\ninstances: 4") and missing(whole, "instances: 4")  # 1, 2, 4 and 8
    assert missing(whole, "depths: [1, 2]\ninstances: 5") and not missing(whole, "depths: [1, 2]")
    assert missing({**whole, "depths": {}}) and missing({**whole, "step": 1})
    for part in ("difficulty", "experts"):
        assert missing({**whole, part: {"settings": whole[part]["settings"]}})
    with pytest.raises(UserError, match=r"depth\.json is damaged: a part of it isn't an object"):
        missing({**whole, "experts": []})
    with pytest.raises(UserError, match=r"seed0: its metrics\.jsonl has no records of training"):
        measured(run, "loss")
    monkeypatch.setattr(jobs, "locate_run", lambda run: SimpleNamespace(step=1))
    assert missing(whole)  # its last checkpoint is damaged
    for steps in (1, 3):
        (run / "config.yaml").write_text(f"training: {{steps: {steps}}}")
        for _ in ("complete", "begun"):
            with pytest.raises(UserError, match=f"seed0 is a run of {steps} steps, and this study's runs have 2; name"):
                missing(whole)
            (run / "summary.json").unlink(missing_ok=True)


# Comparing.


BASELINE = [(10.0, 0.1), (20.0, 0.3), (30.0, 0.5)]
FASTER = [(10.0, 0.5), (20.0, 0.6), (30.0, 0.7)]
WORSE = [(10.0, 0.05), (20.0, 0.1), (30.0, 0.2)]


def test_an_advantage_is_the_papers_data_efficiency_where_there_is_one():
    assert comparison.advantage(FASTER, BASELINE) == data_efficiency(FASTER, BASELINE) == 3.0
    assert comparison.advantage(BASELINE, BASELINE) == 1.0
    # Where nothing was learnt there is none, on either side.
    nothing = [(10, 0.0), (20, 0.0)]
    assert comparison.advantage(nothing, BASELINE) is None and comparison.advantage(BASELINE, nothing) is None


def test_an_advantage_below_one_is_the_others_advantage_turned_round():
    assert data_efficiency(WORSE, BASELINE) is None
    assert comparison.advantage(WORSE, BASELINE) == pytest.approx(15 / 30)  # 0.2 lies between 10 and 20 tokens
    assert comparison.advantage(BASELINE, WORSE) == pytest.approx(2.0)
    assert comparison.advantage([], BASELINE) is None
    assert comparison.advantage(FASTER, [(10, 0.0), (20, 0.0)]) is None  # nothing learned: every curve is there
    overfitted = [(10.0, 0.3), (20.0, 0.2), (30.0, 0.1)]  # it never gets as far, and was at its best before the others
    assert comparison.advantage(overfitted, BASELINE) == 2.0


def test_intervals_of_two_seeds_are_what_counting_all_draws_gives():
    member, baseline = [FASTER, BASELINE], [BASELINE, WORSE]
    runs = [[comparison.Run(curve) for curve in its] for its in (member, baseline)]
    draws = list(itertools.product(range(2), repeat=2))
    means = [[comparison.average([its[i] for i in drawn]) for drawn in draws] for its in (member, baseline)]
    every = [comparison.advantage(*both) or 0.0 for both in itertools.product(*means)]
    value, interval = comparison.efficiency(*runs)
    assert value == comparison.advantage(comparison.average(member), comparison.average(baseline))
    assert interval == pytest.approx(np.percentile(every, comparison.INTERVAL, method="closest_observation"))
    assert comparison.efficiency(runs[0][:1], runs[1][:1]) == (3.0, (3.0, 3.0))


def test_draws_of_seeds_that_learn_nothing_count():
    """Of three seeds two are lost: 8 of 27 draws have only those, which are as far behind as can be."""
    lost = [(tokens, 0.0) for tokens, _ in BASELINE]
    value, interval = comparison.efficiency(
        *([comparison.Run(c) for c in its] for its in ([BASELINE, lost, lost], [BASELINE]))
    )
    assert value and interval and 0 == interval[0] < value < interval[1]


def test_intervals_of_one_seed_are_over_parts_of_what_is_held_out():
    """All three draws of two parts, counted by hand."""

    def run(*points: tuple[tuple[int, int], tuple[int, int]]) -> dict:
        """Right answers and answers in both parts, at 10, 20, ... tokens."""
        parts = [[[right for right, _ in point], [count for _, count in point]] for point in points]
        curve = [[10 * (i + 1), sum(its[0]) / sum(its[1])] for i, its in enumerate(parts)]
        return {"seeds": {"0": {"curves": {"held-out": curve}, "parts": parts}}}

    member = comparison.seeds_of(run(((0, 4), (4, 4)), ((4, 4), (4, 4))), "held-out")
    baseline = comparison.seeds_of(run(((0, 4), (0, 4)), ((4, 4), (4, 4))), "held-out")
    value, interval = comparison.efficiency(member, baseline)
    # Drawn twice, the first part says 20 / 20, and the second 20 / 10; both together 20 / 20. Each once is half of it.
    assert (value, interval) == (1.0, (1.0, 2.0))
    assert member[0].over(np.array([[0, 2], [2, 0]])).tolist() == [[1.0, 1.0], [0.0, 1.0]]
    losses = run(((4, 4), (8, 4)))
    losses["seeds"]["0"]["curves"]["loss"] = losses["seeds"]["0"]["curves"].pop("held-out")
    assert comparison.seeds_of(losses, "loss")[0].over(np.array([[1, 1]])).tolist() == [[-1.5]]


def test_seeds_that_were_measured_at_other_tokens_have_nothing_to_compare():
    runs = [comparison.Run([(10.0, 0.5)]), comparison.Run([(20.0, 0.5)])]
    assert comparison.efficiency(runs, runs[:1]) == (None, None)
    assert comparison.efficiency(runs[:1], runs[1:]) == (2.0, (2.0, 2.0))


def test_parts_are_those_of_the_evaluations_that_count(tmp_path):
    """A run was killed behind its evaluation at step 12, and went on from step 10 with evaluations every 5 steps."""

    def write(name: str, *records: dict) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    kept = [{"step": step, "loss": [step], "targets": [1], "exact": [0], "answers": [0]} for step in (6, 12, 15)]
    write("heldout.jsonl", *kept)
    write("metrics.jsonl", *({"step": step, "loss": 2.0, "heldout/loss": step} for step in (6, 15)), {"step": 16})
    assert study_module._parts(tmp_path, "loss") == [[[6], [1]], [[15], [1]]]
    write("heldout.jsonl", *kept[1:])
    assert study_module._parts(tmp_path, "loss") == study_module._parts(tmp_path, "gsm8k") == []


def test_parts_without_rows_are_not_drawn():
    """Few held-out rows fill few parts. A draw of empty ones would be a loss of zero, and count as the best of all."""

    def runs(*losses: float) -> list[comparison.Run]:
        parts = [[[loss, *[0] * 31], [1, *[0] * 31]] for loss in losses]
        curve = [[10 * (i + 1), loss] for i, loss in enumerate(losses)]
        return comparison.seeds_of({"seeds": {"0": {"curves": {"loss": curve}, "parts": parts}}}, "loss")

    assert comparison.efficiency(runs(2, 1.5, 1), runs(4, 3, 2)) == (3.0, (3.0, 3.0))


def test_of_two_seeds_the_better_one_after_a_quarter_goes_on(tmp_path, monkeypatch):
    """Section 4.1 of the paper."""
    made: list[str] = []
    steps: dict[str, int] = {}

    def remember(jobs: list, *_: object) -> int:
        made.extend(job.name for job in jobs)
        steps.update((job.name, job.loaded.config.training.steps) for job in jobs)
        return 0

    monkeypatch.setattr(study_module, "run_jobs", remember)
    monkeypatch.setattr(study_module, "_last_loss", lambda run: {"try0": 2.0, "try1": 1.0}.get(run.name, 3.0))
    text = STUDY.replace("seeds: 2", "seeds: 2\ntries: 2").replace("tokens: 1000", "tokens: 4096")
    result, code = conduct(read_study(written(tmp_path, text)), [], tmp_path, 1, lambda _: None)
    assert code == 0 and result["tasks"]["easy"]["members"]["plain"]["seeds"] == {}
    of_plain = [name.rpartition("/")[2] for name in made if name.startswith("easy/plain/")]
    assert of_plain == ["try0", "try1", "try2", "try3", "seed1", "seed2"]
    assert (steps["easy/plain/try0"], steps["easy/plain/seed1"]) == (2, 8)


SWEPT = STUDY.replace("seeds: 2", "seeds: 1\nsweep: {key: model.KEY, values: [VALUES], share: 0.5}")


def test_a_sweep_tries_settings_of_models_too(tmp_path, monkeypatch):
    """Those of the baseline as of the others, which keep the sizes that matching gave them."""
    models = {}
    monkeypatch.setattr(
        study_module,
        "run_jobs",
        lambda jobs, *_: models.update((job.name, job.loaded.config.model) for job in jobs) or 75,
    )
    study = read_study(written(tmp_path, SWEPT.replace("KEY", "init_std").replace("VALUES", "0.01, 0.03")))
    conduct(study, [], tmp_path, 1, lambda _: None)
    for entrant in entrants(study, [])[:3]:
        tried = [models[f"easy/{entrant.member.name}/sweep-{value}"] for value in ("0.01", "0.03")]
        assert tried == [dataclasses.replace(entrant.loaded.config.model, init_std=std) for std in (0.01, 0.03)]


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("init_std", "0.01, much", "small.yaml:4: sweep: model.init_std: expected a number, got 'much'"),
        ("init_stud", "0.01", "small.yaml:4: sweep: unknown option '--model.init_stud'"),
        ("init_std", "0.01, -1", "small.yaml:4: sweep: model.init_std: -1.0 is too small"),
    ],
)
def test_faults_of_a_sweep_are_named_where_it_is_written(tmp_path, capsys, key, values, message):
    path = written(tmp_path, SWEPT.replace("KEY", key).replace("VALUES", values))
    assert main(["study", str(path), "--plan", "--slice", "v5e:1x1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("key", "values"), [("depth", "2, 4"), ("mlp_size", "16, 40")])
def test_a_sweep_does_not_change_costs_that_are_to_be_equal(tmp_path, capsys, key, values):
    swept = SWEPT.replace("KEY", key).replace("VALUES", values)
    path = written(tmp_path, swept)
    assert main(["study", str(path), "--plan", "--slice", "v5e:1x1"]) == 2
    assert f"sweep: model.{key} " in capsys.readouterr().err
    entrants(read_study(written(tmp_path, swept.replace("tasks:", "match: none\ntasks:"))), [])  # nothing is equal


def test_tries_are_made_with_what_a_sweep_has_found(tmp_path, monkeypatch):
    rates: dict[str, float] = {}

    def remember(jobs: list, *_: object) -> int:
        rates.update((job.name, job.loaded.config.training.learning_rate) for job in jobs)
        return 0

    monkeypatch.setattr(study_module, "run_jobs", remember)
    monkeypatch.setattr(study_module, "_last_loss", lambda run: {"sweep-9e-3": 1.0}.get(run.name, 3.0))
    sweep = "seeds: 1\ntries: 2\nsweep: {key: training.learning_rate, values: [7e-3, 9e-3], share: 0.5}"
    study = read_study(written(tmp_path, STUDY.replace("seeds: 2", sweep)))
    conduct(study, [], tmp_path, 1, lambda _: None)
    for name in ("sweep-9e-3", "try0", "try1", "seed0"):
        assert rates[f"easy/plain/{name}"] == rates[f"easy/looped/{name}"] == 9e-3, name


def test_lower_losses_are_better_and_shown_as_they_are():
    def member(*losses: float) -> dict:
        curve = [[10 * (i + 1), loss] for i, loss in enumerate(losses)]
        costs = {"parameters": 1, "flops_per_token": 1, "training_flops_per_token": 3, "memory_bytes": 1, "depth": 2}
        seed = {"curves": {"loss": curve}, "tokens_per_second": 5.0, "by_depth": {"1": 9.0, "2": losses[-1]}}
        seed |= {"gini": {"expert_attention": losses[-1] / 2}, "gini_tokens": 4096}
        seed["by_difficulty"] = {"1/2": 0.5, "1/4": 0.75, "2/2": losses[-1] / 4, "2/4": 0.0}
        return costs | {"seeds": {"0": seed}}

    its = {"tokens": 30, "metric": "loss", "members": {"a": member(3, 2, 1), "b": member(2, 1, 0.5)}}
    result = {"baseline": "a", "tasks": {"text": its}}
    first, second = comparison.rows_of(result, "text")
    assert (first["best"], first["efficiency"]) == ((1.0, (1.0, 1.0)), 1.0)
    assert (second["best"][0], second["efficiency"]) == (0.5, 1.5)
    assert "| b | 1 | 0.00 M | 0.00 M | 0.00 MiB | 5 | 1 | 0.500 | 1.50 |" in comparison.markdown(result)
    assert "| b | 9.000 | **0.500** |" in comparison.markdown(result)
    assert "| right at difficulty | depth | 1 | 2 |" in comparison.markdown(result)
    assert "| b | **2** | 0.500 | 0.125 |\n| b | 4 | 0.750 | 0.000 |" in comparison.markdown(result)
    assert (
        "| Gini of expert use in 4,096 tokens | `expert_attention` |\n| --- | --- |\n| a | 0.50 |\n| b | 0.25 |"
        in comparison.markdown(result)
    )
    others = {**result, "baseline": "c"}  # which wasn't trained
    assert [row["efficiency"] for row in comparison.rows_of(others, "text")] == [None, None]
    its["members"]["b"]["seeds"]["0"]["gini_tokens"] = 65536  # counted in other tokens, and the table says so
    assert (
        "| Gini of expert use | `expert_attention` | tokens |\n| --- | --- | --- |\n"
        "| a | 0.50 | 4,096 |\n| b | 0.25 | 65,536 |" in comparison.markdown(result)
    )
    its["members"]["b"]["seeds"]["1"] = {**its["members"]["b"]["seeds"]["0"], "gini_tokens": 4096, "gini": {"x": 0.9}}
    assert "| b | 0.25 | 65,536 |" in comparison.gini_table(its)  # a mean over both would be of neither number


# Running. What stands for the program notes its words, its cores and how many are at work, and does as it is told.

STAND_IN = """
import os, sys, time, signal, pathlib
command, config = sys.argv[1:3]
name = pathlib.Path(config).stem
here = pathlib.Path({folder!r})
with (here / "notes").open("a") as notes:
    notes.write(f"{{command}} {{name}} {{len(os.sched_getaffinity(0))}}\\n")
print("hello from", name, flush=True)
if name == "seed7":
    sys.exit("no such data\\n")
if name == "seed9":
    sys.exit("dreamer: error: no finite loss: training has diverged; a lower rate\\n")
if name == "seed8":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit((here / "saved").touch() or 75))
    (here / "ready").touch()
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "program.py"
    script.write_text(STAND_IN.format(folder=str(tmp_path)))
    monkeypatch.setattr(jobs, "PROGRAM", (sys.executable, str(script)))

    def job(seed: int, depths: str = "") -> jobs.Job:
        study = read_study(written(tmp_path))
        words = split_words([f"--run.dir={tmp_path}/runs/seed{seed}"])
        return jobs.Job(f"seed{seed}", study.configuration(study.tasks[0], study.members[0], words), depths)

    return job


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def test_a_run_is_trained_and_then_evaluated(tmp_path, stand_in):
    said: list[str] = []
    assert jobs.run_jobs([stand_in(0, "1,2"), stand_in(1)], tmp_path, 1, said.append) == 0
    cores = len(os.sched_getaffinity(0))
    assert notes(tmp_path) == [f"train seed0 {cores}", f"depth seed0 {cores}", f"train seed1 {cores}"]
    assert "2/2 seed1 is complete" in said[-1]
    assert (tmp_path / "logs/seed0.log").read_text() == "hello from seed0\n" * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="cores can't be shared")
def test_runs_at_once_share_the_cores(tmp_path, stand_in):
    assert jobs.run_jobs([stand_in(seed) for seed in range(4)], tmp_path, 2, lambda _: None) == 0
    assert {line.rpartition(" ")[2] for line in notes(tmp_path)} == {str(len(os.sched_getaffinity(0)) // 2)}


def test_the_time_that_is_left_counts_runs_that_are_half_made():
    """Eight runs of 10 s, two at a time, one ending every 5 s: the last at 45 s."""
    assert jobs._left(45, 8, 0, 8) == 0
    for done in range(2, 8):
        ended = 10 + 5 * (done - 1)
        assert jobs._left(ended, done, 1, 8) == pytest.approx(45 - ended, abs=4)
    assert jobs._left(20, 2, 0, 8) == 60  # one at a time


def test_one_seed_of_all_members_comes_before_the_next(tmp_path, monkeypatch):
    """So that runs at once compile different programs, and those of later seeds are there already."""
    made: list[str] = []
    monkeypatch.setattr(study_module, "run_jobs", lambda jobs, *_: made.extend(job.name for job in jobs) or 75)
    conduct(read_study(written(tmp_path)), [], tmp_path, 1, lambda _: None)
    assert [name.rpartition("/")[2] for name in made] == ["seed0"] * 6 + ["seed1"] * 6


@pytest.mark.parametrize(("share", "first"), [("0.5", "seed0"), ("1", "sweep-{}")])
def test_the_best_of_a_sweep_goes_on(share, first, tmp_path, monkeypatch):
    """Every member at its own; and where the sweep had all tokens, its run is that of the first seed."""
    made: dict[str, Config] = {}

    def train(jobs, *_) -> int:
        made.update({job.name: job.loaded.config for job in jobs})
        return 0 if "sweep-" in jobs[-1].name and not jobs[-1].depths else 75

    best = {"plain": "1e-3", "looped": "4e-3", "as_is": "2e-3"}
    monkeypatch.setattr(study_module, "run_jobs", train)
    monkeypatch.setattr(study_module, "_last_loss", lambda run: abs(float(run.name[6:]) - float(best[run.parent.name])))
    values = "values: [1e-3, 2e-3, 4e-3]"
    text = STUDY.replace("seeds: 2", f"seeds: 2\nsweep: {{key: training.learning_rate, {values}, share: {share}}}")
    study = read_study(written(tmp_path, text))
    result, _ = conduct(study, [], tmp_path, 1, lambda _: None)
    for member, value in best.items():
        runs = [f"easy/{member}/{name}" for name in (first.format(value), "seed1")]
        assert [made[name].training.learning_rate for name in runs] == [float(value)] * 2
        assert [made[name].training.steps for name in runs] == [2 if member != "as_is" else 8] * 2
        assert not first.startswith("sweep") or f"easy/{member}/seed0" not in made
    its = result["tasks"]["easy"]["members"]["looped"]
    assert its["chosen"] == {"training.learning_rate": "4e-3"} and its["swept"]["1e-3"] == pytest.approx(3e-3)
    swept = comparison.sweep_table(result["tasks"]["easy"]).splitlines()
    assert swept[0] == "| loss by `training.learning_rate` | 1e-3 | 2e-3 | 4e-3 |"
    assert swept[3] == "| looped | 0.003 | 0.002 | **0.000** |"
    assert f"{4 if share == '1' else 3.5:g} runs of each" in plan(study, [], "v5e:1x1", lambda _: None)


def test_the_value_of_a_sweep_can_be_given(tmp_path, monkeypatch):
    """Nothing is tried then, and further seeds are made as they would be after a sweep that chose it."""
    made: dict[str, Config] = {}

    def train(jobs, *_) -> int:
        made.update({job.name: job.loaded.config for job in jobs})
        return 75 if jobs else 0

    monkeypatch.setattr(study_module, "run_jobs", train)
    swept = "sweep: {key: training.learning_rate, values: [1e-3, 2e-3, 4e-3], share: 1}"
    words = split_words(["--training.learning_rate", "3e-3"])
    study = only(read_study(written(tmp_path, STUDY.replace("seeds: 2", f"seeds: 2\n{swept}"))), ["easy"], seeds=[0, 5])
    result, _ = conduct(settled(study, words), words, tmp_path, 1, lambda _: None)
    assert {name: its.training.learning_rate for name, its in made.items()} == {
        f"easy/{member}/seed{seed}": 3e-3 for member in ("plain", "looped", "as_is") for seed in (0, 5)
    }
    its = result["tasks"]["easy"]["members"]["looped"]
    assert its["chosen"] == {"training.learning_rate": "3e-3"} and "swept" not in its
    assert "2 runs of each" in plan(settled(study, words), words, "v5e:1x1", lambda _: None)
    others = split_words(["--training.warmup_steps", "3"])
    assert settled(study, others) == study


def test_runs_that_fail_are_said_and_the_others_made(tmp_path, stand_in):
    said: list[str] = []
    with pytest.raises(jobs.RunsFailed, match=r"seed7 failed \(.*seed7.log\): no such data; seed9 .*diverged") as found:
        jobs.run_jobs([stand_in(7, "1,2"), stand_in(0), stand_in(9)], tmp_path, 1, said.append)
    assert [line.split()[:2] for line in notes(tmp_path)] == [["train", f"seed{seed}"] for seed in (7, 0, 9)]
    assert said[0].startswith("1/3 seed7 failed") and said[1].startswith("2/3 seed0 is complete")
    assert (found.value.diverged, found.value.others) == ({"seed9"}, {"seed7"})


@pytest.fixture
def asked_to_stop(tmp_path, request):
    """As soon as seed8 is at work; by SIGTERM, or the signal of the test."""
    end = time.monotonic() + 60

    def ask() -> None:
        while not (tmp_path / "ready").exists():
            if time.monotonic() > end:  # the test has failed before
                return
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(request, "param", signal.SIGTERM))

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    asking.join()


STOPPED = [(signal.SIGTERM, 75), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("asked_to_stop", "code"), STOPPED, indirect=["asked_to_stop"])
def test_a_study_that_is_asked_to_stop_lets_its_runs_save(asked_to_stop, code, tmp_path, stand_in):
    said: list[str] = []
    assert jobs.run_jobs([stand_in(8), stand_in(0)], tmp_path, 1, said.append) == code
    assert said[-1] == "stopped; start the same command to go on" and len(notes(tmp_path)) == 1


@pytest.mark.usefixtures("asked_to_stop")
def test_no_run_goes_on_where_nobody_reads_what_is_said(tmp_path, stand_in):
    def say(line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError, match="stopping seed8"):
        jobs.run_jobs([stand_in(8)], tmp_path, 1, say)
    with (tmp_path / "logs/seed8.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until its process has ended
    assert (tmp_path / "saved").exists()


def test_no_two_processes_make_one_run(tmp_path, stand_in):
    (tmp_path / "logs").mkdir()
    with (
        jobs._locked(tmp_path / "logs/seed0.log"),
        pytest.raises(UserError, match="another process is making this run"),
    ):
        jobs.run_jobs([stand_in(0)], tmp_path, 1, lambda _: None)


def test_a_run_that_another_process_makes_keeps_none_of_the_others_from_being_made(tmp_path, stand_in):
    (tmp_path / "logs").mkdir()
    with (
        jobs._locked(tmp_path / "logs/seed0.log"),
        pytest.raises(
            jobs.RunsFailed, match=r"^seed0: another process is making this run.*the other runs are complete"
        ),
    ):
        jobs.run_jobs([stand_in(0), stand_in(1)], tmp_path, 1, lambda _: None)
    assert [line.split()[:2] for line in notes(tmp_path)] == [["train", "seed1"]]


def test_a_whole_study(tmp_path, monkeypatch, capsys):
    """One small member on one task: trained, evaluated at other depths, shown; and nothing is made again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    text = STUDY.replace("seeds: 2", "seeds: 1\ndepths: [1, 2]\ninstances: 4")
    left_out = ("  hard", "  looped", "  as_is")
    path = written(tmp_path, "\n".join(line for line in text.splitlines() if not line.startswith(left_out)))
    assert main(["study", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    members = result["tasks"]["easy"]["members"]
    assert list(members) == ["plain"]
    run = tmp_path / "runs/studies/small/easy/plain/seed0"
    summary = json.loads((run / "summary.json").read_text())
    seed = members["plain"]["seeds"]["0"]
    assert seed["curves"]["loss"][-1] == [1024, summary["heldout/loss"]]
    assert seed["by_depth"]["2"] == pytest.approx(summary["heldout/loss"], rel=1e-6)  # the trained depth
    assert abs(seed["by_depth"]["1"] - seed["by_depth"]["2"]) > 1e-4
    asked = {f"{level}/{depth}" for level in difficulties(load_config(run / "config.yaml").config) for depth in (1, 2)}
    assert set(seed["by_difficulty"]) == asked and set(seed["by_difficulty"].values()) <= {0, 0.25, 0.5, 0.75, 1}
    assert list(program_cache.folder().glob("jit_step-*"))
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert main(["study", str(path)]) == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before
    out = capsys.readouterr().out
    assert "easy: 1,000 tokens, data efficiency over plain" in out and "study_easy.png" in out
    assert main(["depth", str(run), "--depths", "1,2"]) == 0
    assert f"{seed['by_depth']['1']:.4f}" in capsys.readouterr().out
    assert main(["study", str(path), "--model.rope_base", "5"]) == 2
    assert "model.rope_base" in capsys.readouterr().err


@pytest.mark.parametrize("name", names(["study"]))
def test_shipped_studies_are_matched(name):
    """To 1 % in FLOPs, and in parameters where a member has experts; nothing else can change them apart. Layers of few
    large experts come as near as whole experts do: one more or fewer in each would be farther away."""
    for entrant in entrants(read_study(name), []):
        if entrant.match:
            gaps = entrant.match.gaps_percent
            assert abs(gaps["flops_per_token"]) < 1
            if hasattr(entrant.loaded.config.model, "num_experts"):
                model = entrant.loaded.config.model
                layers = 1 if getattr(model, "recurrent", True) else model.depth  # each with as many experts
                one_more = 100 * layers * 3 * model.expert_size * model.hidden_size / describe(entrant)["parameters"]
                assert abs(gaps["params"]) < max(1, one_more / 2)
