"""What is done with the questions of each benchmark: how a model answers, what is recorded, how it is summed up."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dreamer_jax.data.jsonl import Broken, Template, parse_object
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation import benchmarks, scoring
from dreamer_jax.evaluation.benchmarks import Question
from dreamer_jax.evaluation.encoding import rolling_windows
from dreamer_jax.evaluation.math_judge import MathJudge, require_math_verify
from dreamer_jax.evaluation.scoring import Estimate

if TYPE_CHECKING:
    from dreamer_jax.inference import LanguageModel, Sampling, Text

Record = dict[str, Any]
"""One line of a records file: `index`, what was asked and answered, and a number for each metric."""

SOLVED = {False: ("Question: {question}\nAnswer:", " {answer}"), True: ("Question: {question}\nAnswer: ", "{answer}")}
"""Templates of the prompt and the completion that the task ppl reads by default, by `space_in_prompt`."""


@dataclass(frozen=True)
class Settings:
    """What is asked and how; a changed value is another evaluation.

    Attributes:
        data: folder of the benchmarks' files, see benchmarks.py.
        shots: examples before each question.
        max_tokens: most tokens of a generated answer; None takes the task's own.
        text: file of the task ppl: plain text, or JSONL; "" takes GSM8K's solved test questions.
        template: what is read of a JSONL record.
        sampling: how the tokens of a generated answer are chosen; None: greedily.
        window: tokens the model sees at once in the task ppl; None takes the run's row length.
        prompt: what of a JSONL record stands before `template`, and is encoded apart from it as in training.
        space_in_prompt: whether the space between a prompt and its completion ends the prompt, as it did when the
            run was trained; otherwise it begins the completion. The two are other tokens.
    """

    data: str = "data"
    shots: int = 0
    max_tokens: int | None = None
    sampling: Sampling | None = None
    text: str = ""
    template: str = "{text}"
    window: int | None = None
    prompt: str = ""
    space_in_prompt: bool = False


class Task(Protocol):
    """A benchmark. `metrics` names the numbers that a record holds; the first is the one to quote."""

    name: str
    metrics: tuple[str, ...]

    def items(self, settings: Settings, tokenizer: Tokenizer, row_length: int) -> Sequence[Any]:
        """All that is to be answered, in order; `items[i]` becomes the record with index i."""
        ...

    def size(self, item: Any) -> int:
        """How much work an item is, roughly: items are done in this order."""
        ...

    def identity(self, items: Sequence[Any], settings: Settings) -> str:
        """Changes whenever the records of an earlier evaluation could not be used any more."""
        ...

    def cut(self, item: Any, settings: Settings, model: LanguageModel) -> bool:
        """Whether the model can't take the whole prompt of an item, which then loses its beginning."""
        ...

    def answerer(
        self, settings: Settings, model: LanguageModel
    ) -> contextlib.AbstractContextManager[Callable[[Sequence[Any]], list[Record]]]:
        """A function from items to their records."""
        ...

    def estimates(self, records: Sequence[Record]) -> dict[str, Estimate]:
        """The metrics over records."""
        ...


class _Asking:
    """What free answers and choices have in common."""

    name: str
    metrics: tuple[str, ...]
    _load: Callable[[Path, int], list[Question]]

    def items(self, settings: Settings, tokenizer: Tokenizer, row_length: int) -> list[Question]:
        """The benchmark's questions, with the space that ends their prompts if it does."""
        questions = self._load(Path(settings.data), settings.shots)
        end = " " if settings.space_in_prompt else ""
        return [dataclasses.replace(question, prompt=question.prompt + end) for question in questions]

    def size(self, item: Question) -> int:
        """Characters of the prompt."""
        return len(item.prompt)

    def estimates(self, records: Sequence[Record]) -> dict[str, Estimate]:
        """Means over the questions."""
        return {name: scoring.mean([float(record[name]) for record in records]) for name in self.metrics}


