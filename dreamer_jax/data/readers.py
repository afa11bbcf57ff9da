"""Records of files, TFDS, the hub and the built-in tasks, cut into units that processes can share."""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import importlib
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from dreamer_jax.data import tasks
from dreamer_jax.data.jsonl import Broken, parse_object
from dreamer_jax.data.mixture import BenchmarkSpec, SourceSpec
from dreamer_jax.errors import ConfigError, UserError, how_to_install

TEXT_RECORD_BYTES = 32_768
"""Plain text is cut at line ends into records of about this size."""

ROWS_IN_A_UNIT = 50_000
"""Of formats that are addressed by row."""

_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}

Spec = SourceSpec | BenchmarkSpec


class Unit(NamedTuple):
    """A piece of a source: bytes start..stop of a file, or its rows or row groups; stop -1 is the end."""

    source: str
    file: str
    start: int
    stop: int


class Item(NamedTuple):
    """A record with the place it comes from, or what is wrong with it."""

    where: str
    value: dict[str, Any] | Broken


def files_of(spec: Spec, key: str) -> list[Path]:
    """The files a source names, in order; empty for the formats that aren't files.

    Raises:
        ConfigError: there are none.
    """
    if spec.format in ("tfds", "hub", "task"):
        return []
    path = Path(spec.path)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    elif path.is_file():
        found = [path]
    else:
        found = sorted(Path(p) for p in glob.glob(spec.path, recursive=True) if Path(p).is_file())
    if not found:
        raise ConfigError(f"{key}.path: no file '{spec.path}' (seen from {Path.cwd()})", f"{key}.path")
    return found


def format_of(spec: Spec, file: str, key: str) -> str:
    """The format of a file: the one that is set, or the one its ending says."""
    if spec.format != "auto":
        return spec.format
    ending = Path(file.removesuffix(".gz")).suffix
    if ending not in _ENDINGS:
        raise ConfigError(f"{key}.format: '{file}' doesn't end in {', '.join(_ENDINGS)}; set it", f"{key}.format")
    return _ENDINGS[ending]


def plan_units(name: str, spec: SourceSpec, unit_bytes: int) -> list[Unit]:
    """Cut a source into units of about unit_bytes, in order; compressed and CSV files stay whole.

    A source of which only the first `records` are read is one unit: how many its files hold shows when they are read.
    """
    units = _units(name, spec, unit_bytes)
    limited = spec.records and spec.format not in ("task", "tfds") and len(units) > 1
    return [Unit(name, spec.path, 0, -1)] if limited else units


def _units(name: str, spec: SourceSpec, unit_bytes: int) -> list[Unit]:
    key = f"sources.{name}"
    if spec.format == "hub":
        return [
            Unit(name, f"{spec.path}:{config}", shard, shard + 1)
            for config in _configs(spec)
            for shard in range(_hub(spec, config).num_shards)
        ]
    if spec.format == "task":
        if spec.path not in tasks.TASKS:
            raise ConfigError(f"{key}.path: no task '{spec.path}'; one of {', '.join(tasks.TASKS)}", f"{key}.path")
        if spec.records < 1:
            raise ConfigError(f"{key}.records: say how many instances", f"{key}.records")
        hardest = tasks.TASKS[spec.path].hardest
        if not 1 <= spec.difficulty <= hardest:
            problem = f"{spec.difficulty} is none of the difficulties of {spec.path}, 1 to {hardest}"
            raise ConfigError(f"{key}.difficulty: {problem}", f"{key}.difficulty")
        return _ranges(name, spec.path, spec.records, ROWS_IN_A_UNIT)
    if spec.format == "tfds":
        rows = len(_tfds(spec))
        return _ranges(name, spec.path, min(rows, spec.records or rows), ROWS_IN_A_UNIT)
    units = []
    for path in files_of(spec, key):
        kind = format_of(spec, str(path), key)
        if kind == "parquet":
            units += _row_group_units(name, path, unit_bytes)
        elif kind == "csv" or path.suffix == ".gz" or spec.records:
            units.append(Unit(name, str(path), 0, -1))
        else:
            units += _ranges(name, str(path), path.stat().st_size, unit_bytes)
    return units


