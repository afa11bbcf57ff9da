"""Our scores against lm-evaluation-harness's own, sample by sample, on the same files and the same model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dreamer_jax.evaluation import Settings, evaluate
from dreamer_jax.evaluation.benchmarks import MMLU_SUBJECTS, mmlu_math
from dreamer_jax.evaluation.opening import load_language_model
from dreamer_jax.evaluation.runner import choose_tasks
from dreamer_jax.inference import Lossless, Sampling
from tests.evaluation.cases import Scripted, model_of, write_benchmarks, write_jsonl
from tests.export.cases import make_run
from tests.outside import SAMPLES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval", reason="extra `eval`")

from lm_eval.tasks import TaskManager  # noqa: E402

from dreamer_jax.evaluation import LMEvalAdapter  # noqa: E402

THEIRS = Path(lm_eval.__file__).parent / "tasks"
METRICS = {"strict-match": "strict", "flexible-extract": "flexible"}


def write_tasks(folder: Path, data: Path) -> TaskManager:
    """The harness's own definitions of GSM8K, MathQA and MMLU with local files in place of the hub's."""
    folder.mkdir()
    mathqa = {}
    for split in ("train", "test"):
        path = next((p for p in data.glob(f"mathqa/{split}*.jsonl") if "sample" not in p.name), None)
        if path is not None:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            mathqa[split] = folder / f"mathqa_{split}.jsonl"
            write_jsonl(mathqa[split], [{**row, "Problem": row["problem"]} for row in rows])
    gsm8k = {split: data / f"gsm8k/{split}.jsonl" for split in ("train", "test")}
    _task(folder, "gsm8k", THEIRS / "gsm8k/gsm8k.yaml", gsm8k)
    extra = {"validation_split": None} | ({} if "train" in mathqa else {"training_split": None})
    _task(folder, "mathqa", THEIRS / "mathqa/mathqa.yaml", mathqa, **extra)
    for subject in MMLU_SUBJECTS:
        files = {}
        for split in ("dev", "test"):
            files[split] = folder / f"{subject}_{split}.jsonl"
            write_jsonl(files[split], _mmlu_rows(data, subject, split))
        _task(folder, subject, THEIRS / f"mmlu/default/mmlu_{subject}.yaml", files)
    return TaskManager(include_path=str(folder), include_defaults=False)


def _task(folder: Path, name: str, include: Path, files: dict[str, Path], **changes) -> None:
    loading = {"data_files": {split: str(path) for split, path in files.items()}, "cache_dir": str(folder / "cache")}
    task = {"include": str(include), "task": f"local_{name}", "dataset_path": "json", "dataset_name": None}
    (folder / f"{name}.yaml").write_text(json.dumps({**task, "dataset_kwargs": loading, "tag": None, **changes}))


def _mmlu_rows(data: Path, subject: str, split: str) -> list[dict]:
    import csv

    with (data / f"mmlu_math/{subject}_{split}.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    return [{"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5])} for row in rows]


def harness(manager: TaskManager, names: list[str], model, shots: int = 0, limit: int | None = None, **more) -> dict:
    """Task -> the harness's samples, in order (of every filter)."""
    tasks = [f"local_{name}" for name in names]
    options = {"num_fewshot": shots, "limit": limit, "log_samples": True, "bootstrap_iters": 0, **more}
    found = lm_eval.simple_evaluate(model=LMEvalAdapter(model), tasks=tasks, task_manager=manager, **options)
    assert found is not None
    return {name: found["samples"][f"local_{name}"] for name in names}


def ours(model, names: str, data: Path, out: Path, **options) -> dict[str, list[dict]]:
    """Task -> our records, in order."""
    limit = options.pop("limit", None)
    settings = Settings(str(data), **options)
    evaluate(model, choose_tasks(names), settings, out, {}, 32, limit=limit, say=lambda line: None)
    found = {}
    for name in names.split(","):
        [path] = [p for p in out.glob("*.jsonl") if p.name.startswith(name)]
        records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        found[name] = sorted(records, key=lambda record: record["index"])
    return found