class Generation(_Asking):
    """Questions that are answered freely; greedily, unless `Settings.sampling` says otherwise.

    Attributes:
        grader: opens what makes the metrics of an answer and the gold one.
        stops: strings that end an answer.
        max_tokens: of an answer, where the settings don't say.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[Path, int], list[Question]],
        grader: Callable[[], contextlib.AbstractContextManager[Callable[[str, str], Record]]],
        metrics: tuple[str, ...],
        stops: tuple[str, ...],
        max_tokens: int,
    ):
        self.name, self.metrics = name, metrics
        self.grader, self.stops, self.max_tokens = grader, stops, max_tokens
        self._load = load

    def identity(self, items: Sequence[Question], settings: Settings) -> str:
        """Hash of the questions, of the length of answers, and of how tokens are drawn if they are."""
        drawn = [settings.sampling.label] if settings.sampling is not None and settings.sampling.draws else []
        return _digest([self._limit(settings), *drawn, *([item.prompt, item.gold] for item in items)])

    def cut(self, item: Question, settings: Settings, model: LanguageModel) -> bool:
        """Whether the prompt doesn't fit together with an answer of full length."""
        return model.cuts(item.prompt, self._limit(settings))

    @contextlib.contextmanager
    def answerer(self, settings: Settings, model: LanguageModel) -> Iterator[Callable]:
        """See `Task`."""
        with self.grader() as grade:

            def answer(items: Sequence[Question]) -> list[Record]:
                # Draws depend on the question's number, whatever else is asked in the same batch.
                answers = model.generate(
                    [item.prompt for item in items],
                    self._limit(settings),
                    settings.sampling,
                    self.stops,
                    [item.index for item in items],
                )
                return [self._record(item, its, grade) for item, its in zip(items, answers, strict=True)]

            yield answer

    def _limit(self, settings: Settings) -> int:
        return settings.max_tokens or self.max_tokens

    @staticmethod
    def _record(item: Question, answer: Text, grade: Callable[[str, str], Record]) -> Record:
        graded = grade(answer.text, item.gold)
        asked = {"index": item.index, "subject": item.subject, "prompt": item.prompt, "gold": item.gold}
        return {**asked, "answer": answer.text, "finish": answer.finish, **graded}


class Choice(_Asking):
    """Questions with choices, answered by the likelihood of each choice after the prompt."""

    def __init__(self, name: str, load: Callable[[Path, int], list[Question]], metrics: tuple[str, ...]):
        self.name, self.metrics, self._load = name, metrics, load

    def identity(self, items: Sequence[Question], settings: Settings) -> str:
        """Hash of the questions."""
        return _digest([[item.prompt, item.choices, item.right] for item in items])

    def cut(self, item: Question, settings: Settings, model: LanguageModel) -> bool:
        """Whether the prompt doesn't fit together with the longest choice, whose last token is predicted, not read."""
        if model.max_length is None:
            return False
        longest = max(len(model.tokenizer.encode(text)) for text in self._texts(item, settings))
        return model.cuts(item.prompt, longest - 1)

    @contextlib.contextmanager
    def answerer(self, settings: Settings, model: LanguageModel) -> Iterator[Callable]:
        """See `Task`."""

        def answer(items: Sequence[Question]) -> list[Record]:
            pairs = [(item.prompt, text) for item in items for text in self._texts(item, settings)]
            found = iter(model.completion_likelihoods(pairs))
            return [self._record(item, [next(found).logprob for _ in item.choices]) for item in items]

        yield answer

    @staticmethod
    def _texts(item: Question, settings: Settings) -> list[str]:
        start = "" if settings.space_in_prompt else " "
        return [f"{start}{choice}" or " " for choice in item.choices]  # without text it would be certain

    @staticmethod
    def _record(item: Question, logprobs: list[float]) -> Record:
        normal = scoring.chosen(logprobs, [len(choice) for choice in item.choices])
        asked = {"index": item.index, "subject": item.subject, "prompt": item.prompt, "choices": list(item.choices)}
        graded = {"acc": int(scoring.chosen(logprobs) == item.right), "acc_norm": int(normal == item.right)}
        return {**asked, "right": item.right, "logprobs": logprobs, **graded}


@dataclass(frozen=True)
class Window:
    """A piece of a text: tokens to predict, what is given before them, and its share of the text's bytes."""

    index: int
    document: int
    context: list[int]
    tokens: list[int]
    bytes: float


