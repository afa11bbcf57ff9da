"""The rules that look at one record at a time: read, repair, strip, decontaminate, tokenize one unit of a source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.data.cleaning import Truncated, remove_calculator_notes, repair, strip_traces
from dreamer_jax.data.decontamination import BenchmarkIndex
from dreamer_jax.data.formats import Item, Unit
from dreamer_jax.data.jsonl import Broken, Template
from dreamer_jax.data.mixture import BenchmarkSpec, Mixture, SourceSpec
from dreamer_jax.data.readers import read_all, read_unit
from dreamer_jax.data.records import Record
from dreamer_jax.data.storage import Kept, PartWriter, whole_directory, write_json
from dreamer_jax.data.tokenizers import Tokenizer, encode_pair
from dreamer_jax.data.words import band_keys, formula_key
from dreamer_jax.errors import ConfigError, UserError

PART_RECORDS = 65_536
PART_TOKENS = 1 << 25
"""A part is closed when it has this many records or tokens; each part becomes one shard."""

BATCH_CHARACTERS = 1_000_000
BATCH_RECORDS = 512
"""Records are looked at in batches of this size, so that hashing works on long arrays."""

EXAMPLES = 3
EXAMPLE_CHARACTERS = 240


@dataclass
class Tally:
    """Records and tokens that fell under a rule, and the first few of them."""

    records: int = 0
    tokens: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, tokens: int, where: str, text: str, because: str = "") -> None:
        """Count one record."""
        self.records += 1
        self.tokens += tokens
        if len(self.examples) < EXAMPLES:
            example = {"where": where, "text": shorten(text)}
            self.examples.append(example | ({"because": shorten(because)} if because else {}))

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts of a later unit."""
        self.records += other["records"]
        self.tokens += other["tokens"]
        self.examples += other["examples"][: EXAMPLES - len(self.examples)]


def shorten(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= EXAMPLE_CHARACTERS:
        return text
    half = EXAMPLE_CHARACTERS // 2
    return f"{text[:half]} [...] {text[-half:]}"


@dataclass
class _Candidate:
    """A record on its way through the rules."""

    where: str
    record: Record
    tokens: np.ndarray
    prompt_tokens: int


class UnitFilter:
    """Applies the rules to units; one of these in every process.

    Args:
        mixture: what to do.
        tokenizer: the mixture's.
        benchmarks: what may not be in the records, or None.
    """

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer, benchmarks: BenchmarkIndex | None):
        self._mixture = mixture
        self._tokenizer = tokenizer
        self._benchmarks = benchmarks or BenchmarkIndex({}, 1.0)

    def write(self, unit: Unit, directory: Path) -> None:
        """Filter a unit into `directory`: parts (storage.PartWriter) and done.json with the counts."""
        spec = self._mixture.sources[unit.source]
        self._dropped: dict[str, Tally] = {}
        self._changed: dict[str, Tally] = {}
        self._read = self._read_tokens = 0
        parts: list[dict[str, int]] = []
        with whole_directory(directory) as temporary:
            writer = PartWriter(temporary, 0)

            def close() -> None:
                writer.close()
                parts.append({"records": len(writer), "tokens": writer.tokens})

            candidates = self._candidates(spec, read_unit(spec, unit, self._mixture.clean.max_record_bytes), unit)
            for batch in _batches(candidates):
                if len(writer) >= PART_RECORDS or writer.tokens >= PART_TOKENS:
                    close()
                    writer = PartWriter(temporary, len(parts))
                self._write_batch(batch, writer)
            close()
            counts = {"source": unit.source, "file": unit.file, "read": self._read, "read_tokens": self._read_tokens}
            for name, tallies in (("dropped", self._dropped), ("changed", self._changed)):
                counts[name] = {rule: vars(tally) for rule, tally in tallies.items()}
            write_json(temporary / "done.json", counts | {"parts": parts})

    def _candidates(self, spec: SourceSpec, items: Iterable[Item], unit: Unit) -> Iterator[_Candidate]:
        """The records that can be read, repaired; everything else is counted."""
        prompt, completion = templates(unit.source, spec)
        # A text that holds no more than its template: no record of it has a text of its own. None: it names no field.
        bare = tuple(_bare(repair(its.constant)) if its.fields else None for its in (prompt, completion))
        for where, value in items:
            self._read += 1
            place = f"{unit.file} {where}"
            try:
                if isinstance(value, Broken):
                    raise value
                record = Record(prompt.fill(value), completion.fill(value))
            except Broken as broken:
                self._drop(f"broken: {broken.kind}", 0, place, "", str(broken))
                continue
            candidate = self._clean(spec, record, place, bare)
            if candidate is not None:
                yield candidate

    def _clean(self, spec: SourceSpec, record: Record, place: str, bare: tuple[str | None, ...]) -> _Candidate | None:
        raw = Record(*map(repair, record))
        changes = []
        if raw != record:
            changes.append("text repaired")
        cleaned = raw
        if spec.calculator_notes == "remove":
            cleaned = Record(*map(remove_calculator_notes, cleaned))
            if cleaned != raw:
                changes.append("calculator notes removed")
        rule = ""
        if self._mixture.clean.traces == "strip":
            try:
                without = Record(cleaned.prompt, strip_traces(cleaned.completion))
                if without != cleaned:
                    changes.append("traces removed")
                    rule = "" if without.completion else "nothing after the trace"
                cleaned = without
            except Truncated:
                rule = "trace cut short"
        rule = rule or self._unusable(cleaned, bare)
        before = self._encode(record) if rule or changes else None
        if rule:
            assert before is not None
            self._read_tokens += len(before[0])
            self._drop(rule, len(before[0]), place, record.prompt + record.completion)
            return None
        tokens, prompt_tokens = self._encode(cleaned)
        first = len(tokens) if before is None else len(before[0])
        self._read_tokens += first
        for change in changes:
            saved = first - len(tokens) if change == changes[-1] else 0  # what several changes save counts for the last
            text = record.prompt + record.completion
            self._changed.setdefault(change, Tally()).add(saved, place, text, cleaned.prompt + cleaned.completion)
        return _Candidate(place, cleaned, np.array(tokens, np.int32), prompt_tokens)

    def _unusable(self, record: Record, bare: tuple[str | None, ...]) -> str:
        """The rule that drops a cleaned record, or ""; `bare` is what its texts are without its fields."""
        if any(_bare(text) == its for text, its in zip(record, bare, strict=True)):
            return "empty"
        if "\ufffd" in record.prompt or "\ufffd" in record.completion:
            return "characters lost"  # U+FFFD stands where an earlier conversion failed
        if len(record.prompt) + len(record.completion) > self._mixture.clean.max_characters:
            return "over max_characters"
        return ""

    def _encode(self, record: Record) -> tuple[list[int], int]:
        tokenizer = self._tokenizer
        prompt, completion = encode_pair(tokenizer, *record)
        return [tokenizer.bos, *prompt, *completion, tokenizer.eos], len(prompt)

    def _write_batch(self, batch: list[_Candidate], writer: PartWriter) -> None:
        benchmarks, settings = self._benchmarks, self._mixture.deduplicate
        prompts = [benchmarks.hashes(candidate.record.prompt) for candidate in batch]
        completions = [benchmarks.hashes(candidate.record.completion) for candidate in batch]
        # Plain text has no prompt; then the text itself may hold a question.
        questions = [prompt or completion for prompt, completion in zip(prompts, completions, strict=True)]
        texts, formulas = [], []
        for i, match in enumerate(benchmarks.find(questions)):
            candidate = batch[i]
            if match is not None:
                self._drop(
                    f"contaminated: {match.kind}, {match.benchmark}",
                    len(candidate.tokens),
                    candidate.where,
                    candidate.record.prompt or candidate.record.completion,
                    match.question,
                )
                continue
            text = compared(candidate.record, settings.compare)
            exact = hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=16).digest()
            writer.add(Kept(*candidate.record, candidate.tokens, candidate.prompt_tokens), exact)
            texts.append(prompts[i] if settings.compare == "prompt" and prompts[i] else prompts[i] + completions[i])
            formulas.append(formula_key(text) if settings.near else 0)
        if settings.near and texts:
            writer.add_bands(band_keys(texts, formulas))

    def _drop(self, rule: str, tokens: int, where: str, text: str, because: str = "") -> None:
        self._dropped.setdefault(rule, Tally()).add(tokens, where, text, because)


