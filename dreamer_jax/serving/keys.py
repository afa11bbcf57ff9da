"""Who may ask: keys from a file, as `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from dreamer_jax.errors import UserError

SHORTEST = 16
"""Characters of a key: shorter ones can be guessed."""


class Keys:
    """Those that open the server.

    Args:
        keys: at least one.
    """

    def __init__(self, keys: Iterable[str]):
        # Digests are of one length, so that comparing them says nothing about the keys.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def open(self, authorization: str | None) -> bool:
        """Whether a header holds one of them. It takes as long whichever it is, and if it is none."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", errors="surrogateescape")).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        return any(found) and scheme.lower() == "bearer"


def read_keys(path: str) -> Keys:
    """The keys of a file: one a line; empty lines and those that begin with # don't count.

    Raises:
        UserError: it can't be read, holds none, or one that is short, has spaces, or isn't ASCII.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8"
        raise UserError(f"--api-key-file {path}: can't be read ({reason})") from None
    keys = {number: line.strip() for number, line in enumerate(lines, start=1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        if len(key) < SHORTEST or not (key.isascii() and key.isprintable()) or " " in key:  # a header has no others
            raise UserError(
                f"--api-key-file {path}: line {number}: a key is {SHORTEST} characters or more of ASCII without "
                "spaces; one comes from: openssl rand -hex 24"
            )
    if not keys:
        raise UserError(f"--api-key-file {path}: holds no key; write one a line, such as of: openssl rand -hex 24")
    return Keys(keys.values())
