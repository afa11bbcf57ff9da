"""What a process of a preparation does: one task at a time, each with whole files as its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dreamer_jax.data import deduplication as dedup
from dreamer_jax.data.filtering import Tally, UnitFilter, read_benchmarks
from dreamer_jax.data.formats import Unit
from dreamer_jax.data.mixture import Mixture
from dreamer_jax.data.prepared import write_shard
from dreamer_jax.data.records import Document
from dreamer_jax.data.storage import Kept, PartReader, whole_file, write_json
from dreamer_jax.data.tokenizers import load_tokenizer


class Worker:
    """What a process does; its methods are the tasks by name."""

    def __init__(self, mixture: Mixture, work: str, units: list[Unit]):
        self._mixture, self._work, self._units = mixture, Path(work), units
        self._filter: UnitFilter | None = None
        self.shared: list[dedup.Part] = []

    def filter(self, number: int) -> None:
        """Filter a unit."""
        if self._filter is None:
            self._filter = UnitFilter(
                self._mixture, load_tokenizer(self._mixture.tokenizer), read_benchmarks(self._mixture)
            )
        self._filter.write(self._units[number], self._work / f"unit-{number:05d}")

    def exact(self, task: tuple[int, int, str]) -> None:
        """Find exact duplicates."""
        first, last, output = task
        dedup.find_exact(self.shared, first, last, Path(output))

    def candidates(self, task: tuple[int, int, str]) -> None:
        """Find candidates of near duplicates."""
        first, last, output = task
        dedup.find_candidates(self.shared, first, last, np.load(self._work / "exact.npy")["later"], Path(output))

    def confirm(self, task: tuple[int, list[str], str]) -> None:
        """Compare candidates."""
        part, found, output = task
        settings = self._mixture.deduplicate
        paths = [Path(path) for path in found]
        dedup.confirm(self.shared, part, paths, settings.threshold, settings.compare, Path(output))

    def shard(self, task: tuple[int, str, str]) -> None:
        """Write what stays of a part."""
        number, stem, dtype = task
        part = self.shared[number]
        dropped = [dedup.of_part(np.load(self._work / name), number) for name in ("exact.npy", "near.npy")]
        gone = {identity & 0xFFFFFFFF for pairs in dropped for identity in pairs["later"].tolist()}
        reader, share, apart = (
            PartReader(part.directory, part.number),
            self._mixture.sources[part.source].heldout,
            Tally(),
        )
        file = self._units[part.unit].file

        lines: list[str] = []

        def documents() -> Iterator[Document]:
            for record in range(part.records):
                if record in gone:
                    continue
                kept = reader[record]
                if is_heldout(kept, share):
                    line = {"prompt": kept.prompt, "completion": kept.completion}
                    lines.append(json.dumps(line, ensure_ascii=False) + "\n")
                    where = f"{file} kept record {record + 1} of its unit"
                    apart.add(len(kept.tokens), where, kept.prompt + kept.completion)
                else:
                    yield Document(kept.tokens, kept.prompt_tokens)

        entry = write_shard(Path(stem), documents(), dtype)
        reader.close()
        with whole_file(heldout_file(self._work, number)) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
        write_json(Path(f"{stem}.json"), entry | {"heldout": vars(apart)})


def is_heldout(record: Kept, share: int) -> bool:
    """Whether a record is the one in `share` that isn't for training: whatever else is prepared, and by whom."""
    text = record.prompt if record.prompt.strip() else record.completion
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=8, person=b"heldout").digest()
    return share > 0 and int.from_bytes(digest, "little") % share == 0


def heldout_file(work: Path, number: int) -> Path:
    """What is held out of a part."""
    return work / f"heldout-{number:05d}.jsonl"
