"""Who is computed when: the queue, rows, pages and turns of a served engine. Plain Python, without the device.

What keeps everybody going:

- Requests are admitted in the order of their arrival, but that one for which no row of its group is free lets those of
  other groups pass. Nobody passes one that waits for pages. So the oldest waits for rows and pages only, and both come
  free when rows end.
- One prompt is computed at a time, chunk by chunk. Between two turns there is one chunk, and up to `MORE` further ones
  as far as the rows that it is for are free, since a turn of few rows takes as long as one of many. So prompts wait for
  one turn at most, and rows for a bounded number of chunks.
- Groups take turns in a circle.
- Where a row needs a page and none is left, the youngest request gives its pages back and waits again, in its own
  place by arrival. The oldest never does, so it ends some time, and then the next one is the oldest.

On a mesh every device is a shard: it has its share of each group's rows, pages of its own, and a prompt of its own that
is computed, all shards' at once. A request stays in its shard: that with the fewest requests of those where it can
begin. Who waits for pages does so wherever a row is free, and nobody passes him; who gives pages back is the youngest
of his shard. So every shard has an oldest request that never waits again, and all that was said holds in each of them.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dreamer_jax.serving.pages import Pages

MORE = 4
"""Chunks beside the first between two turns, where all rows are free."""


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        number: by arrival.
        prompt: its tokens.
        most: tokens that it gets at most.
        depth: L of its passes.
        group: its number among those of the scheduler.
        of: what belongs to it and is the engine's.
        shares: whether it takes keys that are there already.
        row: of its group; None while it waits.
        shard: that has the row.
        pages: that it has, in the order of positions.
        shared: tokens of the prompt whose keys were there already when it was admitted.
        computed: tokens of the prompt whose keys are there, or about to be.
        joined: whether its prompt is computed and its row goes on.
        tokens: generated since it began, those that are known.
        begun: how often it was admitted.
        delivered: tokens; more than `tokens` when it has begun anew.
    """

    number: int
    prompt: tuple[int, ...]
    most: int
    depth: int
    group: int
    of: Any = None
    shares: bool = True
    row: int | None = None
    shard: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    computed: int = 0
    joined: bool = False
    tokens: int = 0
    begun: int = 0
    delivered: int = 0

    @property
    def end(self) -> int:
        """Positions that it may take."""
        return len(self.prompt) + self.most


@dataclass(frozen=True)
class Group:
    """Rows that go through one program.

    Attributes:
        rows: how many, in each shard.
        ahead: positions behind the newest known token that may be written before the next one is known.
    """

    rows: int
    ahead: int


