"""Whether a checkpoint on disk is whole: a manifest of sizes and checksums, written once everything else is there.

A step without its manifest was never finished; a step that differs from its manifest is damaged. The storage
formats' own checks don't notice every flipped byte, and none of them notices a file that is gone.

Several processes share the work: each writes the manifest of its share of the files. A manifest names its own digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

CHUNK_BYTES = 1 << 22
_PREFIX = "manifest-"
_MANIFEST = re.compile(_PREFIX + r"[0-9]+-of-[0-9]+\.json", re.ASCII)


def write_manifest(step: epath.Path, process: int = 0, processes: int = 1) -> None:
    """Write the manifest of a process's share of a step's files; all shares together make the step complete.

    Args:
        step: folder of a checkpoint whose files don't change any more.
        process, processes: which share of how many.
    """
    files = {name: [size, digest] for name, size, digest in _described(step, _share(_files(step), process, processes))}
    body = json.dumps({"processes": processes, "files": files}, indent=1)
    path = step / f"{_PREFIX}{process}-of-{processes}.json"
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(f"{_digest(body)}\n{body}")
    unfinished.replace(path)


def manifests(step: epath.Path) -> list[epath.Path]:
    """The manifests of a step, sorted."""
    return sorted(path for path in step.iterdir() if _MANIFEST.fullmatch(path.name))


def is_complete(step: epath.Path) -> bool:
    """Whether all manifests are there: the step was saved to its end. Cheap; says nothing of damage."""
    return problem_of_save(step) is None


def problem_of_save(step: epath.Path) -> str | None:
    """Why a step isn't complete, or None."""
    return _problem_of_manifests(step)[0]


def problem_of(step: epath.Path, items: Sequence[str] = (), process: int = 0, processes: int = 1) -> str | None:
    """What is wrong with a step on disk, or None; reads every file asked for.

    Args:
        step: folder of a checkpoint.
        items: only files below these names; everything by default.
        process, processes: check a share of the files, so that several processes check a step together.
    """
    problem, expected = _problem_of_manifests(step)
    if problem:
        return problem
    wanted = [name for name in sorted(expected) if not items or name.partition("/")[0] in items]
    for name in _share(wanted, process, processes):
        size, digest = expected[name]
        path = step / name
        try:
            found = path.stat().length
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _digest_of_file(path) != digest:
                return f"{name} was changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error}"
    return None


def is_unverifiable(step: epath.Path) -> bool:
    """Whether a step was saved, to its end, by an early version of this program, which wrote no manifests.

    Such a step is used as it is. Later versions save with `run` in their meta.
    """
    try:
        meta = json.loads((step / "meta" / "metadata").read_text())
        return not manifests(step) and isinstance(meta, dict) and "run" not in meta
    except (OSError, ValueError):
        return False


def bytes_of(step: epath.Path) -> int:
    """Bytes that a step takes, by its manifests; 0 if it has none."""
    _, expected = _problem_of_manifests(step)
    return sum(size for size, _ in expected.values())


def _problem_of_manifests(step: epath.Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with the manifests, and what they expect: name -> [bytes, digest]."""
    expected: dict[str, Any] = {}
    found: list[epath.Path] = []
    try:
        found = manifests(step)
        for path in found:
            digest, _, body = path.read_bytes().partition(b"\n")
            if digest.decode("ascii", "replace") != _digest(body.decode("utf-8", "replace")):
                return f"{path.name} is damaged", {}
            expected |= json.loads(body)["files"]
    except OSError as error:
        return f"it can't be read: {error}", {}
    if is_unverifiable(step):
        return None, {}
    if not found:
        return "it was not saved to the end, or is being saved (it has no manifest)", {}
    processes = int(found[0].stem.rpartition("-of-")[2])
    if [path.name for path in found] != sorted(f"{_PREFIX}{i}-of-{processes}.json" for i in range(processes)):
        return f"it has {len(found)} of {processes} manifests", {}
    return None, expected


def _files(folder: epath.Path) -> list[str]:
    """Paths of all files below a folder but the manifests, sorted, with / between the parts."""
    names: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            names += [f"{path.name}/{name}" for name in _files(path)]
        elif not path.name.startswith(_PREFIX):
            names.append(path.name)
    return names


def _share(names: Sequence[str], process: int, processes: int) -> Sequence[str]:
    return names[process::processes]


def _described(step: epath.Path, names: Sequence[str]):
    for name in names:
        yield name, (step / name).stat().length, _digest_of_file(step / name)


def _digest_of_file(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)  # type: ignore[arg-type]
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
