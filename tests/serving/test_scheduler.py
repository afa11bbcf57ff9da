"""Pages, prefixes and turns without a device: who may have what, and that everybody ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dreamer_jax.serving.pages import Pages
from dreamer_jax.serving.scheduler import Group, Job, Scheduler

SIZE, CHUNK = 2, 4
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)  # two tokens, so that many begin alike


class World:
    """A scheduler, and what its rows would write into its pages: of every page the tokens up to its end."""

    def __init__(self, pages: int, groups: list[Group], shards: int = 1):
        self.pages = [Pages(pages, SIZE, CHUNK) for _ in range(shards)]
        self.scheduler = Scheduler(groups, self.pages)
        self.written: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.ended: list[int] = []

    def compute_chunk(self) -> None:
        """One chunk of a prompt in each shard, which is written into pages that nobody else has."""
        found = self.scheduler.chunk()
        assert len({job.shard for job, _ in found}) == len(found)
        for job, start in found:
            for n, page in enumerate(job.pages[: start // SIZE]):
                assert self.written[job.shard, page] == (job.depth, job.prompt[: (n + 1) * SIZE])
            for n in range(start // SIZE, -(-job.computed // SIZE)):
                assert self.owners(job.shard, job.pages[n]) == [job]
                self.written[job.shard, job.pages[n]] = job.depth, job.prompt[: (n + 1) * SIZE]

    def owners(self, shard: int, page: int) -> list[Job]:
        """Who has a page."""
        return [job for job in self.scheduler.jobs if job.shard == shard and page in job.pages]

    def turn(self, most: int) -> int | None:
        """One turn in which every row of a group gets so many tokens; the group."""
        group = self.scheduler.turn()
        if group is None:
            return None
        self.scheduler.grow(group)
        for job in self.scheduler.going(group):
            assert len(job.pages) >= -(-min(len(job.prompt) + job.tokens + most, job.end) // SIZE)
            first = len(job.prompt) // CHUNK * CHUNK // SIZE  # the first page that isn't of a whole chunk
            for page in job.pages[first:]:
                assert self.owners(job.shard, page) == [job]
                self.written[job.shard, page] = -1, ()
            job.tokens = min(job.tokens + most, job.most)
            job.delivered = max(job.delivered, job.tokens)
            if job.tokens == job.most:
                self.end(job)
        return group

    def end(self, job: Job) -> None:
        """It leaves."""
        self.scheduler.leave(job)
        self.ended.append(job.number)

    def check(self) -> None:
        """Every page is free, or kept, or somebody's; no count is wrong; rows are of their shards."""
        for shard, pages in enumerate(self.pages):
            users = [0] * pages.count
            for job in self.scheduler.jobs:
                assert len(set(job.pages)) == len(job.pages)
                assert job.row is not None and job.row // self.scheduler.groups[job.group].rows == job.shard
                for page in job.pages if job.shard == shard else []:
                    users[page] += 1
            kept = [page for prefix in pages._prefixes.values() for page in prefix.pages]
            assert len(set(kept)) == len(kept) and set(kept) == pages._kept
            assert pages._users == [count + (page in kept) for page, count in enumerate(users)]
            assert sorted(pages._free) == [page for page, count in enumerate(pages._users) if count == 0]
            assert pages.available == sum(count == 0 for count in users)


@st.composite
def worlds(draw):
    """A few groups and pages, requests that could each be computed alone, and shards."""
    groups = [Group(draw(st.integers(1, 3)), draw(st.integers(1, 5))) for _ in range(draw(st.integers(1, 3)))]
    count = draw(st.integers(4, 14))
    jobs = []
    for number in range(draw(st.integers(1, 10))):
        prompt = draw(PROMPTS)[: count * SIZE - 1]
        most = draw(st.integers(1, min(9, count * SIZE - len(prompt))))
        jobs.append(Job(number, prompt, most, draw(st.integers(1, 2)), draw(st.integers(0, len(groups) - 1))))
    return count, groups, jobs, draw(st.integers(1, 3))


