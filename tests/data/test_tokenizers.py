"""Ids, round trips and broken rank files."""

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamer_jax.data import load_tokenizer
from dreamer_jax.data.tokenizers import LONGEST_RUN, RankTokenizer
from dreamer_jax.errors import UserError
from tests.outside import LLAMA3, sample, write_rank_file

MERGES = [b"he", b"ll", b"hell", b"hello", b" w", b"  ", b"12", b"123"]
SMALL_RANKS = {token: rank for rank, token in enumerate([bytes([b]) for b in range(256)] + MERGES)}
SMALL = RankTokenizer(SMALL_RANKS)


def rank_lines(ranks: dict[bytes, int]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]


def write_lines(folder: Path, lines: list[bytes]) -> str:
    path = folder / "ranks.model"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@pytest.mark.parametrize("tokenizer", [load_tokenizer("bytes"), SMALL], ids=["bytes", "ranks"])
def test_round_trip(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    specials = {tokenizer.bos, tokenizer.eos, tokenizer.pad}
    assert not specials & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size + 7]) == text


def test_bytes_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (256, 257, 258, 259)
    assert tokenizer.encode("Aé") == [65, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "�"


def test_specials_follow_the_last_rank_and_never_come_from_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_lines(tmp_path, rank_lines(SMALL_RANKS)))
    n = len(SMALL_RANKS)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (n, n + 1, n + 4, n + 256)
    assert tokenizer.encode("hello w") == [SMALL_RANKS[b"hello"], SMALL_RANKS[b" w"]]
    text = "<|begin_of_text|><|end_of_text|>"
    assert max(tokenizer.encode(text)) < n
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fingerprint_follows_the_ranks() -> None:
    swapped = dict(SMALL_RANKS)
    swapped[b"he"], swapped[b"ll"] = swapped[b"ll"], swapped[b"he"]
    prints = {load_tokenizer("bytes").fingerprint, SMALL.fingerprint, RankTokenizer(swapped).fingerprint}
    assert len(prints) == 3
    assert RankTokenizer(dict(reversed(SMALL_RANKS.items()))).fingerprint == SMALL.fingerprint


def test_very_long_runs() -> None:
    text = "ä" + "x" * LONGEST_RUN + " " * 2_000_000 + "y z" * 10  # tiktoken itself panics at these spaces
    assert SMALL.decode(SMALL.encode(text)) == text
    assert len(SMALL.encode("." + "he" * LONGEST_RUN)) == LONGEST_RUN + 3  # "." and the pair that each cut splits
    ordinary = "hello w\n" * LONGEST_RUN
    assert SMALL.encode(ordinary) == SMALL.encode("hello w\n") * LONGEST_RUN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.__setitem__(4, b"no-rank"), "line 5: not a rank line"),
        (lambda lines: lines.__setitem__(4, b"QQ== four"), "line 5: not a rank line"),
        (lambda lines: lines.__setitem__(4, b"*** 4"), "line 5: the token is not valid base64"),
        (lambda lines: lines.__setitem__(4, b" 4"), "line 5: the token is empty"),
        (lambda lines: lines.__delitem__(4), "line 5: rank 5 where 4 is due"),
        (lambda lines: lines.__setitem__(4, lines[3].replace(b" 3", b" 4")), "line 5: the same token as line 4"),
        (lambda lines: lines.__delitem__(slice(100, None)), "156 of the 256 single bytes have no rank"),
        (lambda lines: lines.clear(), "line 1: not a rank line"),
    ],
)
def test_broken_rank_files(tmp_path: Path, change, message: str) -> None:
    lines = rank_lines(SMALL_RANKS)
    change(lines)
    with pytest.raises(UserError, match=message):
        load_tokenizer(write_lines(tmp_path, lines))


def test_missing_rank_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.model does not exist.*tiktoken rank file"):
        load_tokenizer(str(tmp_path / "nothing.model"))
    with pytest.raises(UserError, match="can't read"):
        load_tokenizer(str(tmp_path))


def test_a_trained_rank_file_merges_as_its_training_did(tmp_path: Path) -> None:
    """The ids of tiktoken and of Hugging Face's tokenizers, which trained it, are the same but for three specials."""
    tokenizer = load_tokenizer(str(write_rank_file(tmp_path)))
    trained = load_tokenizer(str(tmp_path / "trained.json"))
    assert (tokenizer.bos, tokenizer.vocab_size) == (997, 997 + 256)
    texts = [f"{record['question']}\n{record['answer']}" for record in sample("gsm8k/test")]
    ids = [tokenizer.encode(text) for text in texts]
    assert ids == [[number - 3 for number in trained.encode(text)] for text in texts]
    assert [tokenizer.decode(its) for its in ids] == texts
    assert sum(map(len, ids)) < 0.5 * sum(map(len, texts))  # it has learned the words


@pytest.mark.llama3
def test_llama3() -> None:
    tokenizer = load_tokenizer(str(LLAMA3))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (128000, 128001, 128004, 128256)
    assert tokenizer.encode("hello world! 12345") == [15339, 1917, 0, 220, 4513, 1774]
    records = sample("gsm8k/train")
    joined = sum(len(tokenizer.encode(f"{r['question']}\n{r['answer']}")) for r in records)
    apart = sum(len(tokenizer.encode(r["question"] + "\n")) + len(tokenizer.encode(r["answer"])) for r in records)
    assert joined == 19_609  # and so does plain tiktoken with this file
    assert apart == joined
