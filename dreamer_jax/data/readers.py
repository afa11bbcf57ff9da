"""Records of files, TFDS, the hub and the built-in tasks, cut into units that processes can share."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from dreamer_jax.data import tasks
from dreamer_jax.data.formats import (
    Item,
    Spec,
    Unit,
    read_csv,
    read_jsonl,
    read_parquet,
    read_text,
    row_group_units,
    within,
)
from dreamer_jax.data.jsonl import Broken
from dreamer_jax.data.mixture import BenchmarkSpec, SourceSpec
from dreamer_jax.errors import ConfigError, UserError, how_to_install

ROWS_IN_A_UNIT = 50_000
"""Of formats that are addressed by row."""

_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


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
        what = "no file in the folder" if path.is_dir() else "no file"
        raise ConfigError(f"{key}.path: {what} '{spec.path}' (seen from {Path.cwd()})", f"{key}.path")
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
            units += row_group_units(name, path, unit_bytes)
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
        "jsonl": read_jsonl,
        "text": read_text,
        "csv": read_csv,
        "parquet": read_parquet,
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
        yield Item(f"row {row + 1}", within(value, limit))


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
                yield Item(f"shard {shard} row {number}", within(value, limit))
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {unit.file} from the hub: {error}") from None


def _read_task(spec: Spec, unit: Unit, limit: int) -> Iterator[Item]:
    assert isinstance(spec, SourceSpec)
    for number in range(unit.start, unit.stop):
        rng = Random(f"prepare {spec.path} {spec.difficulty} {number}")
        record = tasks.draw(spec.path, rng.randint(1, spec.difficulty), rng, heldout=False)
        yield Item(f"instance {number}", {"question": record.prompt, "answer": record.completion})
