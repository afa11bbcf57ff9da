"""The configurations, mixtures and studies that come with the package, found by name.

A name is the end of a file's path from here, without `.yaml`, as long as no other file ends like it: `quickstart`,
`la_16`, `huginn/tiny`; the whole path, `configs/models/la_16.yaml`, is one too. Standard library only, because the
launcher asks here as well.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from dreamer_jax.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
Kind = Literal["configuration", "mixture", "study", "frontier model"]
KINDS: dict[str, Kind] = {"mixtures": "mixture", "studies": "study", "frontier/models": "frontier model"}
"""Folder -> what its files are for; those of all other folders are configurations."""
ALL: tuple[Kind, ...] = get_args(Kind)
MOST_NAMES = 8
"""So many stand in a message that has a nearest name too."""


@functools.cache
def files() -> Mapping[Path, Kind]:
    """All of them and what they are for; those of a folder before those of its folders."""
    found = sorted(FOLDER.rglob("*.yaml"), key=lambda path: (path.parent.parts, path.name))
    return {path: KINDS.get(path.parent.relative_to(FOLDER).as_posix(), "configuration") for path in found}


def kind_of(path: Path) -> Kind:
    """What a file is for; one from outside of the package is taken for a configuration."""
    return files().get(path.resolve(), "configuration")


@functools.cache
def name_of(path: Path) -> str:
    """The shortest name of a file that no other has; the model of a family keeps the family's folder."""
    parts, least = _parts(path), 2 if path.parent.parent == FOLDER / "models" else 1
    tails = ("/".join(parts[-count:]) for count in range(least, len(parts) + 1))
    return next(tail for tail in tails if len(matching(tail, ALL)) == 1)


def names(kinds: Sequence[Kind]) -> list[str]:
    """The names of the files of these kinds."""
    return [name_of(path) for path, kind in files().items() if kind in kinds]


def matching(word: str, kinds: Sequence[Kind]) -> list[Path]:
    """The files of these kinds that have this name, with or without `.yaml`."""
    wanted = tuple(word.removesuffix(".yaml").split("/"))
    return [path for path, kind in files().items() if kind in kinds and _parts(path)[-len(wanted) :] == wanted]


def find(word: str | Path, *kinds: Kind) -> Path:
    """The file that a person names: a path that exists, or else the name of one that comes with the package.

    Args:
        word: what was written.
        kinds: which files of the package may be meant.

    Raises:
        ConfigError: there is none, or several have this name, or it is a folder here.
    """
    path = Path(word)
    try:
        there, folder = path.exists(), path.is_dir()
    except OSError:  # no permission, for example: who reads the file says so
        return path
    if folder and matching(str(word), kinds):
        run = f" or {path / 'config.yaml'} for that of the run" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path}: is a directory; write {path}.yaml for the file of the package{run}")
    if there:
        return path
    return named(str(word), *kinds)


def named(word: str, *kinds: Kind) -> Path:
    """The file of the package that has this name.

    Raises:
        ConfigError: there is none, or there are several.
    """
    its = matching(word, kinds)
    if len(its) > 1:
        raise ConfigError(f"{word}: several have this name; write {' or '.join(map(name_of, its))}")
    if not its:
        raise ConfigError(f"{word}: no such file{_hint(Path(word), kinds)}")
    return _shown(its[0])


def nearest_file(path: Path) -> str | None:
    """The YAML file in the folder of a missing one whose name is most alike."""
    folder = path.parent
    found = sorted(entry.name for entry in folder.glob("*.yaml")) if folder.is_dir() else []
    alike = difflib.get_close_matches(path.name, found, n=1)
    return str(folder / alike[0]) if alike else None


def summary(path: Path) -> str:
    """The first sentence of the comment that a file begins with, in one line; lines that are set in are commands."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[2:] for line in itertools.takewhile(re.compile("# [^ ]").match, lines))
    sentence = re.split(r"(?<=[.?]) (?=[A-Za-z`])", comment)[0].rstrip(".:")
    return textwrap.shorten(sentence, 110, placeholder=" ...")


def _parts(path: Path) -> tuple[str, ...]:
    """Of a file's path, from the folder `configs` on and without `.yaml`."""
    return path.relative_to(FOLDER.parent).with_suffix("").parts


def _shown(path: Path) -> Path:
    """The path from the working directory where it is below: then what a run in a checkout notes fits any checkout."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _hint(path: Path, kinds: Sequence[Kind]) -> str:
    """The end of a message about a file that isn't there: the nearest file or name, and which names there are."""
    if near := nearest_file(path):
        return f"; did you mean '{near}'?"
    known = names(kinds)
    ends = {end: name for name in known for end in (name, name.rpartition("/")[2])}
    alike = difflib.get_close_matches(path.as_posix().removesuffix(".yaml"), ends, n=1)
    alike = alike or difflib.get_close_matches(path.stem, ends, n=1)
    meant = f" did you mean '{ends[alike[0]]}'?" if alike else ""
    there = "`dreamer config list` shows all" if len(known) > MOST_NAMES else f"it has {', '.join(known)}"
    what = kinds[0] if len(kinds) == 1 else "file"
    return f", and the package has no {what} of this name;{meant} {there}"
