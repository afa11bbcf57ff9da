"""Finding benchmark questions: small cases by hand, and the real sets."""

import re
from collections import Counter

import pytest

from dreamer_jax.data.decontamination import BenchmarkIndex
from tests.outside import sample

LONG = "A farmer keeps 17 hens in each of the 4 coops behind the barn and collects 3 eggs from every hen each day."
SHORT = "What is the derivative of seven x squared?"
TINY = "Factor $36-9x^2$."
TEMPLATE = (
    "Express your answer as a common fraction in lowest terms with the denominator rationalised where it is needed."
)


@pytest.fixture(scope="module")
def index() -> BenchmarkIndex:
    return BenchmarkIndex({"one": [LONG, f"{LONG[::-1]} {TEMPLATE}"], "two": [SHORT, TINY, "", "..."]}, 0.5)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LONG, "equal"),
        (LONG.upper().replace(" ", "  ").rstrip("."), "equal"),
        (f"Think about this. {LONG} Then add one.", "overlap"),
        (LONG.replace("each day", "every week"), "overlap"),
        (f"{LONG[: len(LONG) // 2]} and nothing else at all, really, nothing that the farmer could say.", None),
        (f"What is a half of a quarter? {TEMPLATE}", None),  # a shared 13-gram in a template phrase
        (f"{SHORT} And why?", "contained"),
        ("Factor 36 - 9x^2", "equal"),
        ("Now factor 36 - 9x^2 and solve.", None),
        ("", None),
        ("?!", None),
    ],
)
def test_matches(index: BenchmarkIndex, text: str, kind: str | None) -> None:
    (match,) = index.find([index.hashes(text)])
    assert (match and match.kind) == kind


def test_texts_in_a_batch_do_not_touch(index: BenchmarkIndex) -> None:
    pieces = LONG.split(" the 4 ")
    texts = [pieces[0], "the 4 " + pieces[1], LONG, "other"]
    assert [match and match.kind for match in index.find([index.hashes(text) for text in texts])] == [
        None, None, "equal", None,
    ]  # fmt: skip


def test_the_first_benchmark_counts() -> None:
    index = BenchmarkIndex({"b": [SHORT], "a": [SHORT]}, 0.5)
    match = index.find([index.hashes(SHORT)])[0]
    assert match is not None and match.benchmark == "b" and match.question == SHORT
    assert index.sizes() == {"b": 1, "a": 1}


@pytest.mark.parametrize(
    ("question", "text", "kind"),
    [  # words in the question, how many of them stand in the text
        (12, 12, "contained"),
        (13, 13, "overlap"),
        (25, 12, None),
        (25, 13, "overlap"),
    ],
)
def test_long_questions_are_compared_by_runs_of_thirteen_words(question: int, text: int, kind: str | None) -> None:
    """A question of fewer words is found only whole; of longer ones every shared run counts here."""
    words = [f"word{chr(97 + i)}" for i in range(question)]
    index = BenchmarkIndex({"one": [" ".join(words)]}, 0.01)
    (match,) = index.find([index.hashes(" ".join(["first", *words[:text], "last"]))])
    assert (match and match.kind) == kind


@pytest.mark.parametrize(("text", "kind"), [(18, None), (19, "overlap")])
def test_just_the_share_of_a_question_is_enough(text: int, kind: str | None) -> None:
    """Of 26 words, which are 14 runs of thirteen, 19 hold seven: the half."""
    words = [f"word{chr(97 + i)}" for i in range(26)]
    index = BenchmarkIndex({"one": [" ".join(words)]}, 0.5)
    (match,) = index.find([index.hashes(" ".join(["first", *words[:text], "last"]))])
    assert (match and match.kind) == kind


def test_the_first_of_several_questions_in_a_text_counts() -> None:
    other = LONG.replace("hens", "geese").replace("barn", "mill").replace("eggs", "feathers")
    index = BenchmarkIndex({"b": [other], "a": [LONG], "c": [f"{other} And so on."]}, 0.5)
    (match,) = index.find([index.hashes(f"{LONG} Then: {other}")])
    assert match is not None and (match.kind, match.benchmark, match.question) == ("overlap", "b", other)


def test_nothing_matches_an_empty_index() -> None:
    index = BenchmarkIndex({}, 0.5)
    assert index.find([index.hashes(LONG), []]) == [None, None]


def plain_find(questions: list[str], text: str) -> str | None:
    """The rules of BenchmarkIndex with sets of words, one question after the other."""

    def grams(words: tuple[str, ...], length: int) -> set[tuple[str, ...]]:
        return {words[i : i + length] for i in range(len(words) - length + 1)}

    its, asked = plain_words(text), [plain_words(question) for question in questions]
    if its in asked:
        return "equal"
    if any(len(words) < 13 and len(set(words)) >= 5 and words in grams(its, len(words)) for words in asked):
        return "contained"
    of_text = grams(its, 13)
    if any(len(words) >= 13 and len(grams(words, 13) & of_text) >= 0.5 * len(grams(words, 13)) for words in asked):
        return "overlap"
    return None


def plain_words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))


@pytest.mark.parametrize(
    ("name", "field", "expected"),
    [
        ("gsm8k", "question", {None: 120, "overlap": 2}),  # two trains that go as fast as the benchmark's plane
        ("math", "problem", {None: 19, "equal": 1, "overlap": 1, "contained": 1}),
    ],
)
def test_training_records_against_their_benchmark(name: str, field: str, expected: dict[str | None, int]) -> None:
    questions = [record[field] for record in sample(f"{name}/test")]
    texts = [record[field] for record in sample(f"{name}/train")]
    index = BenchmarkIndex({name: questions}, 0.5)
    found = [match and match.kind for match in index.find([index.hashes(text) for text in texts])]
    assert found == [plain_find(questions, text) for text in texts]
    assert Counter(found) == expected
