"""Texts to tokens and back: what is scored, and where generation stops."""

from __future__ import annotations

import math

import pytest

from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from tests.evaluation.cases import Scripted, Successor, model_of

HALF, REST = math.log(1 / 2), math.log(1 / 516)
BYTES = ByteTokenizer()


def tokens(context: str, text: str) -> tuple[list[int], list[int]]:
    """A pair of token lists, begin-of-text first."""
    return [BYTES.bos, *context.encode()], list(text.encode())


def test_likelihoods_by_hand():
    """Of what follows, whatever stands before it; nothing is certain."""
    pairs = [tokens("ab", "cd"), tokens("ab", "cx"), tokens("", "ab"), tokens("ab", "")]
    expected = [(2 * HALF, True), (HALF + REST, False), (REST + HALF, False), (0.0, True)]
    for one, (logprob, greedy) in zip(model_of(Successor()).likelihoods(pairs), expected, strict=True):
        assert one.logprob == pytest.approx(logprob, abs=1e-12)
        assert one.greedy is greedy
    found = model_of(Successor()).completion_likelihoods([("ab", "cd"), ("a ", "b")])
    assert [one.logprob for one in found] == pytest.approx([2 * HALF, REST])


def test_a_long_context_loses_its_beginning():
    model = model_of(Successor(), max_length=4)
    assert model.likelihoods([tokens("x" * 100 + "ab", "cd")])[0].logprob == pytest.approx(2 * HALF)
    assert model.likelihoods([tokens("", "abcdefgh")])[0].logprob == pytest.approx(4 * HALF)  # what fits of it


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
    found = model.generate(["one", "two"], limit, stop=stops)
    assert [(one.text, one.finish) for one in found] == [(text, finish)] * 2


def test_generation_ends_soon_after_a_stop_string():
    asked = []

    class Watching(Scripted):
        def generate(self, prompts, max_tokens, sampling, **options):
            inner = options["finished"]
            options["finished"] = lambda row, tokens: asked.append(len(tokens)) or inner(row, tokens)
            return super().generate(prompts, max_tokens, sampling, **options)

    # The stop string lies across the border of two blocks of eight.
    assert (
        model_of(Watching(lambda prompt: "12345STOP" + "x" * 900)).generate(["p"], 1000, stop=["STOP"])[0].text
        == "12345"
    )
    assert asked == [8, 16]


def test_a_long_prompt_loses_its_beginning_and_keeps_begin_of_text():
    engine = Scripted(lambda prompt: "ok")
    rows = []
    inner = engine.generate
    engine.generate = lambda prompts, *rest, **options: rows.extend(prompts) or inner(prompts, *rest, **options)
    model_of(engine, max_length=10).generate(["0123456789"], 4)
    assert rows == [[BYTES.bos, *b"56789"]]
    with pytest.raises(UserError, match="no room"):
        model_of(engine, max_length=10).generate(["0123456789"], 9)
