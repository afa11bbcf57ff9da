"""Prepared data on disk: ArrayRecord shards of tokens, an index, and reading them.

A prepared directory holds
  index.json                      written last: tokenizer, sources, shards; without it the directory isn't complete
  shards/NAME-00000.array_record  a record is the tokens of one document, little-endian, 2 or 4 bytes each
  shards/NAME-00000.npy           int32 [records, 2]: tokens and prompt tokens of each record
  report.json, report.txt         what the preparation kept and dropped
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dreamer_jax.data.records import Document
from dreamer_jax.data.storage import whole_file, write_array
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError

FORMAT = 1
OPEN_SHARDS = 256
_WRITE_OPTIONS = "group_size:1"  # each record by itself: random access reads nothing else
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def write_shard(stem: Path, documents: Iterable[Document], dtype: str) -> dict[str, Any]:
    """Write one shard and its index.

    Args:
        stem: path without ending.
        dtype: "<u2" or "<u4".
    Returns:
        The shard's entry in index.json.
    """
    module = _array_record()
    digest, rows = hashlib.sha256(), []
    target = stem.with_name(f"{stem.name}.array_record")
    with whole_file(target) as temporary:
        try:
            writer = module.ArrayRecordWriter(str(temporary), _WRITE_OPTIONS)
            for tokens, prompt_length, _ in documents:
                data = tokens.astype(dtype).tobytes()
                writer.write(data)
                digest.update(f"{len(tokens)} {prompt_length} ".encode())
                digest.update(data)
                rows.append((len(tokens), prompt_length))
            writer.close()
        except RuntimeError as error:  # what array_record raises for a full disk
            raise UserError(f"can't write {target}: {error}") from None
        size = temporary.stat().st_size
    lengths = np.array(rows, "<i4").reshape(-1, 2)
    write_array(stem.with_name(f"{stem.name}.npy"), lengths)
    return {
        "name": stem.name,
        "records": len(rows),
        "tokens": int(lengths[:, 0].sum()),
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


class PreparedData:
    """Random access to the documents of a prepared directory.

    Args:
        directory: made by `dreamer data prepare`.
        tokenizer: the one to be used with it.
        key: the configuration key that names the directory, for messages.

    Raises:
        UserError: it isn't a complete prepared directory, was made with another tokenizer, or a shard isn't whole.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, key: str):
        self.directory = directory
        self.index = read_index(directory, key)
        check_tokenizer(self.index, tokenizer, f"{key}: {directory}")
        self.names = list(self.index["sources"])
        tables, firsts, owners = [], [0], []
        self._shards: list[Path] = []
        for number, source in enumerate(self.index["sources"].values()):
            for shard in source["shards"]:
                stem = directory / "shards" / shard["name"]
                table = self.check_shard(stem, shard)
                self._shards.append(stem.with_name(f"{stem.name}.array_record"))
                tables.append(table)
                firsts.append(firsts[-1] + len(table))
                owners.append(np.full(len(table), number, np.int32))
        table = np.concatenate(tables) if tables else np.zeros((0, 2), np.int32)
        self.inputs = table[:, 0].astype(np.int64) - 1
        """int64 [records]: inputs of each document."""
        self.prompts = table[:, 1].copy()
        """int32 [records]: prompt tokens of each document."""
        self.sources = np.concatenate(owners) if owners else np.zeros(0, np.int32)
        """int32 [records]: which of `names` each document is from."""
        self._firsts = np.array(firsts)
        self._dtype = self.index["dtype"]
        self._readers: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        _array_record()

    @property
    def identity(self) -> str:
        """SHA-256 of all documents in order."""
        return content_hash(self.index)

    def __len__(self) -> int:
        return len(self.inputs)

    def tokens(self, records: Sequence[int]) -> list[np.ndarray]:
        """int32 tokens (bos, prompt, completion, eos) of some documents, in the order they are named."""
        wanted = np.asarray(records, np.int64)
        shards = np.searchsorted(self._firsts, wanted, "right") - 1
        found: list[np.ndarray | None] = [None] * len(wanted)
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            inside = (wanted[places] - self._firsts[shard]).tolist()
            for place, data in zip(places.tolist(), self._read(shard, inside), strict=True):
                found[place] = np.frombuffer(data, self._dtype).astype(np.int32)
        return [tokens for tokens in found if tokens is not None]

    def document(self, record: int) -> Document:
        """One whole document."""
        return Document(self.tokens([record])[0], int(self.prompts[record]))

    def _read(self, shard: int, records: list[int]) -> list[bytes]:
        path = self._shards[shard]
        try:
            return self._reader(shard).read(records)
        except (RuntimeError, IndexError, OSError) as error:
            raise UserError(f"{path}: a record can't be read ({error}); restore the file or prepare again") from None

    def _reader(self, shard: int) -> Any:
        with self._lock:
            if shard not in self._readers:
                self._readers[shard] = _array_record().ArrayRecordReader(str(self._shards[shard]), _READ_OPTIONS)
                if len(self._readers) > OPEN_SHARDS:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(shard)
            return self._readers[shard]

    @staticmethod
    def check_shard(stem: Path, shard: dict[str, Any]) -> np.ndarray:
        """The table of a shard, int32 [records, 2]: inputs and prompt tokens.

        Raises:
            UserError: a file of it is missing, or isn't what the index says.
        """
        path, index = stem.with_name(f"{stem.name}.array_record"), stem.with_name(f"{stem.name}.npy")
        for file in (path, index):
            if not file.is_file():
                raise UserError(
                    f"{file}: is missing, though the index names it; restore it, or remove the folder and prepare again"
                )
        size = path.stat().st_size
        if size != shard["bytes"]:
            raise UserError(
                f"{path}: has {size:,} bytes instead of {shard['bytes']:,}: it was cut short or changed; "
                "restore it, or remove the folder and prepare again"
            )
        try:
            table = np.load(index)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(
                f"{index}: can't be read ({error}); restore it, or remove the folder and prepare again"
            ) from None
        if table.shape != (shard["records"], 2) or int(table[:, 0].sum()) != shard["tokens"]:
            raise UserError(f"{index}: doesn't fit to the index; restore it, or remove the folder and prepare again")
        return table


