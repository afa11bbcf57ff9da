"""Records of files, format by format: a unit of a file in, its records out, with the place that each comes from."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from dreamer_jax.data.jsonl import Broken, parse_object
from dreamer_jax.data.mixture import BenchmarkSpec, SourceSpec
from dreamer_jax.errors import UserError, how_to_install

TEXT_RECORD_BYTES = 32_768
"""Plain text is cut at line ends into records of about this size."""


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


def too_long(limit: int) -> Broken:
    """A record that is passed over because of its length."""
    return Broken("over max_record_bytes", f"is longer than {limit:,} bytes")


def within(value: dict[str, Any], limit: int) -> dict[str, Any] | Broken:
    """A record, if none of its texts is longer."""
    return too_long(limit) if any(isinstance(v, str) and len(v) > limit for v in value.values()) else value


def read_jsonl(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    """A JSON object a line; empty lines are none."""
    for where, line in _lines(unit, limit):
        if line is not None and not line.strip():
            continue
        try:
            yield Item(where, too_long(limit) if line is None else parse_object(line))
        except Broken as broken:
            yield Item(where, broken)


def read_text(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    """Whole lines, together about `TEXT_RECORD_BYTES`, as `text`."""
    kept, size, first = [], 0, ""
    for where, line in _lines(unit, limit):
        if kept and (line is None or size + len(line) > TEXT_RECORD_BYTES):
            yield _text_record(first, kept)
            kept, size = [], 0
        if line is None:  # what stands around it doesn't follow on
            yield Item(where, too_long(limit))
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
    """The lines of a CSV file, with those of the record that is being read."""

    def __init__(self, file: TextIO):
        self._file = file
        self._record: list[str] = []
        self._quotes = self.number = 0
        self._first, self._ended = 1, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._line()
        self._record.append(line)
        return line

    def _line(self) -> str:
        try:
            line = next(self._file)
        except StopIteration:
            self._ended = True
            raise
        self.number += 1
        self._quotes += line.count('"')
        return line

    def begin_record(self) -> None:
        """The next line begins a record."""
        self._record, self._quotes, self._first = [], 0, self.number + 1

    def check_end(self, file: str) -> None:
        """Refuse a record with a quoted field that goes on to the end of the file: the records in it would be lost.

        An odd number of quotes alone isn't wrong: in a field without quotes around it they are letters."""
        if not self._ended or self._quotes % 2 == 0:
            return
        try:
            list(csv.reader(self._record, strict=True))
        except csv.Error:
            raise UserError(
                f"{file}: line {self._first} begins a record with a quote that isn't closed, so that all behind it is "
                "one field; close it, or double it where it is a letter of the text"
            ) from None

    def end_record(self) -> None:
        """Pass over what is left of a record that csv gave up: the lines up to the end of its quoted field."""
        with contextlib.suppress(StopIteration):
            while self._quotes % 2:
                self._line()


def read_csv(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    """Rows by the names of the first, or those of `columns`."""
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
                lines.check_end(unit.file)
                over = "field limit" in str(error)
                yield Item(
                    f"line {lines.number}", too_long(limit) if over else Broken("not CSV", f"is not CSV: {error}")
                )
                continue
            lines.check_end(unit.file)
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


def row_group_units(name: str, path: Path, unit_bytes: int) -> list[Unit]:
    """A Parquet file in runs of row groups of about so many bytes."""
    file = _parquet(str(path))
    units, start, size = [], 0, 0
    for group in range(file.num_row_groups):
        size += file.metadata.row_group(group).total_byte_size
        if size >= unit_bytes or group == file.num_row_groups - 1:
            units.append(Unit(name, str(path), start, group + 1))
            start, size = group + 1, 0
    return units


def read_parquet(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    """Rows of the unit's row groups."""
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
                yield Item(f"row {row}", within(value, limit))
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