def read_unit(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    """The records of a unit; of a unit that is a whole source of limited `records`, so many of all its files.

    Args:
        limit: bytes of the longest record that is read; a longer one is passed over without holding it in memory.
    Raises:
        UserError: the file can't be read to its end (missing, cut short, not what it should be).
    """
    if not isinstance(spec, SourceSpec) or not spec.records or spec.format in ("task", "tfds"):
        return _read(spec, unit, limit)
    key = f"sources.{unit.source}"
    parts = _whole(spec, key, unit.source) if unit == Unit(unit.source, spec.path, 0, -1) else [unit]
    items = (
        item if part == unit else Item(f"{Path(part.file).name} {item.where}", item.value)
        for part in parts
        for item in _read(spec, part, limit)
    )
    return islice(items, spec.records)


def _read(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    kind = format_of(spec, unit.file, f"sources.{unit.source}")
    readers = {
        "jsonl": _read_jsonl,
        "text": _read_text,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "tfds": _read_tfds,
        "hub": _read_hub,
        "task": _read_task,
    }
    return readers[kind](spec, unit, limit)


def read_all(spec: BenchmarkSpec, key: str, limit: int) -> Iterator[Item]:
    """All records of a benchmark."""
    for unit in _whole(spec, key, key):
        yield from read_unit(spec, unit, limit)


def _whole(spec: Spec, key: str, name: str) -> list[Unit]:
    """The files of a source or benchmark, each as one unit; of the hub its configurations."""
    if spec.format == "hub":
        return [Unit(name, f"{spec.path}:{config}", 0, -1) for config in _configs(spec)]
    if spec.format == "tfds":
        return [Unit(name, spec.path, 0, -1)]
    return [Unit(name, str(path), 0, -1) for path in files_of(spec, key)]


def _ranges(name: str, file: str, size: int, step: int) -> list[Unit]:
    return [Unit(name, file, start, min(size, start + step)) for start in range(0, size, step)]


@contextlib.contextmanager
def _opened(unit: Unit) -> Iterator[BinaryIO]:
    """The file's bytes, uncompressed; damage becomes a message."""
    try:
        with gzip.open(unit.file) if unit.file.endswith(".gz") else open(unit.file, "rb") as file:
            yield cast(BinaryIO, file)
    except EOFError:
        raise UserError(f"{unit.file}: the gzip file is cut short; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{unit.file}: not a sound gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise UserError(f"can't read {unit.file}: {error.strerror or error}") from None


def _lines(unit: Unit, limit: int) -> Iterator[tuple[str, bytes | None]]:
    """(where, line) of the lines that begin in a unit; None instead of a line that is over the limit."""
    with _opened(unit) as file:
        number = 0
        if unit.start:  # the line that spans the border belongs to the unit before
            file.seek(unit.start - 1)
            _skip_line(file)
        place = file.tell() if unit.start else 0
        while unit.stop < 0 or place < unit.stop:
            line = file.readline(limit + 1)
            if not line:
                return
            number += 1
            where = f"byte {place}" if unit.start else f"line {number}"
            place += len(line)
            if len(line) > limit and not line.endswith(b"\n"):
                place += _skip_line(file)
                yield where, None
            else:
                yield where, line.removeprefix(b"\xef\xbb\xbf") if not unit.start and number == 1 else line


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _over(limit: int) -> Broken:
    return Broken("over max_record_bytes", f"is longer than {limit:,} bytes")


def _read_jsonl(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    for where, line in _lines(unit, limit):
        if line is not None and not line.strip():
            continue
        try:
            yield Item(where, _over(limit) if line is None else parse_object(line))
        except Broken as broken:
            yield Item(where, broken)


def _read_text(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    kept, size, first = [], 0, ""
    for where, line in _lines(unit, limit):
        if kept and (line is None or size + len(line) > TEXT_RECORD_BYTES):
            yield _text_record(first, kept)
            kept, size = [], 0
        if line is None:  # what stands around it doesn't follow on
            yield Item(where, _over(limit))
            continue
        first = first if kept else where
        kept.append(line)
        size += len(line)
    if kept:
        yield _text_record(first, kept)


def _text_record(where: str, lines: list[bytes]) -> Item:
    try:
        return Item(where, {"text": b"".join(lines).decode("utf-8")})
    except UnicodeDecodeError as error:
        return Item(where, Broken("not valid UTF-8", f"is not valid UTF-8 ({error.start} bytes in)"))


class _CsvLines:
    """The lines of a CSV file, with the quotes of the record that is being read."""

    def __init__(self, file: TextIO):
        self._file = file
        self._quotes = self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._file)
        self.number += 1
        self._quotes += line.count('"')
        return line

    def begin_record(self) -> None:
        """The next line begins a record."""
        self._quotes = 0

    def end_record(self) -> None:
        """Pass over what is left of a record that csv gave up: the lines up to the end of its quoted field."""
        while self._quotes % 2 and next(self, None) is not None:
            pass


def _read_csv(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    csv.field_size_limit(limit)
    with _opened(unit) as binary:
        # Invalid bytes become half surrogates, which no template accepts: the one record is counted.
        lines = _CsvLines(io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=""))
        rows = csv.reader(lines)
        try:
            names = [name.strip() for name in spec.columns.split(",")] if spec.columns else []
            names = names or next(filter(None, rows), [])
        except csv.Error as error:
            raise UserError(f"{unit.file}: its header is not CSV ({error}); mend it, or set columns") from None
        _refuse_twins(unit.file, filter(None, names))  # columns without a name can't be asked for
        while True:
            lines.begin_record()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                lines.end_record()
                over = "field limit" in str(error)
                yield Item(f"line {lines.number}", _over(limit) if over else Broken("not CSV", f"is not CSV: {error}"))
                continue
            if not row:  # an empty line
                continue
            if len(row) != len(names):
                detail = f"has {len(row)} columns instead of {len(names)}"
                yield Item(f"line {lines.number}", Broken("with other columns", detail))
            else:
                yield Item(f"line {lines.number}", dict(zip(names, row, strict=True)))


def _refuse_twins(file: str, names: Iterable[str]) -> None:
    """Of two columns of one name nobody knows which is meant."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{file}: has several columns of the name {twice[0]!r}; rename them")


def _parquet(file: str) -> Any:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"Parquet files need pyarrow; {how_to_install('data')}") from None
    try:
        return parquet.ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a whole Parquet file ({error}); fetch it again") from None


def _row_group_units(name: str, path: Path, unit_bytes: int) -> list[Unit]:
    file = _parquet(str(path))
    units, start, size = [], 0, 0
    for group in range(file.num_row_groups):
        size += file.metadata.row_group(group).total_byte_size
        if size >= unit_bytes or group == file.num_row_groups - 1:
            units.append(Unit(name, str(path), start, group + 1))
            start, size = group + 1, 0
    return units


def _read_parquet(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    file = _parquet(unit.file)
    groups = list(range(unit.start, file.num_row_groups if unit.stop < 0 else unit.stop))
    row = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
    _refuse_twins(unit.file, file.schema_arrow.names)
    try:
        for batch in file.iter_batches(batch_size=64, row_groups=groups):
            for i in range(batch.num_rows):
                row += 1
                try:
                    value = {name: _python(batch.column(name)[i]) for name in batch.schema.names}
                except UnicodeDecodeError:
                    yield Item(f"row {row}", Broken("not valid UTF-8", "is not valid UTF-8"))
                    continue
                over = any(isinstance(v, str) and len(v) > limit for v in value.values())
                yield Item(f"row {row}", _over(limit) if over else value)
    except OSError as error:  # ArrowInvalid and ArrowException are raised for damaged pages
        raise UserError(f"{unit.file}: can't be read to its end ({error}); fetch it again") from None
    except ValueError as error:
        raise UserError(f"{unit.file}: can't be read to its end ({error}); fetch it again") from None


def _python(scalar: Any) -> Any:
    """A value of a Parquet file; None where Python has none, such as a date after the year 9999: no text anyway."""
    try:
        return scalar.as_py()
    except (OverflowError, LookupError):  # pytz raises the second for a time zone that it doesn't know
        return None


def _tfds(spec: Spec) -> Any:
    try:
        tfds: Any = importlib.import_module("tensorflow_datasets")
    except ImportError:
        raise UserError(f"format tfds needs tensorflow-datasets; {how_to_install('data')}") from None
    try:
        directory = Path(spec.path)
        if (directory / "dataset_info.json").is_file():
            builder = tfds.builder_from_directory(str(directory))
        else:
            importlib.import_module("dreamer_jax.data.builders")  # registers the package's own builders
            builder = tfds.builder(spec.config, data_dir=str(directory))
        return builder.as_data_source(spec.split)
    except (ImportError, OSError, ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(f"{spec.path}: can't open split {spec.split} of this TFDS data: {error}") from None


def _read_tfds(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    source = _tfds(spec)
    for row in range(unit.start, len(source) if unit.stop < 0 else unit.stop):
        try:
            value = {name: _decoded(field) for name, field in source[row].items()}
        except UnicodeDecodeError:
            yield Item(f"row {row + 1}", Broken("not valid UTF-8", "is not valid UTF-8"))
            continue
        except (RuntimeError, IndexError) as error:  # what array_record raises
            raise UserError(f"{unit.file}: row {row + 1} can't be read ({error}); build the data again") from None
        over = any(isinstance(v, str) and len(v) > limit for v in value.values())
        yield Item(f"row {row + 1}", _over(limit) if over else value)


def _decoded(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value  # TFDS gives texts as bytes


def _configs(spec: Spec) -> list[str]:
    return [name.strip() for name in spec.config.split(",")]


def _hub(spec: Spec, config: str) -> Any:
    """A split of a data set on the hub, to be read row by row."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError("format hub needs datasets; install the extra: pip install -e '.[data]'") from None
    try:
        return datasets.load_dataset(spec.path, config or None, split=spec.split, streaming=True)
    except (OSError, ValueError) as error:  # its errors of network, name, split and access are of these two
        raise UserError(f"can't open split {spec.split} of {spec.path} on the hub: {error}") from None


def _read_hub(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    config = unit.file.partition(":")[2]
    rows = _hub(spec, config)
    shards = range(unit.start, rows.num_shards if unit.stop < 0 else unit.stop)
    try:
        for shard in shards:
            for number, value in enumerate(rows.shard(num_shards=rows.num_shards, index=shard), start=1):
                over = any(isinstance(v, str) and len(v) > limit for v in value.values())
                yield Item(f"shard {shard} row {number}", _over(limit) if over else value)
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {unit.file} from the hub: {error}") from None


def _read_task(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    assert isinstance(spec, SourceSpec)
    for number in range(unit.start, unit.stop):
        rng = Random(f"prepare {spec.path} {spec.difficulty} {number}")
        record = tasks.draw(spec.path, rng.randint(1, spec.difficulty), rng, heldout=False)
        yield Item(f"instance {number}", {"question": record.prompt, "answer": record.completion})
