"""Text to token ids and back: plain bytes, the Llama-3 tokenizer from its tiktoken rank file, or a tokenizer.json."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from dreamer_jax.errors import UserError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text before merging bytes; the rank file does not hold it."""

LLAMA3_SPECIALS = 256
"""Special tokens after the last rank; begin-of-text is the first, end-of-text the second, padding the fifth."""

LONGEST_RUN = 25_000
"""Characters of one kind, space or not, without a break: Llama 3's own code cuts longer runs as well, and tiktoken's
matcher runs out of stack on some hundred thousand spaces."""

_RUN = re.compile(r"\s+|\S+")


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer. Special tokens never come from text."""

    vocab_size: int
    bos: int
    eos: int
    pad: int
    fingerprint: str
    """SHA-256 of all that decides the ids; equal fingerprints mean equal ids for every text."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens; text that spells one is encoded as plain text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special and unused ids are dropped, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, then bos, eos and pad."""

    vocab_size = 259
    bos = 256
    eos = 257
    pad = 258
    fingerprint = hashlib.sha256(b"bytes: 256 bytes, bos 256, eos 257, pad 258").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Bytes of the text in UTF-8."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids below 256."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class RankTokenizer:
    """Byte-pair merges in the order of a tiktoken rank file, with Llama 3's split pattern and special tokens.

    Args:
        ranks: rank of every token's bytes; the ranks are 0..len(ranks)-1 and every single byte has one.
    """

    def __init__(self, ranks: dict[bytes, int]):
        try:
            import tiktoken
        except ImportError:
            raise UserError("the Llama-3 tokenizer needs tiktoken; install it with: pip install tiktoken") from None
        self.ranks = ranks
        self._text_ids = len(ranks)
        self.bos = len(ranks)
        self.eos = len(ranks) + 1
        self.pad = len(ranks) + 4
        self.vocab_size = len(ranks) + LLAMA3_SPECIALS
        digest = hashlib.sha256(f"tiktoken {LLAMA3_PATTERN} specials {LLAMA3_SPECIALS}\n".encode())
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(token.hex().encode() + b" %d\n" % rank)
        self.fingerprint = digest.hexdigest()
        # The special tokens stay out of tiktoken, so that no text can ever spell one.
        self._encoding = tiktoken.Encoding(
            "ranks", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of the text, all below the first special token."""
        if len(text) <= LONGEST_RUN:
            return self._encoding.encode_ordinary(text)
        return [i for part in _cut_long_runs(text) for i in self._encoding.encode_ordinary(part)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids below the first special token."""
        kept = [int(i) for i in ids if 0 <= i < self._text_ids]
        return self._encoding.decode_bytes(kept).decode("utf-8", errors="replace")


def encode_pair(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of its completion: how training, prepared data and evaluation all encode the two.

    They are encoded apart, so that no token holds characters of both and the completion begins with a token of its
    own, whatever the prompt; a space between them belongs to the text it is written in. See docs/data.md.
    """
    return tokenizer.encode(prompt), tokenizer.encode(completion)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that data.tokenizer names.

    Args:
        spec: "bytes", or the path of a tiktoken rank file (a line is `base64(token bytes) rank`), or of a
            Hugging Face tokenizer.json (the name ends in .json).

    Raises:
        UserError: the file is missing or broken (with the line), or the package it needs is not installed.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec.endswith(".json"):
        from dreamer_jax.data.json_tokenizer import JsonTokenizer

        return JsonTokenizer(Path(spec))
    return RankTokenizer(_read_ranks(Path(spec)))


def _cut_long_runs(text: str) -> Iterator[str]:
    """Parts of the text, cut inside every run longer than LONGEST_RUN and nowhere else."""
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise UserError(
            f"data.tokenizer: {path} does not exist; give the path of a tiktoken rank file, or bytes"
        ) from None
    except OSError as error:
        raise UserError(f"data.tokenizer: can't read {path}: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        token, rank = _parse_rank(line, f"{path}: line {number}")
        if rank != number - 1:
            raise UserError(f"{path}: line {number}: rank {rank} where {number - 1} is due; ranks count up from 0")
        if token in ranks:
            raise UserError(f"{path}: line {number}: the same token as line {ranks[token] + 1}")
        ranks[token] = rank
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise UserError(
            f"{path}: {missing} of the 256 single bytes have no rank, so not every text could be encoded; "
            "is this a whole tiktoken rank file?"
        )
    return ranks


def _parse_rank(line: bytes, where: str) -> tuple[bytes, int]:
    parts = line.split(b" ")
    if len(parts) != 2 or not parts[1].isdigit():
        raise UserError(f"{where}: not a rank line; expected `base64(token bytes) rank`, as in tiktoken's files")
    try:
        token = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"{where}: the token is not valid base64") from None
    if not token:
        raise UserError(f"{where}: the token is empty")
    return token, int(parts[1])