def _bare(text: str) -> str:
    return "".join(text.split())


def compared(record: Record | Kept, compare: str) -> str:
    """The text that deduplication compares."""
    if compare == "prompt" and record.prompt:
        return record.prompt
    return record.prompt + "\n" + record.completion


def templates(name: str, spec: SourceSpec) -> tuple[Template, Template]:
    """Prompt and completion templates of a source, over the fields of its records."""
    key = f"sources.{name}"
    completion = Template(spec.completion, f"{key}.completion", spec.fields)
    if not completion.fields:
        raise ConfigError(f"{key}.completion: {spec.completion!r} names no field", f"{key}.completion")
    return Template(spec.prompt, f"{key}.prompt", spec.fields), completion


def question_template(name: str, spec: BenchmarkSpec) -> Template:
    """The template of a benchmark's questions, over the fields of its records."""
    key = f"decontaminate.benchmarks.{name}.text"
    template = Template(spec.text, key, spec.fields)
    if not template.fields:
        raise ConfigError(f"{key}: {spec.text!r} names no field, so no question would be looked for", key)
    return template


def read_benchmarks(mixture: Mixture) -> BenchmarkIndex | None:
    """The index of the mixture's benchmarks, or None when it names none.

    Raises:
        UserError: a benchmark is missing, empty or has a broken record: nothing may slip through.
    """
    settings = mixture.decontaminate
    if not settings.benchmarks:
        return None
    limit = mixture.clean.max_record_bytes
    questions = {name: list(_questions(name, spec, limit)) for name, spec in settings.benchmarks.items()}
    return BenchmarkIndex(questions, settings.containment)


def _questions(name: str, spec: BenchmarkSpec, limit: int) -> Iterator[str]:
    key = f"decontaminate.benchmarks.{name}"
    template, empty = question_template(name, spec), True
    for where, value in read_all(spec, key, limit):
        empty = False
        try:
            if isinstance(value, Broken):
                raise value
            yield template.fill(value)
        except Broken as broken:
            raise UserError(f"{key}: {spec.path} {where}: {broken}; mend it, so that no question is missed") from None
    if empty:
        raise UserError(f"{key}: {spec.path} holds no records")


def _batches(candidates: Iterator[_Candidate]) -> Iterator[list[_Candidate]]:
    batch: list[_Candidate] = []
    characters = 0
    for candidate in candidates:
        batch.append(candidate)
        characters += len(candidate.record.prompt) + len(candidate.record.completion)
        if len(batch) >= BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