class Perplexity:
    """Perplexity of texts, per token and per byte; every token is predicted once, the end of a text is not."""

    name: str = "ppl"
    metrics: tuple[str, ...] = ("token_perplexity", "byte_perplexity")

    def items(self, settings: Settings, tokenizer: Tokenizer, row_length: int) -> list[Window]:
        """Windows of the texts; each text begins anew."""
        windows: list[Window] = []
        for document, (prompt, text) in enumerate(_documents(settings)):
            parts = rolling_windows(tokenizer, text, settings.window or row_length, prompt)
            count = sum(len(tokens) for _, tokens in parts)
            size = len((prompt + text).encode("utf-8", errors="replace"))
            for context, tokens in parts:
                windows.append(Window(len(windows), document, context, tokens, size * len(tokens) / count))
        if not windows:
            raise UserError(f"{settings.text}: holds no text")
        return windows

    def size(self, item: Window) -> int:
        """Tokens in all."""
        return len(item.context) + len(item.tokens)

    def identity(self, items: Sequence[Window], settings: Settings) -> str:
        """Hash of the tokens."""
        return _digest([[item.context, item.tokens] for item in items])

    def cut(self, item: Window, settings: Settings, model: LanguageModel) -> bool:
        """Never: a window that isn't read to its end would have another perplexity.

        Raises:
            UserError: the model takes fewer tokens than the window has.
        """
        if model.max_length is not None and self.size(item) > model.max_length + 1:
            raise UserError(
                f"--max-length {model.max_length} is less than a window of the task ppl ({self.size(item) - 1} "
                "tokens); raise it, or lower --window"
            )
        return False

    @contextlib.contextmanager
    def answerer(self, settings: Settings, model: LanguageModel) -> Iterator[Callable]:
        """See `Task`."""

        def answer(items: Sequence[Window]) -> list[Record]:
            found = model.likelihoods([(item.context, item.tokens) for item in items])
            return [
                {
                    "index": item.index,
                    "document": item.document,
                    "logprob": its.logprob,
                    "tokens": len(item.tokens),
                    "bytes": item.bytes,
                }
                for item, its in zip(items, found, strict=True)
            ]

        yield answer

    def estimates(self, records: Sequence[Record]) -> dict[str, Estimate]:
        """Perplexities; documents are the samples of the standard error, or windows where there is one document."""
        unit = "document" if len({record["document"] for record in records}) > 1 else "index"
        sums: dict[int, list[float]] = {}
        for record in records:
            total = sums.setdefault(record[unit], [0.0, 0.0, 0.0])
            for i, name in enumerate(("logprob", "tokens", "bytes")):
                total[i] += record[name]
        logprobs, tokens, sizes = (list(column) for column in zip(*sums.values(), strict=True))
        return {
            "token_perplexity": scoring.perplexity(logprobs, tokens),
            "byte_perplexity": scoring.perplexity(logprobs, sizes),
        }


@contextlib.contextmanager
def _gsm8k_grader() -> Iterator[Callable[[str, str], Record]]:
    def grade(text: str, gold: str) -> Record:
        strict, flexible = scoring.strict_number(text), scoring.flexible_number(text)
        right = {"strict": strict, "flexible": flexible}
        return {name: int(scoring.same_number(number, gold)) for name, number in right.items()}

    yield grade


@contextlib.contextmanager
def _math_grader() -> Iterator[Callable[[str, str], Record]]:
    with MathJudge() as judge:

        def grade(text: str, gold: str) -> Record:
            before = judge.timeouts
            boxed = judge.boxed_is(text, gold)
            # What took too long in its box does so in the text.
            anywhere = boxed or (judge.timeouts == before and judge.text_has(text, gold))
            return {"boxed": int(boxed), "anywhere": int(anywhere), "timeout": judge.timeouts > before}

        yield grade


def _documents(settings: Settings) -> list[tuple[str, str]]:
    """(prompt, completion) of the texts of the task ppl; of plain text the prompt is empty."""
    path, written = Path(settings.data) / "gsm8k" / "test.jsonl", SOLVED[settings.space_in_prompt]
    if settings.text:
        path, written = Path(settings.text), (settings.prompt, settings.template)
    content = benchmarks.read(path)
    lines = ".jsonl" in path.name
    if (settings.prompt, settings.template) != (Settings.prompt, Settings.template) and not (settings.text and lines):
        text = f"--text {path}: its name lacks .jsonl, so it" if settings.text else "the task ppl without --text"
        raise UserError(f"{text} has no use for --prompt and --template")
    if not lines:
        try:
            return [("", content.decode("utf-8"))]
        except UnicodeDecodeError as error:
            raise UserError(f"--text {path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    prompt, template = Template(written[0], "--prompt"), Template(written[1], "--template")
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                record = parse_object(line)
                texts.append((prompt.fill(record), template.fill(record)))
            except Broken as broken:
                raise UserError(f"{path}: line {number}: {broken}") from None
    return texts


def _digest(parts: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()


def _math_questions(folder: Path, shots: int) -> list[Question]:
    """Those of MATH, if there is what judges the answers: it is missed here, not after hours of answering."""
    require_math_verify()
    return benchmarks.math(folder, shots)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Generation(
            "gsm8k",
            benchmarks.gsm8k,
            _gsm8k_grader,
            ("strict", "flexible"),
            stops=("Question:", "</s>", "<|im_end|>"),
            max_tokens=256,
        ),
        Generation("math", _math_questions, _math_grader, ("boxed", "anywhere"), stops=("Problem:",), max_tokens=512),
        Choice("mmlu_math", benchmarks.mmlu_math, ("acc",)),
        Choice("mathqa", benchmarks.mathqa, ("acc", "acc_norm")),
        Perplexity(),
    )
}
"""The tasks by the name that --tasks gives."""
