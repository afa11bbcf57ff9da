"""The checkout as one file for the workers."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from pathlib import Path

from dreamer_jax.configs import matching, named
from dreamer_jax.errors import UserError

PARTS = (
    "dreamer_jax",
    "pallas_kernels",
    "launch",
    "requirements",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
"""What a worker needs of the checkout."""
PACKAGE = "dreamer_jax"
"""The part that may have configurations: an image for GKE holds it as well."""


def check_configuration(root: Path, config: str) -> None:
    """That a worker finds the configuration: by a name, or as a file of the package in the checkout at `root`.

    Raises:
        UserError: when it doesn't, because it lies elsewhere or nowhere.
    """
    file = root / config
    packed = file.resolve().is_relative_to(root.resolve() / PACKAGE)
    if packed and file.is_file() and not Path(config).is_absolute():
        return
    if packed and file.is_file():
        raise UserError(f"{config}: write it from the checkout, {file.resolve().relative_to(root.resolve())}")
    if not matching(config, ("configuration",)) and (file.is_file() or Path(config).is_file()):
        raise UserError(
            f"{config}: the workers don't get this file, only those in {PACKAGE}; put it, and what its `base:` names, "
            f"into {root / PACKAGE / 'configs'} and give its name there, such as {Path(config).stem}"
        )
    named(config, "configuration")


def pack(root: Path, target: Path) -> str:
    """Write the checkout at `root` to the file `target` (tar, gzip); equal contents make equal files.

    Returns:
        The SHA-256 of the contents, in hexadecimal: the installation is repeated when it changes.

    Raises:
        UserError: when `root` is no checkout.
    """
    absent = [part for part in PARTS if not (root / part).exists()]
    if absent:
        raise UserError(f"{root} is not a checkout of the repository: {', '.join(absent)} not found")
    files = [path for part in PARTS for path in sorted([root / part, *(root / part).rglob("*")])]
    with (
        open(target, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", dereference=True) as archive,
    ):
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts:
                archive.add(path, arcname=str(path.relative_to(root)), filter=_plain)
    return hashlib.sha256(target.read_bytes()).hexdigest()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two copies of the same files."""
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry
