"""TFDS builders of the paper's data sets, `dreamer_NAME` for every name in the catalogue.

They read the hub, or a folder or file that was downloaded before, and write question and answer as ArrayRecord; TFDS
needs no TensorFlow for this. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from dreamer_jax.data.catalogue import BENCHMARKS, TRAINING, Entry
from dreamer_jax.data.jsonl import Broken, Template
from dreamer_jax.data.mixture import SourceSpec
from dreamer_jax.data.readers import plan_units, read_unit
from dreamer_jax.errors import UserError

PREFIX = "dreamer_"
LONGEST = 10_000_000
"""Bytes of the longest record that is kept."""


class CatalogueBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of the catalogue; the subclasses below say which.

    Args:
        local: a file, folder or pattern to read instead of the hub (JSONL, Parquet or CSV, also .gz).
        **rest: as of tfds.core.DatasetBuilder, such as data_dir.
    """

    VERSION = tfds.core.Version("1.0.0")
    entry: Entry

    def __init__(self, *, local: str = "", **rest: Any):
        self._local = local
        self.broken, self.problem = 0, ""
        """Records that were left out, and what was wrong with the last one."""
        super().__init__(file_format="array_record", **rest)

    def _info(self) -> Any:
        features = tfds.features.FeaturesDict({"question": tfds.features.Text(), "answer": tfds.features.Text()})
        return self.dataset_info_from_configs(features=features, homepage=self.entry.url, license=self.entry.licence)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {ours: self._generate_examples(theirs) for ours, theirs in self.entry.splits.items()}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        """(number, record) of a split; a broken record is left out."""
        entry, key = self.entry, f"builder {self.name}"
        question = Template("{question}" if entry.question else "", key, {"question": entry.question})
        answer = Template("{answer}", key, {"answer": entry.answer})
        spec = SourceSpec(path=self._local or entry.hub, config=entry.config, split=split)
        if not self._local:
            spec = SourceSpec(path=entry.hub, format="hub", config=entry.config, split=split)
        units = plan_units(self.name, spec, 1 << 40)
        number = 0
        for unit in units:
            for where, value in read_unit(spec, unit, LONGEST):
                try:
                    if isinstance(value, Broken):
                        raise value
                    yield number, {"question": question.fill(value), "answer": answer.fill(value)}
                    number += 1
                except Broken as broken:
                    self.broken, self.problem = self.broken + 1, f"the last problem: {where} {broken}"
        if not number:
            raise UserError(f"{key}: {spec.path} holds no usable record; {self.problem or 'it is empty'}")


def build(name: str, data_dir: str | Path, local: str = "", say: Callable[[str], None] = print) -> Path:
    """Build a data set of the catalogue.

    Args:
        name: in catalogue.TRAINING or catalogue.BENCHMARKS.
        data_dir: TFDS's folder.
        local: see CatalogueBuilder.
        say: gets a line on broken records.
    Returns:
        The folder to give as the path of a source of format tfds.
    Raises:
        UserError: there is no such set or file, or what was built before may be of another file.
    """
    if name not in TRAINING | BENCHMARKS:
        raise UserError(f"no data set '{name}' in the catalogue; one of {', '.join(TRAINING | BENCHMARKS)}")
    builder: Any = tfds.builder(f"{PREFIX}{name}", data_dir=str(data_dir), local=local)
    if local and Path(builder.data_dir).is_dir():  # TFDS would leave it as it is
        raise UserError(f"{builder.data_dir} is there already, perhaps of another file than {local}; remove it first")
    builder.download_and_prepare()
    if builder.broken:
        say(f"{builder.broken:,} broken records are left out; {builder.problem}")
    return Path(builder.data_dir)


def _register(name: str, entry: Entry) -> type[CatalogueBuilder]:
    class_name = "".join(part.capitalize() for part in f"{PREFIX}{name}".split("_"))
    return type(class_name, (CatalogueBuilder,), {"entry": entry, "name": f"{PREFIX}{name}", "__module__": __name__})


BUILDERS = {name: _register(name, entry) for name, entry in (TRAINING | BENCHMARKS).items()}
"""The builder classes by name."""
