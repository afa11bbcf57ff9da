"""Hugging Face's tokenizer.json: reading one, and training a small byte-level BPE."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dreamer_jax.data.cleaning import Truncated, repair, strip_traces
from dreamer_jax.data.filtering import templates
from dreamer_jax.data.jsonl import Broken, Template
from dreamer_jax.data.mixture import Mixture
from dreamer_jax.data.readers import plan_units, read_unit
from dreamer_jax.data.storage import explained, whole_file
from dreamer_jax.data.tokenizers import LLAMA3_PATTERN
from dreamer_jax.errors import UserError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MOST_IDS = 1 << 22
"""Of a tokenizer that is trained here; beyond, memory would end first."""

_NAMES = {
    "bos": (BOS, "<|begin_of_text|>", "<|begin_text|>", "<s>", "<bos>", "<|startoftext|>", "[CLS]"),
    "eos": (EOS, "<|end_of_text|>", "<|end_text|>", "</s>", "<eos>", "<|endoftext|>", "[SEP]"),
    "pad": (PAD, "<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|padding|>"),
}
"""What tokenizers call their special tokens; the first that a file holds is taken."""


class JsonTokenizer:
    """Any tokenizer that Hugging Face's `tokenizers` reads from a file.

    Bos and eos are tokens of well-known names, or else those that tokenizer_config.json beside the file names, as of a
    model that was trained elsewhere; without either they get ids of their own after the last one. Without a token for
    padding, eos pads: padding is masked, and such a model may have no further row. Nothing is added to a text, and text
    that spells a special token is encoded as plain text.

    Args:
        path: a tokenizer.json.

    Raises:
        UserError: the file is missing or broken, or the package tokenizers isn't installed.
    """

    def __init__(self, path: Path):
        module = _tokenizers(f"data.tokenizer: {path}")
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
            self._tokenizer = module.Tokenizer.from_str(text)
        except FileNotFoundError:
            raise UserError(f"data.tokenizer: {path} does not exist (seen from {Path.cwd()})") from None
        except OSError as error:
            raise UserError(f"data.tokenizer: can't read {path}: {error.strerror}") from None
        except Exception as error:  # tokenizers raises plain Exception for what it can't understand
            raise UserError(f"{path}: not a Hugging Face tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "encode them as text"
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{path}: holds no tokens")
        self.file_ids = max(vocabulary.values()) + 1
        """Ids that the file has; those of `vocab_size` beyond were added here."""
        self.vocab_size = self.file_ids
        special, beside = {}, settings_beside(path)
        for kind, names in _NAMES.items():
            known = names if kind == "pad" else (*names, beside[f"{kind}_token"])
            found = next((vocabulary[name] for name in known if name in vocabulary), None)
            if found is None and kind == "pad":
                found = special["eos"]
            elif found is None:
                found = self.vocab_size
                self.vocab_size += 1
            special[kind] = found
        self.bos, self.eos, self.pad = special["bos"], special["eos"], special["pad"]
        self._special = frozenset(special.values())
        self.path = path
        self.special_ids = {str(token.content): i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        """Text of the file's added tokens -> id; what templates of conversations are made of."""
        for unimportant in ("truncation", "padding", "post_processor"):  # not used here
            content.pop(unimportant, None)
        canonical = json.dumps(content, sort_keys=True)
        self.fingerprint = hashlib.sha256(f"tokenizer.json {special} {canonical}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of the text; half of a surrogate pair counts as U+FFFD, as in tiktoken."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # what tokenizers raises for a str that isn't Unicode
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special and unused ids are dropped."""
        kept = [int(i) for i in ids if 0 <= i < self.file_ids and i not in self._special]
        return self._tokenizer.decode(kept, skip_special_tokens=True)


def settings_beside(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json beside a tokenizer.json says, if there is one; `bos_token` and `eos_token` as strings,
    "" where it names none.

    Raises:
        UserError: it can't be read.
    """
    file = path.parent / "tokenizer_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError):
        raise UserError(f"{file}: isn't JSON that can be read; mend it or remove it") from None
    found = found if isinstance(found, dict) else {}
    for name in ("bos_token", "eos_token"):
        its = found.get(name)
        its = its.get("content") if isinstance(its, dict) else its
        found[name] = its if isinstance(its, str) else ""
    return found


def train_tokenizer(
    mixture: Mixture, size: int, out: Path, say: Callable[[str], None] = lambda line: None
) -> JsonTokenizer:
    """Train a byte-level BPE on the texts of a mixture's sources, and write it as a tokenizer.json.

    Text is cut as Llama 3 cuts it (numbers in groups of up to three digits), repaired and without traces, and keeps its
    calculator notes. Records that are broken or over `clean.max_characters` are left out.

    Args:
        size: entries: 256 bytes, three special tokens, and merges.
        out: the file to write.
        say: gets a line about records that were left out, and one where the texts have too few merges.

    Raises:
        UserError: a size that can't be, nothing to learn from, or `out` can't be written.
        ConfigError: a source isn't there, or a setting of it is wrong.
    """
    module = _tokenizers("training a tokenizer")
    if not 260 <= size <= MOST_IDS:
        raise UserError(
            f"--size {size}: must be from 260, as 256 bytes and 3 special tokens leave no merge below, to {MOST_IDS}"
        )
    texts = _Texts(mixture)
    with explained(out):  # before the work
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    tokenizer = module.Tokenizer(module.models.BPE())
    tokenizer.pre_tokenizer = module.pre_tokenizers.Sequence(
        [
            module.pre_tokenizers.Split(module.Regex(LLAMA3_PATTERN), "isolated"),
            module.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = module.decoders.ByteLevel()
    trainer = module.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(module.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    with whole_file(out) as temporary:
        temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if texts.left_out:
        say(f"{texts.left_out:,} of {texts.records:,} records were left out; the first: {texts.first}")
    if tokenizer.get_vocab_size() < size:
        say(f"fewer than --size {size}: the texts have no more pairs to merge")
    return JsonTokenizer(out)


class _Texts:
    """The texts of a mixture's sources, one after the other; counts the records, and those that give none.

    Raises:
        ConfigError: a source isn't there, before any is read.
    """

    def __init__(self, mixture: Mixture):
        self.records, self.left_out, self.first = 0, 0, ""
        self._clean = mixture.clean
        self._sources = [
            (spec, *templates(name, spec), plan_units(name, spec, 1 << 40)) for name, spec in mixture.sources.items()
        ]

    def __iter__(self) -> Iterator[str]:
        for spec, prompt, completion, units in self._sources:
            for unit in units:
                for where, value in read_unit(spec, unit, self._clean.max_record_bytes):
                    self.records += 1
                    try:
                        yield self._text(value, prompt, completion)
                    except (Broken, Truncated) as error:
                        self.left_out += 1
                        why = "breaks off within its trace or solution" if isinstance(error, Truncated) else error
                        self.first = self.first or f"{unit.file} {where} {why}"
        if self.left_out == self.records:
            raise UserError("training a tokenizer: the mixture's sources hold no usable record")

    def _text(self, value: Any, prompt: Template, completion: Template) -> str:
        if isinstance(value, Broken):
            raise value
        text, answer = prompt.fill(value), completion.fill(value)
        text = repair(text + (strip_traces(answer) if self._clean.traces == "strip" else answer))
        if len(text) > self._clean.max_characters:  # one long word would keep the trainer for minutes
            raise Broken("over max_characters", f"is longer than {self._clean.max_characters:,} characters")
        return text


def _tokenizers(who: str) -> Any:
    try:
        module = importlib.import_module("tokenizers")
        for part in ("models", "pre_tokenizers", "decoders", "trainers"):
            importlib.import_module(f"tokenizers.{part}")
    except ImportError:
        raise UserError(f"{who} needs the package tokenizers; install the extra: pip install -e '.[data]'") from None
    return module
