"""`dreamer data prepare`: from the sources of a mixture to a prepared directory, in restartable steps.

1. filter   a unit of a source: read, clean, decontaminate, tokenize           (parallel over units)
2. exact    exact duplicates among the keys of one range                       (parallel over ranges)
3. near     candidates in one range of band keys; confirmed by part; resolved  (parallel, then in order)
4. shards   what stays of a part becomes a shard, or is held out                (parallel over parts)

Every task writes whole files only, so what a killed run has finished is found and kept. Nothing depends on how many
processes there are: units, parts and ranges follow from the mixture and its files alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.data import deduplication as dedup
from dreamer_jax.data import reporting
from dreamer_jax.data.filtering import Tally, compared, question_template, templates
from dreamer_jax.data.formats import Unit
from dreamer_jax.data.mixture import Mixture, at_its_line, load_mixture
from dreamer_jax.data.preparation_worker import Worker, heldout_file
from dreamer_jax.data.prepared import FORMAT, PreparedData, check_index
from dreamer_jax.data.readers import files_of, plan_units
from dreamer_jax.data.storage import PartReader, remove_leftovers, whole_file, write_array, write_json
from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.data.words import BANDS
from dreamer_jax.data.workers import Pool
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.json_files import read_object

SMALLEST_UNIT, LARGEST_UNIT, UNITS = 4_000_000, 256_000_000, 256
"""Sources are cut into about UNITS units, of no fewer and no more bytes than these."""

DAMAGED = "remove the folder and prepare again"
VERSION = 2
"""Raised when the same mixture would give other data; work of another version is not continued."""

SHARES = ("weight", "epochs", "tokens", "licence", "url")
"""Settings of a source that don't decide what is prepared."""


