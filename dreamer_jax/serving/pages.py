"""Who has which page of the keys and values: an allocator, and prefixes of prompts that are kept for equal ones.

Plain Python: it hands out numbers. A page that several rows have is one that none of them writes: only whole chunks of
prompts are shared, and what comes behind a prompt's last chunk never is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Key = tuple[int, tuple[int, ...]]
"""Of a chunk: the number of the prefix before it, or the depth as -L where there is none; and its tokens."""


@dataclass(frozen=True)
class Prefix:
    """A chunk of a prompt that is kept, together with all that comes before it.

    Attributes:
        number: its own.
        pages: of this chunk.
    """

    number: int
    pages: tuple[int, ...]


class Pages:
    """Pages that are free, that rows have, and that are kept.

    A prefix is kept until its pages are needed for something else and no row has them; the one that was used longest
    ago goes first, and never one before those that continue it.

    Args:
        count: of all pages.
        size: positions of a page.
        chunk: positions of a chunk, whole pages: prefixes are shared at its multiples only.
    """

    def __init__(self, count: int, size: int, chunk: int):
        if chunk % size:
            raise ValueError(f"a chunk of {chunk} positions isn't whole pages of {size}")
        self.count, self.size, self.chunk = count, size, chunk
        self._free = list(range(count))[::-1]
        self._users = [0] * count  # rows that have it, and one more if it is kept
        self._prefixes: OrderedDict[Key, Prefix] = OrderedDict()  # the one used longest ago is first
        self._kept: set[int] = set()
        self._idle = 0  # pages that are kept and that no row has
        self._next = 1

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and those that are only kept."""
        return len(self._free) + self._idle

    def needed(self, positions: int) -> int:
        """Pages of so many positions."""
        return -(-positions // self.size)

    def take(self, count: int) -> list[int] | None:
        """So many pages, of which the caller is the only user; None if there aren't so many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._drop()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Take back what a row had."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
            elif self._users[page] == 1 and page in self._kept:
                self._idle += 1

    def share(self, depth: int, prompt: Sequence[int]) -> list[int]:
        """Pages of the longest prefix that is kept, which the caller is a user of from now on. They never hold the
        prompt's last token, so that there is something to compute its logits from."""
        found = [prefix for _, prefix in self._path(depth, prompt, (len(prompt) - 1) // self.chunk)]
        pages = [page for prefix in found for page in prefix.pages]
        for page in pages:
            self._idle -= self._users[page] == 1
            self._users[page] += 1
        return pages

    def keep(self, depth: int, prompt: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the whole chunks of a prompt that its pages, computed or about to be, hold: the first ones of a row."""
        per_chunk = self.chunk // self.size
        whole = min(len(prompt) // self.chunk, len(pages) // per_chunk)
        known = list(self._path(depth, prompt, whole))
        before = known[-1][1].number if known else -depth
        if [page for _, prefix in known for page in prefix.pages] != list(pages[: len(known) * per_chunk]):
            return  # somebody else's pages hold it; what comes behind is the row's own
        for n in range(len(known), whole):
            key = before, tuple(prompt[n * self.chunk : (n + 1) * self.chunk])
            prefix = Prefix(self._next, tuple(pages[n * per_chunk : (n + 1) * per_chunk]))
            for page in prefix.pages:
                self._users[page] += 1
            self._kept.update(prefix.pages)
            self._prefixes[key], before, self._next = prefix, self._next, self._next + 1
        list(self._path(depth, prompt, whole))

    def _path(self, depth: int, prompt: Sequence[int], chunks: int) -> Iterator[tuple[Key, Prefix]]:
        """What is kept of the first chunks of a prompt, in order. It counts as used, a beginning after what continues
        it."""
        found, before = [], -depth
        for n in range(chunks):
            key = before, tuple(prompt[n * self.chunk : (n + 1) * self.chunk])
            if key not in self._prefixes:
                break
            found.append((key, self._prefixes[key]))
            before = found[-1][1].number
        for key, _ in reversed(found):
            self._prefixes.move_to_end(key)
        yield from found

    def _drop(self) -> None:
        """Forget the prefix that was used longest ago of those that no row has.

        Nothing that is kept continues it: that would have been used before it, and who had that would have this too.
        """
        key = next(key for key, prefix in self._prefixes.items() if self._users[prefix.pages[0]] == 1)
        pages = self._prefixes.pop(key).pages
        self._kept.difference_update(pages)
        self._idle -= len(pages)
        for page in pages:
            self._users[page] = 0
            self._free.append(page)
