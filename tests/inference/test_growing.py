"""Texts token by token, against decoding everything at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamer_jax.data.tokenizers import ByteTokenizer, RankTokenizer
from dreamer_jax.inference.growing import Growing
from dreamer_jax.inference.text import cut

BYTES = ByteTokenizer()
# Merges whose tokens end within characters: halves of é and of 世, and whole ones.
MERGES = [b"ab", b"\xc3\xa9", b"\xa9a", b"\xe4\xb8", b"\x96b", b"b\xe4", b"###"]
TOKENIZERS = [BYTES, RankTokenizer({bytes([i]): i for i in range(256)} | {m: 256 + i for i, m in enumerate(MERGES)})]


def grown(tokenizer, tokens, stop=(), block=1):
    growing, shown = Growing(tokenizer, stop), [""]
    for start in range(0, len(tokens), block):
        growing.add(tokens[start : start + block])
        assert growing.text.startswith(shown[-1])
        shown.append(growing.text)
    growing.end()
    assert growing.text.startswith(shown[-1])
    return growing, shown


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "ranks"])
@given(data=st.data())
def test_the_text_is_that_of_all_tokens_at_once(tokenizer, data):
    """Also of bytes that are no text at all, and whatever comes together."""
    few = st.sampled_from([0x61, 0x62, 0x23, 0xC3, 0xA9, 0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0x80, tokenizer.vocab_size - 1])
    tokens = data.draw(st.lists(few | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    one, _ = grown(tokenizer, tokens, block=1)
    assert one.text == tokenizer.decode(tokens) and one.tokens == len(tokens) and not one.stopped
    several, _ = grown(tokenizer, tokens, block=data.draw(st.integers(2, 9)))
    assert several.text == one.text and several.pieces() == one.pieces()
    assert "".join(one.pieces()) == one.text and len(one.pieces()) == len(tokens)


@given(st.text(alphabet="ab#é世", max_size=30), st.lists(st.text(alphabet="b#é", min_size=1, max_size=3), max_size=4))
def test_a_stop_string_cuts_wherever_its_tokens_end(text, stop):
    tokens = BYTES.encode(text)
    growing, _ = grown(BYTES, tokens, stop)
    # One by one, the stop string that is complete first decides; of those complete at once, the one that begins first.
    first = next((n for n in range(len(text) + 1) if cut(text[:n], stop) != text[:n]), None)
    assert growing.text == (text if first is None else cut(text[:first], stop))
    assert growing.stopped == (first is not None)
    assert growing.tokens == len(BYTES.encode(text[:first]))
    assert "".join(growing.pieces()) == growing.text and len(growing.pieces()) == len(BYTES.encode(growing.text))


@given(
    st.lists(st.sampled_from([0x61, 0x23, 0xC3, 0xA9, BYTES.eos]), max_size=12),
    st.lists(st.text(alphabet="a#é\ufffd", min_size=1, max_size=3), max_size=2),
)
def test_pieces_that_were_given_stay(tokens, stop):
    """Taken while the text grows or at its end: halves of a character that turns out to begin a stop string have none,
    and a token without a text before one has."""
    growing, given_out = Growing(BYTES, stop), []
    for token in tokens:
        growing.add([token])
        given_out += growing.pieces(len(given_out))
    growing.end()
    given_out += growing.pieces(len(given_out))
    assert given_out == growing.pieces() and "".join(given_out) == growing.text


def test_what_is_shown_is_as_much_as_is_certain():
    """A half character and the beginning of a stop string wait; nothing else does."""
    _, shown = grown(BYTES, BYTES.encode("a#b##é!"), ["##", "é!!"])
    assert shown == ["", "a", "a", "a#b", "a#b", "a#b", "a#b", "a#b", "a#b"]
    _, shown = grown(BYTES, BYTES.encode("é世!"), ["!!"])
    assert shown == ["", "", "é", "é", "é", "é世", "é世"]
    growing, _ = grown(BYTES, BYTES.encode("é世!"), ["!!"])
    assert growing.text == "é世!"


@given(st.lists(st.sampled_from([0x20, 0x61, 0xC3, 0xA9, BYTES.eos]), max_size=12))
def test_a_space_behind_a_special_token_stays(tokens):
    """Of a decoder that drops a space where the text begins, as SentencePiece's."""

    class Stripping(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    growing, _ = grown(Stripping(), tokens)
    assert growing.text == Stripping().decode(tokens)


def test_a_stop_string_that_is_longer_than_the_text_costs_no_more_than_the_text():
    """A server reads them in the thread that all its clients share."""
    growing, begun = Growing(BYTES, ["a" * 1_000_000]), time.monotonic()
    growing.add(b"ba" * 20)
    assert time.monotonic() - begun < 5 and growing.text == "ba" * 19 + "b"


def test_a_long_text_of_broken_bytes_is_decoded_in_small_parts():
    """0x80 alone is never a character: without looking for borders every token would decode all before it."""

    class Counting(ByteTokenizer):
        most = 0

        def decode(self, ids):
            Counting.most = max(Counting.most, len(list(ids)))
            return super().decode(ids)

    growing, _ = grown(Counting(), [0x80] * 500)
    assert growing.text == "\ufffd" * 500 and Counting.most < 16
