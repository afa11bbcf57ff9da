"""Texts to tokens and back: what is scored, where generation stops, which windows a text is cut into."""

from __future__ import annotations

import math

import pytest

from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.evaluation.language_model import LanguageModel, rolling_windows
from tests.evaluation.cases import Scripted, Successor, model_of

HALF, REST = math.log(1 / 2), math.log(1 / 516)
BYTES = ByteTokenizer()


def test_likelihoods_by_hand():
    pairs = [("ab", "cd"), ("ab", "cx"), ("", "ab"), ("a ", "b"), ("ab", ""), ("ä", "b")]
    found = model_of(Successor()).likelihoods(pairs)
    expected = [
        (2 * HALF, True),  # b -> c -> d
        (HALF + REST, False),  # b -> c, c -> x
        (REST + HALF, False),  # begin of text -> a, a -> b
        (2 * REST, False),  # the space belongs to what is scored: a -> space -> b
        (0.0, True),  # nothing to say
        (REST, False),  # the two bytes of ä are context
    ]
    for one, (logprob, greedy) in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(logprob, abs=1e-12)
        assert one.greedy is greedy


def test_a_long_context_loses_its_beginning():
    model = model_of(Successor(), max_length=4)
    assert model.likelihoods([("x" * 100 + "ab", "cd")])[0].logprob == pytest.approx(2 * HALF)
    assert model.likelihoods([("", "abcdefgh")])[0].logprob == pytest.approx(4 * HALF)  # what fits of it


class _Merging(ByteTokenizer):
    """Writes "ab" as one token where it stands together."""

    def encode(self, text: str) -> list[int]:
        ids = list(text.encode())
        return ids if text != "ab" else [200]


def test_a_token_across_the_border_is_left_to_the_context_as_the_harness_does():
    model = LanguageModel(Successor(), _Merging(), 16)
    assert model.likelihoods([("a", "b")])[0] == (0.0, True)  # together they are as long as the context alone


@pytest.mark.parametrize(
    ("reply", "stops", "limit", "text", "finish"),
    [
        ("7\n#### 7", (), 64, "7\n#### 7", "stop"),
        ("7 Question: next", ("Question:", "</s>"), 64, "7 ", "stop"),
        ("7 </s> Question: next", ("Question:", "</s>"), 64, "7 ", "stop"),
        ("12345678901234 Question: " + "x" * 999, ("Question:",), 64, "12345678901234 ", "stop"),
        ("x" * 99, ("Question:",), 8, "x" * 8, "length"),
        ("x" * 99 + "Question:", ("Question:",), 104, "x" * 99 + "Quest", "length"),
        ("", ("Question:",), 8, "", "stop"),
        ("äöü" * 9, ("Question:",), 5, "äö\ufffd", "length"),
    ],
)
def test_generation_stops(reply, stops, limit, text, finish):
    model = model_of(Scripted(lambda prompt: reply))
    assert model.generate(["one", "two"], stops, limit) == [(text, finish)] * 2


def test_generation_ends_soon_after_a_stop_string():
    asked = []

    class Watching(Scripted):
        def generate(self, prompts, max_tokens, sampling=None, **options):
            inner = options["finished"]
            options["finished"] = lambda row, tokens: asked.append(len(tokens)) or inner(row, tokens)
            return super().generate(prompts, max_tokens, sampling, **options)

    # The stop string lies across the border of two blocks of eight.
    assert model_of(Watching(lambda prompt: "12345STOP" + "x" * 900)).generate(["p"], ["STOP"], 1000)[0].text == "12345"
    assert asked == [8, 16]


def test_a_long_prompt_loses_its_beginning_and_keeps_begin_of_text():
    engine = Scripted(lambda prompt: "ok")
    rows = []
    inner = engine.generate
    engine.generate = lambda prompts, *rest, **options: rows.extend(prompts) or inner(prompts, *rest, **options)
    model_of(engine, max_length=10).generate(["0123456789"], (), 4)
    assert rows == [[BYTES.bos, *b"56789"]]
    with pytest.raises(UserError, match="no room"):
        model_of(engine, max_length=10).generate(["0123456789"], (), 9)


def test_windows_predict_every_token_once():
    # The harness's own example: ten tokens, a window of four.
    windows = rolling_windows(BYTES, "0123456789", 4)
    as_text = [(bytes(t for t in context if t < 256).decode(), bytes(text).decode()) for context, text in windows]
    assert as_text == [("", "0123"), ("3", "4567"), ("567", "89")]
    assert windows[0][0] == [BYTES.bos]
    assert rolling_windows(BYTES, "", 4) == []
    assert rolling_windows(BYTES, "abcd", 4) == [([BYTES.bos], list(b"abcd"))]
