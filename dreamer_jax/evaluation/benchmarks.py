"""The questions of the paper's benchmarks, read from local files in their original layout, with their prompts.

Folder layout: gsm8k/{train,test}.jsonl, math/{train,test}.jsonl, mathqa/{train,test}.jsonl and
mmlu_math/<subject>_{dev,test}.csv. Prompts are word by word those of lm-evaluation-harness (tasks gsm8k, minerva_math's
question, mathqa, mmlu), few-shot examples drawn from the same generator, so that scores can be compared.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dreamer_jax.data.jsonl import Broken, parse_object
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.scoring import last_boxed

MMLU_SUBJECTS = (
    "abstract_algebra",
    "college_mathematics",
    "elementary_mathematics",
    "high_school_mathematics",
    "high_school_statistics",
)
"""The paper's mathematical part of MMLU."""

FEW_SHOT_SEED = 1234
"""The harness's own default."""

_MATHQA_OPTION = re.compile(r"[abcd] \) .*?, |e \) .*?$")


@dataclass(frozen=True)
class Question:
    """One question of a benchmark.

    Attributes:
        index: its place in the benchmark.
        prompt: all that the model is given.
        gold: the right answer, as text.
        choices: texts of the choices, without the space that comes before them; none for a free answer.
        right: index of the right one (two of MathQA's choices may have the same text).
        subject: part of the benchmark it belongs to, or "".
    """

    index: int
    prompt: str
    gold: str
    choices: tuple[str, ...] = ()
    right: int = 0
    subject: str = ""


@dataclass(frozen=True)
class _Asked:
    """A question before examples are put in front of it, and what an example shows after it."""

    text: str
    shown: str


def gsm8k(data: Path, shots: int) -> list[Question]:
    """GSM8K's test split; examples from train."""

    def ask(record: dict[str, object], where: str) -> _Asked:
        question, answer = _texts(record, ("question", "answer"), where)
        return _Asked(f"Question: {question}\nAnswer:", answer)

    folder = data / "gsm8k"
    asked = [ask(*record) for record in _jsonl(folder, "test")]
    heads = _drawn_examples(folder, ask, len(asked), shots)
    return [Question(i, head + one.text, one.shown) for i, (head, one) in enumerate(zip(heads, asked, strict=True))]


def math(data: Path, shots: int) -> list[Question]:
    """MATH's test split; the gold answer is what the solution's last box holds; examples from train."""

    def ask(record: dict[str, object], where: str) -> _Asked:
        problem, solution = _texts(record, ("problem", "solution"), where)
        return _Asked(f"Problem:\n{problem}\n\nSolution:", solution)

    folder = data / "math"
    records = list(_jsonl(folder, "test"))
    asked = [ask(*record) for record in records]
    heads = _drawn_examples(folder, ask, len(asked), shots)
    questions = []
    for i, (record, where) in enumerate(records):
        gold = last_boxed(asked[i].shown)
        if gold is None:
            raise UserError(f"{where}: the solution has no \\boxed answer")
        questions.append(Question(i, heads[i] + asked[i].text, gold, subject=str(record.get("type", ""))))
    return questions


def mathqa(data: Path, shots: int) -> list[Question]:
    """MathQA's test split; examples from train, where that file is present."""

    def parse(record: dict[str, object], where: str) -> tuple[str, tuple[str, ...], int]:
        problem, options, correct = _texts(record, ("problem", "options", "correct"), where)
        choices = tuple(option[4:].rstrip(" ,") for option in _MATHQA_OPTION.findall(options))
        place = "abcde".find(correct)
        if len(correct) != 1 or not 0 <= place < len(choices):
            raise UserError(f"{where}: the answer {correct!r} is none of its {len(choices)} options")
        return f"Question: {problem}\nAnswer:", choices, place

    def ask(record: dict[str, object], where: str) -> _Asked:
        text, choices, right = parse(record, where)
        return _Asked(text, choices[right])

    folder = data / "mathqa"
    found = [parse(*record) for record in _jsonl(folder, "test")]
    heads = _drawn_examples(folder, ask, len(found), shots)
    return [
        Question(i, heads[i] + text, choices[right], choices, right) for i, (text, choices, right) in enumerate(found)
    ]


def mmlu_math(data: Path, shots: int) -> list[Question]:
    """The test files of MMLU's five mathematical subjects, one after the other; the first dev rows are the examples."""
    questions: list[Question] = []
    for subject in MMLU_SUBJECTS:
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        if shots:
            rows = _mmlu(data / "mmlu_math" / f"{subject}_dev.csv")
            if shots > len(rows):
                raise UserError(f"--shots {shots}: {subject}_dev.csv has only {len(rows)} examples")
            head += "".join(f"{text} {letter}\n\n" for text, letter in rows[:shots])
        for text, letter in _mmlu(data / "mmlu_math" / f"{subject}_test.csv"):
            right = "ABCD".index(letter)
            questions.append(Question(len(questions), head + text, letter, tuple("ABCD"), right, subject))
    return questions


def _mmlu(path: Path) -> list[tuple[str, str]]:
    try:
        read_rows = list(csv.reader(io.StringIO(read(path).decode("utf-8"), newline="")))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not in UTF-8 ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error})") from None
    rows = []
    for number, row in enumerate(read_rows, start=1):
        if not row:  # an empty line
            continue
        if len(row) != 6 or row[5] not in ("A", "B", "C", "D"):
            raise UserError(f"{path}: row {number}: expected question, four options, and the letter of the right one")
        options = "".join(f"{letter}. {option}\n" for letter, option in zip("ABCD", row[1:5], strict=True))
        rows.append((f"{row[0].strip()}\n{options}Answer:", row[5]))
    if not rows:
        raise UserError(f"{path}: is empty")
    return rows


def _drawn_examples(folder: Path, ask: Callable[..., _Asked], count: int, shots: int) -> list[str]:
    """What stands before each of `count` questions: `shots` examples, drawn anew for each."""
    if not shots:
        return [""] * count
    pool = [ask(*record) for record in _jsonl(folder, "train")]
    if shots > len(pool):
        raise UserError(f"--shots {shots}: the training file in {folder} has only {len(pool)} examples")
    draws = random.Random(FEW_SHOT_SEED)
    return ["".join(f"{one.text} {one.shown}\n\n" for one in draws.sample(pool, shots)) for _ in range(count)]


def _jsonl(folder: Path, split: str) -> Iterator[tuple[dict[str, object], str]]:
    """(record, where it stands) of a split: SPLIT.jsonl or SPLIT.derived.jsonl, perhaps .gz."""
    names = [f"{split}.jsonl", f"{split}.jsonl.gz", f"{split}.derived.jsonl", f"{split}.derived.jsonl.gz"]
    path = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
    found = False
    for number, line in enumerate(read(path).splitlines(), start=1):
        if line.strip():
            found = True
            where = f"{path}: line {number}"
            try:
                yield parse_object(line), where
            except Broken as broken:
                raise UserError(f"{where}: {broken}") from None
    if not found:
        raise UserError(f"{path}: is empty")


def read(path: Path) -> bytes:
    """A file's content without a byte-order mark, decompressed if its name ends in .gz.

    Raises:
        UserError: it can't be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; --data (while training --evaluation.data) names the folder of the benchmarks, "
            "--text a file of the task ppl"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"can't read {path}: {error}") from None


def _texts(record: dict[str, object], names: tuple[str, ...], where: str) -> list[str]:
    values = [record.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise UserError(f"{where}: needs a text in the field {name!r}")
    return [str(value) for value in values]