def prepare(path: str | Path, out: str | Path, workers: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prepare a mixture.

    Args:
        path: the mixture file.
        out: the directory to fill; one that holds an unfinished preparation of the same mixture is gone on with.
        workers: processes.
        say: prints a line on progress.
    Returns:
        The report, as in report.json.
    Raises:
        UserError: something in the mixture, its files or the directory is wrong.
    """
    mixture = load_mixture(path)
    try:
        tokenizer = load_tokenizer(mixture.tokenizer)
    except UserError as error:
        raise UserError(f"{path}: tokenizer: {str(error).removeprefix('data.tokenizer: ')}") from None
    try:
        for name, spec in mixture.sources.items():
            templates(name, spec)
        for name, benchmark in mixture.decontaminate.benchmarks.items():
            question_template(name, benchmark)
        units, plan = _plan(mixture, tokenizer)
    except ConfigError as error:
        raise at_its_line(path, error) from None
    out = Path(out)
    with _locked(out):
        if _open_directory(out, plan):
            _check_whole(out, mixture)
            index, report = (read_object(out / name, DAMAGED) for name in ("index.json", "report.json"))
            check_index(out / "index.json", index, DAMAGED)
            _check_shards(out, index)
            _write_index(out, index, mixture)
            _tidy(out)
            say(f"{out} is already prepared")
            return report
        return _Preparation(mixture, tokenizer, units, out, say).run(workers)


def _check_whole(out: Path, mixture: Mixture) -> None:
    """That no file of a finished preparation has been lost."""
    held = [out / "heldout" / f"{name}.jsonl" for name, spec in mixture.sources.items() if spec.heldout]
    for path in (out / "report.json", *held):
        if not path.is_file():
            raise UserError(f"{path} is missing; {DAMAGED}")


def _check_shards(out: Path, index: dict[str, Any]) -> None:
    for source in index["sources"].values():
        for shard in source["shards"]:
            PreparedData.check_shard(out / "shards" / shard["name"], shard)


def _plan(mixture: Mixture, tokenizer: Tokenizer) -> tuple[list[Unit], dict[str, Any]]:
    """The units, and all that decides the result: what a restart compares."""
    specs = [(f"sources.{name}", spec) for name, spec in mixture.sources.items()]
    specs += [(f"decontaminate.benchmarks.{name}", s) for name, s in mixture.decontaminate.benchmarks.items()]
    files = {key: files_of(spec, key) for key, spec in specs}
    inputs = {key: [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths] for key, paths in files.items()}
    total = sum(size for key, found in inputs.items() if key.startswith("sources.") for _, size, _ in found)
    unit_bytes = min(max(total // UNITS, SMALLEST_UNIT), LARGEST_UNIT)
    units = [unit for name, spec in mixture.sources.items() for unit in plan_units(name, spec, unit_bytes)]
    settings = dataclasses.asdict(mixture)
    for source in settings["sources"].values():
        for share in SHARES:
            del source[share]
        if not source["heldout"]:  # so that what was prepared before there was such a setting is still known
            del source["heldout"]
    del settings["tokenizer"]
    identity = {"version": VERSION, "tokenizer": tokenizer.fingerprint, "mixture": settings}
    return units, json.loads(json.dumps({"identity": identity, "inputs": inputs, "units": units}))


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        _refuse_others(out)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{out}: another process is preparing data there; wait for it, or name another") from None
        yield


def _refuse_others(out: Path) -> None:
    mine = (out / "plan.json").is_file()
    if not mine and [p for p in out.iterdir() if p.name != ".lock" and ".tmp-" not in p.name]:
        raise UserError(f"{out}: is not empty and holds no prepared data; name another directory")


def _open_directory(out: Path, plan: dict[str, Any]) -> bool:
    """Make the directory ready; whether all is done already."""
    if not (out / "plan.json").is_file():
        write_json(out / "plan.json", plan)
    found = read_object(out / "plan.json", DAMAGED)
    if found != plan:
        what = next(part for part in ("identity", "inputs", "units") if found.get(part) != plan[part])
        reason = {"identity": "of other settings or another tokenizer", "inputs": "of input files that have changed"}
        if found.get("identity", {}).get("version") != VERSION:
            reason["identity"] = "by other rules, those of another version of this program"
        raise UserError(
            f"{out}: holds a preparation {reason.get(what, 'of other units')}; name another directory, or remove it"
        )
    return (out / "index.json").is_file()


class _Preparation:
    """The steps. Results of tasks lie in out/work until the index is written."""

    def __init__(
        self, mixture: Mixture, tokenizer: Tokenizer, units: list[Unit], out: Path, say: Callable[[str], None]
    ):
        self._mixture, self._tokenizer, self._units, self._out, self._say = mixture, tokenizer, units, out, say
        self._work = out / "work"
        self._shards = out / "shards"
        for directory in (self._work, self._shards):
            directory.mkdir(exist_ok=True)
            remove_leftovers(directory)

    def run(self, workers: int) -> dict[str, Any]:
        """Do what isn't done; returns the report."""
        with Pool(workers, Worker, (self._mixture, str(self._work), self._units)) as pool:
            self._tasks(pool, "filtered", "filter", list(range(len(self._units))), self._unit_done)
            parts, done = self._parts()
            pool.share(parts)
            exact = self._exact(pool, parts)
            near = self._near(pool, parts)
            shards = [str(self._shards / name) for name in _shard_names(parts)]
            dtype = "<u2" if self._tokenizer.vocab_size <= 1 << 16 else "<u4"
            todo = [(number, shard, dtype) for number, shard in enumerate(shards)]
            self._tasks(pool, "written", "shard", todo, lambda task: Path(f"{task[1]}.json"))
        report = self._report(parts, shards, done, exact, near)
        self._finish(parts, shards, dtype, report)
        return report

    def _unit_done(self, number: int) -> Path:
        return self._work / f"unit-{number:05d}" / "done.json"

    def _tasks(self, pool: Pool, verb: str, name: str, tasks: list[Any], marker: Callable[[Any], Path]) -> None:
        """Run the tasks whose result isn't there yet."""
        todo = [task for task in tasks if not marker(task).exists()]
        if len(todo) < len(tasks):
            self._say(f"{len(tasks) - len(todo)} of {len(tasks)} tasks are {verb} already")
        for count, _ in enumerate(pool.run(name, todo), start=1):
            if count == len(todo) or count % max(1, len(todo) // 10) == 0:
                self._say(f"{verb} {count + len(tasks) - len(todo)} of {len(tasks)}")

    def _parts(self) -> tuple[list[dedup.Part], list[dict[str, Any]]]:
        done = [read_object(self._unit_done(i), DAMAGED) for i in range(len(self._units))]
        parts = [
            dedup.Part(unit["source"], i, self._unit_done(i).parent, number, part["records"], part["tokens"])
            for i, unit in enumerate(done)
            for number, part in enumerate(unit["parts"])
        ]
        for name in self._mixture.sources:
            read = sum(unit["read"] for unit in done if unit["source"] == name)
            broken = [unit["dropped"] for unit in done if unit["source"] == name]
            bad = {rule: t for rules in broken for rule, t in rules.items() if rule.startswith("broken")}
            if read == 0:
                raise UserError(f"sources.{name}: holds no records ({self._mixture.sources[name].path})")
            if sum(t["records"] for rules in broken for r, t in rules.items() if r.startswith("broken")) == read:
                first = next(iter(bad.values()))["examples"][0]
                raise UserError(
                    f"sources.{name}: all of its {read:,} records are broken. The first: {first['where']} "
                    f"{first['because']}; mend the mixture or the file, and use a new --out"
                )
        if not any(part.records for part in parts):
            dropped = [(tally["records"], rule) for unit in done for rule, tally in unit["dropped"].items()]
            most = f"most, {max(dropped)[0]:,}, as {max(dropped)[1]}" if dropped else "none was read"
            raise UserError(
                f"{self._out}: no record of any source is kept ({most}); mend the mixture, and use a new --out"
            )
        return parts, done

    def _exact(self, pool: Pool, parts: list[dedup.Part]) -> np.ndarray:
        path = self._work / "exact.npy"
        if not path.exists():
            tasks = []
            if self._mixture.deduplicate.exact:
                ranges = dedup.key_ranges(sum(part.records for part in parts))
                tasks = [(*keys, str(self._work / f"exact-{i:05d}.npy")) for i, keys in enumerate(ranges)]
            self._tasks(pool, "searched for exact duplicates", "exact", tasks, lambda task: Path(task[2]))
            found = [np.load(task[2]) for task in tasks]
            write_array(path, np.sort(np.concatenate([*found, np.zeros(0, dedup.PAIR)]), order="later"))
        return np.load(path)

    def _near(self, pool: Pool, parts: list[dedup.Part]) -> np.ndarray:
        path = self._work / "near.npy"
        if not path.exists():
            confirmed: list[Path] = []
            if self._mixture.deduplicate.near:
                ranges = dedup.key_ranges(sum(part.records for part in parts) * BANDS)
                tasks = [(*keys, str(self._work / f"near-{i:05d}.npy")) for i, keys in enumerate(ranges)]
                self._tasks(pool, "searched for near duplicates", "candidates", tasks, lambda task: Path(task[2]))
                found = [task[2] for task in tasks]
                checks = [(i, found, str(self._work / f"confirmed-{i:05d}.npy")) for i in range(len(parts))]
                self._tasks(pool, "compared", "confirm", checks, lambda task: Path(task[2]))
                confirmed = [Path(check[2]) for check in checks]
            write_array(path, dedup.resolve(confirmed))
        return np.load(path)

    def _report(
        self,
        parts: list[dedup.Part],
        shards: list[str],
        done: list[dict[str, Any]],
        exact: np.ndarray,
        near: np.ndarray,
    ) -> dict[str, Any]:
        sources = reporting.merge(done, list(self._mixture.sources))
        readers: dict[int, PartReader] = {}
        for part in parts:
            sources[part.source]["kept"] += part.records
            sources[part.source]["kept_tokens"] += part.tokens
        for rule, pairs in ((reporting.EXACT_RULE, exact), (reporting.NEAR_RULE, near)):
            for later, earlier in zip(pairs["later"].tolist(), pairs["earlier"].tolist(), strict=True):
                self._count(parts, readers, rule, later, earlier, sources)
        for part, stem in zip(parts, shards, strict=True):
            apart = _marker(stem)["heldout"]
            if apart["records"]:
                source = sources[part.source]
                source["kept"] -= apart["records"]
                source["kept_tokens"] -= apart["tokens"]
                source["dropped"].setdefault(reporting.HELDOUT_RULE, Tally()).merge(apart)
        return reporting.finish(sources)

    def _count(
        self,
        parts: list[dedup.Part],
        readers: dict[int, PartReader],
        rule: str,
        later: int,
        earlier: int,
        sources: dict[str, Any],
    ) -> None:
        """Move one duplicate from what is kept to what is dropped."""

        def read(identity: int) -> tuple[dedup.Part, PartReader, int]:
            part = parts[identity >> 32]
            if identity >> 32 not in readers:
                if len(readers) > 64:
                    readers.pop(next(iter(readers))).close()
                readers[identity >> 32] = PartReader(part.directory, part.number)
            return part, readers[identity >> 32], identity & 0xFFFFFFFF

        part, reader, record = read(later)
        source = sources[part.source]
        tally = source["dropped"].setdefault(rule, Tally())
        tokens = int(reader.records["tokens"][record])
        source["kept"] -= 1
        source["kept_tokens"] -= tokens
        text, twin = "", ""
        if len(tally.examples) < 3:
            compare = self._mixture.deduplicate.compare
            text = compared(reader[record], compare)
            other, its_reader, its_record = read(earlier)
            twin = f"like, in {other.source}: {compared(its_reader[its_record], compare)}"
        tally.add(tokens, f"{self._units[part.unit].file} kept record {record + 1} of its unit", text, twin)

    def _finish(self, parts: list[dedup.Part], shards: list[str], dtype: str, report: dict[str, Any]) -> None:
        tokenizer = self._tokenizer
        sources: dict[str, Any] = {name: {"shards": []} for name in self._mixture.sources}
        for part, stem in zip(parts, shards, strict=True):
            shard = {name: value for name, value in _marker(stem).items() if name != "heldout"}
            if shard["records"]:
                sources[part.source]["shards"].append(shard)
        for name, source in sources.items():
            source["records"] = sum(shard["records"] for shard in source["shards"])
            source["document_tokens"] = sum(shard["tokens"] for shard in source["shards"])
            assert source["records"] == report["sources"][name]["kept"]
        self._collect_heldout(parts)
        write_json(self._out / "report.json", report)
        (self._out / "report.txt").write_text(reporting.table(report), encoding="utf-8", errors="backslashreplace")
        index = {
            "format": FORMAT,
            "tokenizer": {
                "name": self._mixture.tokenizer,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "bos": tokenizer.bos,
                "eos": tokenizer.eos,
                "pad": tokenizer.pad,
            },
            "dtype": dtype,
            "sources": sources,
        }
        _write_index(self._out, index, self._mixture)
        _tidy(self._out)

    def _collect_heldout(self, parts: list[dedup.Part]) -> None:
        """One file a source that holds something out, in the order of its records."""
        for name, spec in self._mixture.sources.items():
            if spec.heldout:
                (self._out / "heldout").mkdir(exist_ok=True)
                with whole_file(self._out / "heldout" / f"{name}.jsonl") as temporary, temporary.open("wb") as file:
                    for number, part in enumerate(parts):
                        if part.source == name:
                            file.write(heldout_file(self._work, number).read_bytes())


def _marker(stem: str) -> dict[str, Any]:
    """What a finished shard's task has left."""
    return read_object(Path(f"{stem}.json"), DAMAGED)


def _write_index(out: Path, index: dict[str, Any], mixture: Mixture) -> None:
    for name, spec in mixture.sources.items():
        index["sources"][name] |= {share: getattr(spec, share) for share in SHARES}
    write_json(out / "index.json", index)


def _tidy(out: Path) -> None:
    """Remove what only an unfinished preparation needs."""
    shutil.rmtree(out / "work", ignore_errors=True)
    remove_leftovers(out / "shards")
    for marker in (out / "shards").glob("*.json"):
        marker.unlink(missing_ok=True)


def _shard_names(parts: list[dedup.Part]) -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for part in parts:
        names.append(f"{part.source}-{counts.get(part.source, 0):05d}")
        counts[part.source] = counts.get(part.source, 0) + 1
    return names


def default_workers() -> int:
    """One process a core."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