def compare_gsm8k(records: list[dict], samples: list[dict]) -> list[tuple[int, int]]:
    """Assert that every sample is the same; returns (strict, flexible) of each."""
    by_filter = {METRICS[name]: [s for s in samples if s["filter"] == name] for name in METRICS}
    for rule, its in by_filter.items():
        assert len(its) == len(records)
        for sample, record in zip(its, records, strict=True):
            assert record["prompt"] == sample["arguments"][0][0]
            assert record["answer"] == sample["resps"][0][0]
            assert record[rule] == sample["exact_match"], (rule, record)
    return [(record["strict"], record["flexible"]) for record in records]


def compare_choices(records: list[dict], samples: list[dict], metrics: tuple[str, ...]) -> None:
    """Assert that every sample is the same."""
    assert len(records) == len(samples)
    for record, sample in zip(records, samples, strict=True):
        asked = [(record["prompt"], " " + choice) for choice in record["choices"]]
        assert asked == [tuple(arguments) for arguments in sample["arguments"]]
        assert record["logprobs"] == pytest.approx([logprob for logprob, _ in sample["filtered_resps"]], abs=1e-5)
        for metric in metrics:
            assert record[metric] == sample[metric], (metric, record)


def reply_of(golds: dict[str, str]):
    """Answers in many forms, some right, chosen by the question."""

    def reply(prompt: str) -> str:
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        gold = golds[question].rpartition("#### ")[2]
        forms = (
            f" so\n#### {gold}",
            f" it is ${gold}.00",
            f" the answer is {gold}.",
            f"#### {gold.replace(',', '')}\nQuestion: and 5?",
            f"#### {gold}.5",
            f" {gold} and not 17",
            f"\n#### ${gold} dollars",
            " none\n#### ",
            "",
        )
        return forms[len(question) % len(forms)]

    return reply


def check_scripted(data: Path, tmp_path: Path, shots: int, mathqa_shots: int) -> None:
    manager = write_tasks(tmp_path / "tasks", data)
    rows = [json.loads(line) for line in (data / "gsm8k/test.jsonl").read_text().splitlines()]
    model = model_of(Scripted(reply_of({row["question"]: row["answer"] for row in rows})), 1 << 16, 64)
    samples = harness(manager, ["gsm8k", *MMLU_SUBJECTS], model, shots)
    records = ours(model, "gsm8k,mmlu_math", data, tmp_path / "out", shots=shots)
    right = compare_gsm8k(records["gsm8k"], samples["gsm8k"])
    assert len(set(right)) > 2  # right and wrong by either rule
    compare_choices(records["mmlu_math"], [s for subject in MMLU_SUBJECTS for s in samples[subject]], ("acc",))
    samples = harness(manager, ["mathqa"], model, mathqa_shots)
    records = ours(model, "mathqa", data, tmp_path / "out", shots=mathqa_shots)
    compare_choices(records["mathqa"], samples["mathqa"], ("acc", "acc_norm"))


@pytest.mark.slow_but("0")
@pytest.mark.parametrize("shots", [0, 2])
def test_scores_of_a_scripted_model(tmp_path, shots):
    check_scripted(write_benchmarks(tmp_path / "data"), tmp_path, shots, shots)


@pytest.mark.slow
@pytest.mark.parametrize("shots", [0, 5])
def test_scores_on_public_questions(tmp_path, shots):
    check_scripted(SAMPLES, tmp_path, shots, 0)


@pytest.mark.slow  # the adapter's own tests have no model to compile
def test_scores_of_a_real_small_model(tmp_path):
    data = write_benchmarks(tmp_path / "data")
    manager = write_tasks(tmp_path / "tasks", data)
    subject = MMLU_SUBJECTS[0]
    model = load_language_model(str(make_run(tmp_path / "run")), batch_size=8)
    samples = harness(manager, ["gsm8k", "mathqa", subject], model)
    records = ours(model, "gsm8k,mathqa", data, tmp_path / "out")
    compare_gsm8k(records["gsm8k"], samples["gsm8k"])
    assert len({record["answer"] for record in records["gsm8k"]}) > 1
    compare_choices(records["mathqa"], samples["mathqa"], ("acc", "acc_norm"))
    records = ours(model, "mmlu_math", data, tmp_path / "out")["mmlu_math"]
    compare_choices([record for record in records if record["subject"] == subject], samples[subject], ("acc",))


