"""The file that `dreamer data prepare` reads: sources, how they are cleaned, and what they must not contain."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from dreamer_jax.config.files import at, describe, entries, is_nothing, parse, scalar, text_of
from dreamer_jax.config.keys import did_you_mean
from dreamer_jax.configs import find
from dreamer_jax.errors import ConfigError

T = TypeVar("T")

Format = Literal["auto", "jsonl", "parquet", "csv", "text", "tfds", "hub", "task"]
"""How records are stored; auto goes by the ending of the file: .jsonl, .json, .parquet, .csv, .txt, each also .gz."""


@dataclass(frozen=True)
class SourceSpec:
    """One source of records, and its share of the mixture."""

    path: str = ""
    """File, folder or pattern (data/*.jsonl.gz), taken in the order of the names; seen from the working directory.
    Format tfds: the folder of the prepared TFDS data. Format hub: the data set's name there, owner/name.
    Format task: the task's name."""
    format: Format = "auto"
    config: str = ""
    """Format tfds: the builder's name, where path is a folder of several. Format hub: the configuration, or several
    with commas between."""
    split: str = "train"
    """Formats tfds and hub: the split."""
    records: int = 0
    """Format task: how many instances. Other formats: read at most this many, the first of all files (0: all)."""
    difficulty: int = 4
    """Format task: the hardest instance."""
    columns: str = ""
    """Format csv: names of the columns, with commas between, of a file whose first line holds none."""
    fields: dict[str, str] = field(default_factory=dict)
    """Name in the templates -> field of the record; messages.1.content goes into lists and objects."""
    prompt: str = "{question}\n"
    """What is given; {name} stands for a field. Plain text has the prompt ""."""
    completion: str = "{answer}"
    """What is to be written."""
    calculator_notes: Literal["keep", "remove"] = "keep"
    """remove: take out GSM8K's <<48/2=24>>."""
    licence: str = ""
    """For the report and the index."""
    url: str = ""
    """Where the data come from."""
    heldout: int = 0
    """One record in this many isn't for training and goes to heldout/NAME.jsonl, with no copy or near copy of it among
    the data: a hash of its prompt (of plain text itself) decides, before anything else is known of it. 0: none."""
    weight: float = 0.0
    """Share of the tokens, relative to the other sources' weights."""
    epochs: float = 0.0
    """Passes over the source in one round of the mixture; 1 when no weight, epochs or tokens are given."""
    tokens: float = 0.0
    """Tokens of the source in one round of the mixture."""


@dataclass(frozen=True)
class CleaningSpec:
    """What is repaired, and which records are dropped."""

    traces: Literal["strip", "keep"] = "strip"
    """strip: remove chain-of-thought traces from completions; a trace that is cut short drops the record."""
    max_record_bytes: int = 10_000_000
    """A longer line or value is dropped unread."""
    max_characters: int = 100_000
    """A longer record (prompt and completion, after stripping) is dropped."""


@dataclass(frozen=True)
class DeduplicationSpec:
    """Which repeated records are dropped; the first in the order of the sources stays."""

    exact: bool = True
    near: bool = True
    """MinHash candidates, confirmed: Jaccard similarity of word 3-grams, and the same numbers and formulas."""
    threshold: float = 0.7
    """Smallest Jaccard similarity of near duplicates."""
    compare: Literal["record", "prompt"] = "record"
    """What is compared: prompt and completion, or the prompt alone (then a second answer is a duplicate)."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """Questions that training data must not contain."""

    path: str = ""
    format: Format = "auto"
    columns: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    text: str = "{question}"
    """The question; {name} stands for a field."""
    config: str = ""
    split: str = "test"


@dataclass(frozen=True)
class DecontaminationSpec:
    """When a record counts as containing a benchmark question."""

    containment: float = 0.5
    """Share of a question's word 13-grams that a record may not reach."""
    benchmarks: dict[str, BenchmarkSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixture:
    """A whole preparation file."""

    tokenizer: str = "bytes"
    """bytes, a tiktoken rank file or a tokenizer.json."""
    sources: dict[str, SourceSpec] = field(default_factory=dict)
    clean: CleaningSpec = field(default_factory=CleaningSpec)
    deduplicate: DeduplicationSpec = field(default_factory=DeduplicationSpec)
    decontaminate: DecontaminationSpec = field(default_factory=DecontaminationSpec)


LONGEST_NAME = 128
"""Bytes of a source's name: a file system has 255 for a file's, and more is added to it."""


def load_mixture(path: str | Path) -> Mixture:
    """Read a mixture.

    Args:
        path: the file, or the name of a mixture of the package.
    Raises:
        ConfigError: with file and line: an unknown or doubled key, a wrong type, settings that can't work.
    """
    path = find(path, "mixture")
    root = parse(text_of(path), path)
    if root is None:
        raise ConfigError(f"{path}: is empty; it needs sources:")
    mixture = _section(path, root, Mixture, "")
    _check(path, root, mixture)
    return mixture


def at_its_line(path: str | Path, error: ConfigError) -> ConfigError:
    """An error of a mixture's settings that showed later, with the file and line that its key stands in."""
    file = find(path, "mixture")
    root = parse(text_of(file), file)
    return error if root is None else ConfigError(f"{_where(file, root, error.key or '')}: {error}", error.key)


def _section(path: Path, node: yaml.Node, kind: type[T], prefix: str) -> T:
    """A dataclass from a mapping."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{at(path, node)}: {prefix.rstrip('.') or 'the file'}: expected keys, got {describe(node)}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, key_node, value_node in entries(path, node, prefix):
        if name not in names:
            alike = difflib.get_close_matches(name, names, n=1)
            hint = did_you_mean(prefix + alike[0]) if alike else f"; one of: {', '.join(names)}"
            raise ConfigError(f"{at(path, key_node)}: unknown key '{prefix}{name}'{hint}", f"{prefix}{name}")
        values[name] = _value(path, value_node, hints[name], f"{prefix}{name}")
    return kind(**values)


def _value(path: Path, node: yaml.Node, kind: Any, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _section(path, node, typing.cast(type, kind), f"{key}.")
    if get_origin(kind) is not dict:
        return scalar(path, key, node, kind)
    if isinstance(node, yaml.ScalarNode) and is_nothing(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{at(path, node)}: {key}: expected names, got {describe(node)}", key)
    inner = get_args(kind)[1]
    return {name: _value(path, value, inner, f"{key}.{name}") for name, _, value in entries(path, node, f"{key}.")}


def _check(path: Path, root: yaml.Node, mixture: Mixture) -> None:
    def fail(key: str, problem: str) -> typing.NoReturn:
        raise ConfigError(f"{_where(path, root, key)}: {key}: {problem}", key)

    if not mixture.sources:
        fail("sources", "is empty; name at least one source")
    if not 0 < mixture.deduplicate.threshold <= 1:
        fail("deduplicate.threshold", f"{mixture.deduplicate.threshold} is not above 0 and at most 1")
    if not 0 < mixture.decontaminate.containment <= 1:
        fail("decontaminate.containment", f"{mixture.decontaminate.containment} is not above 0 and at most 1")
    for name in ("max_record_bytes", "max_characters"):
        if getattr(mixture.clean, name) < 1:
            fail(f"clean.{name}", "must be more than zero")
    for group, specs in (("sources", mixture.sources), ("decontaminate.benchmarks", mixture.decontaminate.benchmarks)):
        for name, spec in specs.items():
            if not name or not all(c.isalnum() or c in "_-." for c in name) or name.startswith("."):
                fail(f"{group}.{name}", "a name has letters, digits, _, - and . only; it becomes part of file names")
            if len(name.encode()) > LONGEST_NAME:
                fail(f"{group}.{name}", f"a name has {LONGEST_NAME} bytes at most; it becomes part of file names")
            if not spec.path:
                fail(f"{group}.{name}.path", "is empty")
    for name, spec in mixture.sources.items():
        if spec.records < 0:
            fail(f"sources.{name}.records", f"{spec.records} is negative; 0 reads all")
        for kind in ("weight", "epochs", "tokens"):
            if not getattr(spec, kind) and _is_written(root, f"sources.{name}.{kind}"):
                fail(f"sources.{name}.{kind}", "0 has no meaning; leave the source out, or remove the line")
        if spec.heldout < 0 or spec.heldout == 1:
            fail(f"sources.{name}.heldout", f"{spec.heldout} has no meaning; 0 holds nothing out, 100 one in a hundred")
        if spec.heldout and not (mixture.deduplicate.exact and mixture.deduplicate.near):
            fail(f"sources.{name}.heldout", "copies could be on both sides; it needs deduplicate.exact and near")
    check_shares(mixture.sources, fail)


def check_shares(sources: dict[str, SourceSpec], fail: typing.Callable[[str, str], typing.NoReturn]) -> None:
    """That every source has one kind of share, and weights stand only beside weights."""
    weighted = [name for name, spec in sources.items() if spec.weight]
    for name, spec in sources.items():
        shares = {kind: getattr(spec, kind) for kind in ("weight", "epochs", "tokens") if getattr(spec, kind)}
        for kind, value in shares.items():
            if value < 0:
                fail(f"sources.{name}.{kind}", f"{value:g} is negative")
        if len(shares) > 1:
            fail(f"sources.{name}.{list(shares)[1]}", f"the source also has {next(iter(shares))}; give one of them")
        if weighted and "weight" not in shares:
            fail(
                f"sources.{name}",
                f"has no weight while sources.{weighted[0]} has one; give all sources weights or none",
            )


def _where(path: Path, root: yaml.Node, key: str) -> str:
    """file:line of a key, or of the deepest part of it that is written."""
    return at(path, _deepest(root, key)[0])


def _is_written(root: yaml.Node, key: str) -> bool:
    return not _deepest(root, key)[1]


def _deepest(root: yaml.Node, key: str) -> tuple[yaml.Node, list[str]]:
    """The deepest part of a key that is written, and the parts below it."""
    node, parts, line = root, key.split("."), root
    while parts and isinstance(node, yaml.MappingNode):
        for name_length in range(1, len(parts) + 1):  # a source's name may hold dots
            name = ".".join(parts[:name_length])
            found = [(k, v) for k, v in node.value if k.value == name]
            if found:
                line, node, parts = found[0][0], found[0][1], parts[name_length:]
                break
        else:
            break
    return line, parts