class Scheduler:
    """The queue and the rows.

    Args:
        groups: their sizes.
        pages: for all of them, of each shard; all have as many.
    """

    def __init__(self, groups: Sequence[Group], pages: Sequence[Pages]):
        self.groups, self.pages = groups, pages
        self.rows: list[list[Job | None]] = [[None for _ in range(group.rows * len(pages))] for group in groups]
        self.waiting: list[Job] = []
        self.prompts: list[Job | None] = [None] * len(pages)
        """Of each shard the request whose prompt is computed now."""
        self._turn = 0

    @property
    def jobs(self) -> list[Job]:
        """All that have a row, the oldest first."""
        return sorted((job for rows in self.rows for job in rows if job is not None), key=lambda job: job.number)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is computed."""
        return not self.waiting and not any(job is not None for rows in self.rows for job in rows)

    def fits(self, positions: int) -> bool:
        """Whether a request that takes so many positions could be computed if it were alone."""
        return self.pages[0].needed(positions) <= self.pages[0].count

    def wait(self, job: Job) -> None:
        """Put a request in its place in the queue, by arrival."""
        bisect.insort(self.waiting, job, key=lambda other: other.number)

    def admit(self) -> list[Job]:
        """The requests whose prompts are computed now, at most one of each shard; new ones where the last one's is
        done."""
        for job in list(self.waiting):
            if None not in self.prompts:
                break
            if None not in self.rows[job.group]:
                continue
            shards = self._shards(job)
            if shards and not any(self._begins(job, shard) for shard in shards):
                break
        return [job for job in self.prompts if job is not None]

    def _shards(self, job: Job) -> list[int]:
        """Where a request could begin if there are pages: the shard with the fewest requests first."""
        size = self.groups[job.group].rows
        counts = Counter(other.shard for rows in self.rows for other in rows if other is not None)
        free = {row // size for row, other in enumerate(self.rows[job.group]) if other is None}
        return sorted((n for n in free if self.prompts[n] is None), key=lambda n: (counts[n], n))

    def _begins(self, job: Job, shard: int) -> bool:
        """Give a request a row of a shard and the pages that it needs to begin, if there are so many: for its prompt,
        and for as much behind it as it is likely to need before another one ends: what it has had before."""
        pages, group = self.pages[shard], self.groups[job.group]
        positions = min(len(job.prompt) + job.delivered + group.ahead, job.end)
        shared = pages.share(job.depth, job.prompt) if job.shares else []
        own = pages.take(pages.needed(positions) - len(shared))
        if own is None:
            pages.give(shared)
            return False
        self.waiting.remove(job)
        job.pages = shared + own
        job.shared = job.computed = len(shared) * pages.size
        job.shard, job.row = shard, self.rows[job.group].index(None, shard * group.rows)
        self.rows[job.group][job.row] = self.prompts[shard] = job
        job.begun += 1
        return True

    def chunks(self) -> int:
        """How many chunks of each shard may be computed before the next turn."""
        rows = [self.rows[job.group] for job in self.admit()]
        return max((1 + MORE * its.count(None) // len(its) for its in rows), default=0)

    def chunk(self) -> list[tuple[Job, int]]:
        """The next chunks of prompts, at most one of each shard: whose, and where it starts. With its last one a
        request has joined its rows."""
        found = []
        for job in self.admit():
            found.append((job, job.computed))
            pages = self.pages[job.shard]
            job.computed = min(job.computed + pages.chunk, len(job.prompt))
            pages.keep(job.depth, job.prompt[: job.computed], job.pages)
            if job.computed == len(job.prompt):
                job.joined, self.prompts[job.shard] = True, None
        return found

    def turn(self) -> int | None:
        """The group whose turn it is, of those with rows that go on; None if there are none."""
        for n in range(len(self.groups)):
            group = (self._turn + n) % len(self.groups)
            if self.going(group):
                self._turn = group + 1
                return group
        return None

    def going(self, group: int) -> list[Job]:
        """The requests whose rows go on, the oldest first."""
        jobs = [job for job in self.rows[group] if job is not None and job.joined]
        return sorted(jobs, key=lambda job: job.number)

    def grow(self, group: int) -> list[Job]:
        """Give every row of a group that goes on the pages that it may write before its next token is known.

        Returns:
            The requests that had to give theirs back and wait again.
        """
        ended = []
        for job in self.going(group):
            if job.row is None:  # it was among the youngest
                continue
            pages = self.pages[job.shard]
            positions = min(len(job.prompt) + job.tokens + self.groups[group].ahead, job.end)
            missing = pages.needed(positions) - len(job.pages)
            while missing > pages.available and job.row is not None:
                ended.append(self._put_back([other for other in self.jobs if other.shard == job.shard][-1]))
            if missing > 0 and job.row is not None:
                job.pages += pages.take(missing) or []
        return ended

    def _put_back(self, job: Job) -> Job:
        self.leave(job)
        job.shared = job.computed = job.tokens = 0
        job.joined = False
        self.wait(job)
        return job

    def leave(self, job: Job) -> None:
        """A request has ended, or nobody wants it any more."""
        if job.row is None:
            self.waiting = [other for other in self.waiting if other is not job]
            return
        self.rows[job.group][job.row] = None
        job.row = None
        if self.prompts[job.shard] is job:
            self.prompts[job.shard] = None
        self.pages[job.shard].give(job.pages)
        job.pages = []