@settings(max_examples=200, deadline=None, database=None)
@given(worlds(), st.data())
def test_no_page_has_two_owners_none_is_lost_and_everybody_ends(world, data):
    """Whatever comes when: requests, chunks, turns and cancellations in any order, then turns until nothing is left."""
    count, groups, jobs, shards = world
    world, coming, cancelled = World(count, groups, shards), list(jobs), set()
    for event in data.draw(st.lists(st.sampled_from(["add", "chunk", "turn", "cancel"]), max_size=40)):
        if event == "add" and coming:
            world.scheduler.wait(coming.pop(0))
        elif event == "chunk":
            world.compute_chunk()
        elif event == "turn":
            world.turn(1)
        elif event == "cancel" and (there := [*world.scheduler.waiting, *world.scheduler.jobs]):
            job = data.draw(st.sampled_from(there))
            world.scheduler.leave(job)
            cancelled.add(job.number)
        world.check()
    for job in coming:
        world.scheduler.wait(job)
    steps = 0
    while not world.scheduler.idle:
        world.compute_chunk()
        world.turn(1)
        world.check()
        steps += 1
        # Alone, one after the other, with a turn of every group in between.
        assert steps <= sum((len(job.prompt) // CHUNK + 1 + job.most) * (len(groups) + 1) for job in jobs)
    assert sorted([*world.ended, *cancelled]) == [job.number for job in jobs]
    assert [pages.available for pages in world.pages] == [count] * shards


def test_equal_prompts_share_whole_chunks_but_not_their_last_token():
    """At chunks' borders, of the same depth; the last token is always computed."""
    world = World(20, [Group(4, 1)])
    prompts = [(1,) * 8, (1,) * 8, (1,) * 9, (1,) * 4 + (0,) * 5, (1,) * 3]
    jobs = [Job(n, prompt, 2, 1, 0) for n, prompt in enumerate(prompts)] + [Job(5, (1,) * 9, 2, 2, 0)]
    for job, shared in zip(jobs, [0, 4, 8, 4, 0, 0], strict=True):
        world.scheduler.wait(job)
        while not job.joined:
            world.compute_chunk()
        assert job.shared == shared
        world.check()
        if job.number:
            world.end(job)


def test_kept_prefixes_go_before_rows_and_the_oldest_first():
    """Pages that are only kept are taken when free ones are out: those used longest ago, ends before beginnings."""
    pages = Pages(6, SIZE, SIZE)
    for prompt in ((1, 1, 2, 2), (3, 3)):
        own = pages.take(len(prompt) // SIZE) or []
        pages.keep(1, prompt, own)
        pages.give(own)
    assert pages.available == 6 and len(pages._free) == 3
    pages.give(pages.share(1, (1, 1, 0)))  # used again, but not what continues it
    assert pages.take(4) is not None
    assert len(pages.share(1, (1, 1, 2, 2, 0))) == 1 and len(pages.share(1, (3, 3, 0))) == 1
    assert pages.take(1) is None and pages.available == 0


def test_the_youngest_waits_again_and_the_oldest_never():
    """Three requests whose answers don't fit together: the youngest begins anew, in its own place."""
    world = World(6, [Group(3, 1)])
    jobs = [Job(n, (n % 2,), 7, 1, 0) for n in range(3)]
    for job in jobs:
        world.scheduler.wait(job)
    world.scheduler.wait(Job(3, (1,), 7, 1, 0))
    while not world.scheduler.idle:
        world.compute_chunk()
        world.turn(1)
        world.check()
        assert [job.number for job in world.scheduler.waiting] == sorted(job.number for job in world.scheduler.waiting)
    assert world.ended == [0, 1, 2, 3] and jobs[0].begun == 1 and jobs[2].begun > 1


def test_who_waits_again_is_of_the_shard_that_has_no_page_left():
    """In the first shard two answers don't fit together; the youngest of all is in the second, where they do."""
    world = World(6, [Group(2, 1)], shards=2)
    jobs = [Job(n, (n % 2,), 9, 1, 0) for n in range(4)]
    for job in jobs:
        world.scheduler.wait(job)
    world.compute_chunk()
    world.compute_chunk()
    assert [job.shard for job in jobs] == [0, 1, 0, 1]
    jobs[0].tokens = jobs[2].tokens = 6
    assert world.scheduler.grow(0) == world.scheduler.waiting == [jobs[2]]
    world.check()


def test_more_chunks_come_between_turns_while_rows_are_free():
    """All of them while nobody is there, one when the rows are full, none without a prompt."""
    world, counts = World(100, [Group(4, 1), Group(1, 1)]), []
    assert world.scheduler.chunks() == 0
    for number in range(5):
        world.scheduler.wait(Job(number, (1,), 9, 1, 0))
    while count := world.scheduler.chunks():
        counts.append(count)
        world.compute_chunk()
    assert counts == [4, 3, 2, 1]


def test_requests_go_to_the_shard_with_the_fewest_and_stay_there():
    """Three shards of two rows: one after the other, then where somebody has left; prompts of all are computed at once,
    one of each, and equal prompts are shared where they lie."""
    world = World(8, [Group(2, 1), Group(1, 1)], shards=3)
    jobs = [Job(n, (1,) * 9, 3, 1, 0) for n in range(7)]
    for job in jobs:
        world.scheduler.wait(job)
    world.compute_chunk()
    assert [job.shard for job in world.scheduler.jobs] == [0, 1, 2] and world.scheduler.chunks() == 1 + 4 * 3 // 6
    for _ in range(3):
        world.compute_chunk()
        world.check()
    assert [job.shard for job in jobs[:6]] == [0, 1, 2, 0, 1, 2] and [job.shared for job in jobs[:6]] == [0] * 3 + [
        8
    ] * 3
    assert world.scheduler.waiting == jobs[6:]
    other = Job(9, (0,), 1, 1, 1)
    world.scheduler.wait(other)
    for job in jobs[4:6]:
        world.end(job)
    world.compute_chunk()  # the seventh gets a row; the other group's goes where fewer are now, not where none ended
    assert (jobs[6].shard, other.shard, jobs[3].shard) == (1, 2, 0) and jobs[6].shared == 8


def test_who_waits_for_pages_is_passed_by_nobody():
    """Rows are free in both shards, and pages of neither are enough; a short request that would fit comes later."""
    world = World(6, [Group(2, 1)], shards=2)
    jobs = [Job(n, (n % 2,) * 8, 4, 1, 0) for n in range(2)]
    for job in (*jobs, long := Job(2, (1, 0) * 3, 2, 1, 0), short := Job(3, (0,), 1, 1, 0)):
        world.scheduler.wait(job)
    for _ in range(3):
        world.compute_chunk()
    assert world.scheduler.waiting == [long, short]
    world.end(jobs[1])
    world.compute_chunk()
    assert (long.shard, short.shard, world.scheduler.waiting) == (1, 0, [])


def test_groups_and_prompts_take_turns():
    """With two groups that always have rows, each gets every second turn, and a chunk goes between."""
    world = World(100, [Group(1, 1), Group(1, 1)])
    for number in range(2):
        world.scheduler.wait(Job(number, (1,), 10, 1, number))
        world.compute_chunk()
    assert [world.turn(1) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