def read_index(directory: Path, key: str) -> dict[str, Any]:
    """index.json of a prepared directory.

    Raises:
        UserError: there is none, or it isn't of this format.
    """
    path = directory / "index.json"
    if not directory.is_dir():
        raise UserError(f"{key}: no directory '{directory}' (seen from {Path.cwd()}); make it: dreamer data prepare")
    if not path.is_file():
        began = " (its preparation hasn't ended; run it again to go on)" if (directory / "plan.json").is_file() else ""
        raise UserError(
            f"{key}: {directory} holds no index.json{began}; prepared data are made by dreamer data prepare"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = index["format"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: not the index of prepared data ({error}); prepare again") from None
    if found != FORMAT:
        raise UserError(f"{path}: is of format {found}, this program reads format {FORMAT}; prepare again")
    check_index(path, index)
    return index


_TOKENIZER = {"name": str, "fingerprint": str, "vocab_size": int}
_SOURCE = {"shards": list, "records": int, "weight": (int, float), "epochs": (int, float), "tokens": (int, float)}
_SHARD = {"name": str, "records": int, "tokens": int, "bytes": int, "sha256": str}


def check_index(path: Path, index: dict[str, Any], fix: str = "prepare again") -> None:
    """That an index has all that is read of it.

    Raises:
        UserError: it lacks something, or something is of another kind: the file was changed.
    """

    def check(value: Any, kinds: dict[str, Any], where: str) -> None:
        for name, kind in kinds.items():
            if not isinstance(value, dict) or not isinstance(value.get(name), kind):
                raise UserError(f"{path} is damaged: {where}{name} is missing or of another kind; {fix}")

    check(index, {"tokenizer": dict, "dtype": str, "sources": dict}, "")
    check(index["tokenizer"], _TOKENIZER, "tokenizer.")
    if index["dtype"] not in ("<u2", "<u4"):
        raise UserError(f"{path} is damaged: dtype is {index['dtype']!r}; {fix}")
    for source, its in index["sources"].items():
        check(its, _SOURCE, f"sources.{source}.")
        for shard in its["shards"]:
            check(shard, _SHARD, f"sources.{source}.shards.")


def check_tokenizer(index: dict[str, Any], tokenizer: Tokenizer, where: str) -> None:
    """Refuse data that were tokenized otherwise.

    Raises:
        UserError: the fingerprints differ.
    """
    made = index["tokenizer"]
    if made["fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"{where} was prepared with another tokenizer ({made['name']}, {made['vocab_size']} ids, fingerprint "
            f"{made['fingerprint'][:12]}...) than data.tokenizer ({tokenizer.vocab_size} ids, fingerprint "
            f"{tokenizer.fingerprint[:12]}...); name that tokenizer, or prepare the data again"
        )


def content_hash(index: dict[str, Any]) -> str:
    """SHA-256 of the documents of all shards, in order, from their own hashes."""
    shards = [(name, shard["sha256"]) for name, source in index["sources"].items() for shard in source["shards"]]
    return hashlib.sha256(json.dumps([index["tokenizer"]["fingerprint"], shards]).encode()).hexdigest()


def _array_record() -> Any:
    try:
        array_record_module = importlib.import_module("array_record.python.array_record_module")
    except ImportError:
        raise UserError("prepared data need array_record; install it with: pip install array_record") from None
    return array_record_module
