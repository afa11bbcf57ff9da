"""Texts and what is shown of them while they grow, with an engine that says what it is told to say."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Engine, Generated, LanguageModel

TOKENIZER = ByteTokenizer()


class Says(Engine):
    """Gives every row the bytes of a text, `block` at a time, and stops where it is told to."""

    def __init__(self, text: str, ends: bool = True):
        self.said, self.ends, self.prompts = TOKENIZER.encode(text), ends, []
        self.model: Any = SimpleNamespace()

    def stream(self, prompts, max_tokens, sampling=None, stop_ids=(), finished=None, block=1, numbers=None):
        self.prompts += [list(prompt) for prompt in prompts]
        rows = [Generated([], []) for _ in prompts]
        assert TOKENIZER.eos in stop_ids
        for start in range(0, len(self.said), block):
            for i, row in enumerate(rows):
                row.tokens += self.said[start : start + block]
                row.depths = [2] * len(row.tokens)
                if finished is not None and finished(i, row.tokens):
                    row.finish = "stop"
            if all(row.finish == "stop" for row in rows):
                break
            yield rows
        for row in rows:
            row.finish = "stop" if self.ends or row.finish == "stop" else "length"
        yield rows


def test_prompts_begin_with_the_begin_of_text_token():
    engine = Says("x")
    LanguageModel(engine, TOKENIZER).generate(["ab"], 5)
    assert engine.prompts == [[TOKENIZER.bos, 97, 98]]


def test_a_single_text_is_one_prompt():
    engine = Says("x")
    model = LanguageModel(engine, TOKENIZER)
    assert len(model.generate("ab", 5)) == 1 and all(len(texts) == 1 for texts in model.stream("ab", 5))
    assert engine.prompts == [[TOKENIZER.bos, 97, 98]] * 2
    engine.score = lambda rows, batch_size: rows  # type: ignore[method-assign]
    assert model.score("ab") == [[TOKENIZER.bos, 97, 98]]


def test_a_text_is_cut_before_its_first_stop_string():
    text = LanguageModel(Says("one two\nthree STOP", ends=False), TOKENIZER).generate(["a"], 99, stop=["STOP", "\n"])[0]
    assert (text.text, text.finish, text.mean_depth) == ("one two", "stop", 2.0)


@pytest.mark.parametrize(("stop", "kept"), [(["he t", "e"], " th"), (["e", "he t"], " th"), (["he", "the"], " ")])
def test_of_several_stop_strings_the_one_that_is_complete_first_counts(stop, kept):
    """Where they overlap, too, and whether tokens come one by one or many at once."""
    for block in (1, 3, 40):
        model = LanguageModel(Says(" the the", ends=False), TOKENIZER)
        *_, (shown,) = model.stream(["a"], 8, stop=stop, block=block)
        whole = model.generate(["a"], 8, stop=stop)[0]
        assert (shown.text, shown.finish) == (whole.text, whole.finish) == (kept, "stop")


def test_a_text_without_a_stop_string_is_whole():
    text = LanguageModel(Says("plain", ends=False), TOKENIZER).generate(["a"], 5, stop=["STOP"])[0]
    assert (text.text, text.finish, len(text.tokens)) == ("plain", "length", 5)


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_what_is_shown_only_grows_and_never_shows_part_of_a_stop_string(block):
    said = "über 1#2## three 🎉 done###rest"
    shown = [
        texts[0].text for texts in LanguageModel(Says(said), TOKENIZER).stream(["a"], 99, stop=["###"], block=block)
    ]
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
    assert shown[-1] == "über 1#2## three 🎉 done"
    assert all("�" not in text for text in shown)
    assert len(set(shown)) > len(said.encode()) // block // 2


@pytest.mark.parametrize(("stop", "message"), [("", "empty"), ("\udcff", "isn't text in UTF-8")])  # a byte of a shell
def test_a_stop_string_that_cannot_be_is_refused(stop, message):
    with pytest.raises(UserError, match=message):
        LanguageModel(Says("x"), TOKENIZER).generate(["a"], 5, stop=[stop])
