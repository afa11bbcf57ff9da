"""The tokenizer of a run as the files transformers reads: tokenizer.json, tokenizer_config.json, special tokens."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from dreamer_jax.data.tokenizers import LLAMA3_PATTERN, LLAMA3_SPECIALS, RankTokenizer, Tokenizer

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
LLAMA3_NAMES = {
    0: BEGIN,
    1: END,
    2: "<|reserved_special_token_0|>",
    3: "<|reserved_special_token_1|>",
    4: PAD,
    5: "<|reserved_special_token_2|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
"""Llama 3's own names of its special tokens, counted from the first; the rest are reserved ones."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer, spec: str, longest: int) -> None:
    """Write the tokenizer; the ids of every text are those of `tokenizer`, with the begin-of-text token before them.

    Args:
        folder: where to.
        tokenizer: the run's.
        spec: the run's `data.tokenizer`.
        longest: tokens of the longest context it was trained with.
    """
    if spec.endswith(".json"):
        content, names = _from_json(json.loads(Path(spec).read_text(encoding="utf-8")), tokenizer)
    else:
        content, names = _byte_level(tokenizer), (BEGIN, END, PAD)
        if isinstance(tokenizer, RankTokenizer):
            _copy_licences(folder, Path(spec))
    begin, end, pad = names
    first, text = {"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    content |= {
        "truncation": None,
        "padding": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [tokenizer.bos], "tokens": [begin]}},
        },
    }
    special = {"bos_token": begin, "eos_token": end, "pad_token": pad}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
    }
    _write(folder / "tokenizer.json", content, indent=None)
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "special_tokens_map.json", special)


def _byte_level(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json of the byte tokenizer, or of a rank file."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if isinstance(tokenizer, RankTokenizer):
        ranks = tokenizer.ranks
        specials = [LLAMA3_NAMES.get(i, f"<|reserved_special_token_{i - 8}|>") for i in range(LLAMA3_SPECIALS)]
        split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
        splitter: dict[str, Any] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    else:
        ranks = {bytes([value]): value for value in range(256)}
        specials = [BEGIN, END, PAD]
        splitter = byte_level
    return {
        "version": "1.0",
        "added_tokens": [_added(len(ranks) + i, name) for i, name in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": splitter,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {_spell(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": merges(ranks),
        },
    }


def _from_json(content: dict[str, Any], tokenizer: Tokenizer) -> tuple[dict[str, Any], tuple[str, str, str]]:
    """A tokenizer.json with the special tokens that the run added to it, and their names."""
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict):
        added |= {number: name for name, number in vocabulary.items() if number not in added}
    names = []
    for number, name in ((tokenizer.bos, "<|bos|>"), (tokenizer.eos, "<|eos|>"), (tokenizer.pad, "<|pad|>")):
        if number not in added:
            content["added_tokens"] = [*(content.get("added_tokens") or []), _added(number, name)]
            added[number] = name
        names.append(added[number])
    return content, (names[0], names[1], names[2])


def _added(number: int, name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": True}


def _copy_licences(folder: Path, rank_file: Path) -> None:
    """Copy the licence texts that lie beside a rank file: they have to travel with it."""
    for path in sorted(rank_file.parent.iterdir()):
        if path.is_file() and path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")):
            shutil.copyfile(path, folder / f"tokenizer-{path.name}")


def merges(ranks: dict[bytes, int]) -> list[list[str]]:
    """The pairs that make each token, in the order of the ranks: what a rank file leaves out.

    The pair of a token is what remains when its bytes are merged by all smaller ranks.
    """
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            lowest = min(joined)
            if lowest >= rank:
                break
            place = joined.index(lowest)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            pairs.append([_spell(parts[0]), _spell(parts[1])])
    return pairs


@functools.cache
def _letters() -> list[str]:
    """The printable character that stands for each byte, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return [chr(value) if value in printable else chr(256 + others.index(value)) for value in range(256)]


def _spell(token: bytes) -> str:
    return "".join(_letters()[value] for value in token)


def _write(path: Path, content: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