@pytest.mark.slow
def test_draws_through_a_sampler(tmp_path):
    """As the published samplers are measured: temperature 0.2, top-p 0.95. A request's draws are those of its number,
    so the harness and `dreamer eval` get the same texts, whatever they ask for at once."""
    data = write_benchmarks(tmp_path / "data")
    manager = write_tasks(tmp_path / "tasks", data)
    model = load_language_model(str(make_run(tmp_path / "run")), sampler=Lossless(1), batch_size=1)
    drawing = "do_sample=True,temperature=0.2,top_p=0.95,seed=4,max_gen_toks=12"
    samples = harness(manager, ["gsm8k"], model, limit=3, gen_kwargs=drawing)["gsm8k"]
    found = {}
    for seed in (4, 5):
        sampling = Sampling(0.2, top_p=0.95, seed=seed)
        options = {"limit": 3, "max_tokens": 12, "sampling": sampling}
        found[seed] = ours(model, "gsm8k", data, tmp_path / str(seed), **options)["gsm8k"]
    compare_gsm8k(found[4], samples)
    assert [record["answer"] for record in found[4]] != [record["answer"] for record in found[5]]


def test_whole_texts(tmp_path):
    """A task that scores texts, of windows and all."""
    texts = ["To be, or not to be: that is the question.", "x", "ä" * 40]
    write_jsonl(tmp_path / "texts.jsonl", [{"page": text} for text in texts])
    folder = tmp_path / "tasks"
    folder.mkdir()
    task = {"task": "local_texts", "output_type": "loglikelihood_rolling", "dataset_path": "json", "test_split": "test"}
    loading = {"data_files": {"test": str(tmp_path / "texts.jsonl")}, "cache_dir": str(folder / "cache")}
    metrics = [{"metric": "byte_perplexity"}, {"metric": "word_perplexity"}]
    target = {"doc_to_text": "", "doc_to_target": "{{page}}", "metric_list": metrics, "dataset_kwargs": loading}
    (folder / "texts.yaml").write_text(json.dumps({**task, **target}))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = model_of(Scripted())
    found = lm_eval.simple_evaluate(
        model=LMEvalAdapter(model, window=16), tasks=["local_texts"], task_manager=manager, bootstrap_iters=0
    )
    assert found is not None
    settings = Settings(text=str(tmp_path / "texts.jsonl"), template="{page}", window=16)
    result = evaluate(model, choose_tasks("ppl"), settings, tmp_path / "out", {}, 999, say=lambda line: None)
    expected = found["results"]["local_texts"]["byte_perplexity,none"]
    assert result["ppl-texts"]["metrics"]["byte_perplexity"]["value"] == pytest.approx(expected)


def test_few_shot_examples_are_the_first_of_dev(tmp_path):
    data = write_benchmarks(tmp_path / "data")
    assert "+ 0,\nin dev?" in mmlu_math(data, 1)[0].prompt and "+ 1,\nin dev?" not in mmlu_math(data, 1)[0].prompt


def test_generation_options(tmp_path):
    """What a task may ask for: stops as text or list, sampling, a length."""
    from lm_eval.api.instance import Instance

    asked = []

    class Watching(Scripted):
        def generate(self, prompts, max_tokens, sampling=None, **options):
            drawn = sampling and (sampling.temperature, sampling.top_k, sampling.seed)
            asked.append((tuple(options["numbers"]), max_tokens, drawn))
            return super().generate(prompts, max_tokens, sampling, **options)

    adapter = LMEvalAdapter(model_of(Watching(lambda prompt: f"{prompt} one. two")))
    options = [
        {"until": ["."], "max_gen_toks": 99},
        {"until": "one", "max_gen_toks": 99},
        {"until": ["."], "max_gen_toks": 99, "do_sample": False, "temperature": 0.0},
        {"do_sample": True, "temperature": 0.5, "top_k": 7, "seed": 9},
        {"until": ["."], "max_tokens": 6},
        {"until": ["."], "max_completion_tokens": 7, "max_tokens": 8, "do_sample": True},
        {"until": ["."], "max_gen_toks": 99, "do_sample": True, "temperature": 0.0},
    ]
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(f"p{i}", its), idx=i)
        for i, its in enumerate(options)
    ]
    assert adapter.generate_until(requests) == [
        "p0 one",
        "p1 ",
        "p2 one",
        "p3 one. two",
        *(f"p{i} one" for i in (4, 5, 6)),
    ]
    drawn = (((3,), 256, (0.5, 7, 9)), ((4,), 6, None), ((5,), 8, (1.0, 0, 0)))
    assert asked == [((0, 2, 6), 99, None), ((1,), 99, None), *drawn]
