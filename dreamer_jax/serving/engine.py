"""An engine that computes many requests at once, each as if it were alone.

Its thread goes in turns. A turn hands the device a chunk or a few, if a prompt is to be computed, and a tick of one
group of rows, if any goes on; then it waits for what the turn before has brought, delivers it, and looks at what came
in meanwhile. So the device always has work while the host decides, and a decision (a row that joins or ends, a page
more) takes effect one turn later. What a request is answered is a function of its prompt, its settings and its seed;
whoever shares its programs changes nothing of it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dreamer_jax.errors import UserError
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.samplers import Adaptive, Lossless, Sampler, Static
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.inference.sharding import by_rows, shard
from dreamer_jax.serving.answers import Answer, Turn
from dreamer_jax.serving.contract import Closed, Deliver, Finish, QueueFull, Request, TooLong, Update, View
from dreamer_jax.serving.groups import Group, Joining, group_of, programs_of, put
from dreamer_jax.serving.options import Options
from dreamer_jax.serving.pages import Pages
from dreamer_jax.serving.programs import programs_for
from dreamer_jax.serving.scheduler import Job, Scheduler
from dreamer_jax.serving.statistics import Statistics

logger = logging.getLogger(__name__)


_WORDS = {
    "starting": "the engine isn't ready yet",
    "stopping": "the engine is stopping",
    "closed": "the engine is closed",
    "failed": "the engine has failed",
}
"""State -> why it takes no requests."""


def samplers_for(model: FoldedModel) -> list[Sampler]:
    """What is served unless something else is asked for: static, adaptive and lossless, as far as the model can."""
    return [its for its in (Static(), Adaptive(), Lossless()) if fits(its, model)]


def choosings(likeliest: int) -> tuple[Choosing, ...]:
    """Ways of choosing tokens that are compiled, each fit for what those before it are fit for. The last one sorts the
    logits, so it is used only while some row wants that."""
    return Choosing(), Choosing(True), Choosing(True, True, likeliest)


def fits(sampler: Sampler, model: FoldedModel) -> bool:
    """Whether a sampler can be used with a model."""
    try:
        sampler.for_model(model)
    except UserError:
        return False
    return True


class ServedEngine:
    """See `contract.ServingEngine`.

    Args:
        model: at the largest depth that is served.
        samplers: whose programs are compiled; by default `samplers_for` the model.
        options: sizes. On a mesh rows and pages are rounded up to what all devices have alike.
        mesh: devices to share the rows, and along an axis `expert` the experts (see `inference.sharding`); None for
            one.
        report: takes a line about what is being prepared.

    Raises:
        UserError: a sampler isn't for this model, or the model has keys and values that can't be kept in pages.
    """

    def __init__(
        self,
        model: FoldedModel,
        samplers: Sequence[Sampler] | None = None,
        options: Options | None = None,
        report: Callable[[str], None] = lambda line: None,
        mesh: Mesh | None = None,
    ):
        sharding = None
        if mesh is not None and mesh.size > 1:
            model, sharding = shard(model, mesh, apart=True)
        else:
            model = by_rows(model)
        self._shards = 1 if sharding is None else sharding.row_shards
        its = options or Options()
        rows, places = -(-its.rows // self._shards), -(-its.all_places // self._shards)  # of each device
        self.options = its = dataclasses.replace(its, rows=rows * self._shards, places=places * self._shards)
        self.model, self._report, self._programs = model, report, programs_for(sharding)
        chosen = samplers_for(model) if samplers is None else samplers
        self.samplers: dict[str, Sampler] = {}  # by the name that stands for them; first what requests without one get
        for sampler in sorted(chosen, key=lambda each: not isinstance(each, Static)):
            self.samplers.setdefault(sampler.name, sampler)
        self._offered = list(dict.fromkeys(sampler.label for sampler in chosen))
        self.programs = programs_of(model, chosen)
        pages = -(-its.all_pages // self._shards)
        self._pages = [Pages(pages, its.page, its.chunk) for _ in range(self._shards)]
        self._pool = self._programs.fixed(model, self._programs.pool(pages, its.page, model))
        if not all(hasattr(kept, "paged") for kept in jax.tree.leaves(self._pool, is_leaf=_is_memory)):
            raise UserError(f"what this model ({model.family.headline()}) keeps of a text can't lie in pages")
        self._likeliest = min(its.logprobs, model.config.vocab_size)
        sizes = rows, places, self._shards, its.steps or model.total_depth, choosings(self._likeliest), its.stop_ids
        self._groups = [Group(self._programs, model, program, *sizes) for program in self.programs]
        self._scheduler = Scheduler([group.plan for group in self._groups], self._pages)
        self._statistics = Statistics(model.family, its.context, model.total_depth)

        self._changed = threading.Condition()  # guards what follows
        self._commands: deque[tuple[str, Any]] = deque()
        self._numbers, self._queued = 0, 0
        self._state = "starting"
        self._deadline: float | None = None
        self._free = 0.0  # when the device was last seen to have done what it was given
        self._jobs: dict[int, Job] = {}  # the engine's thread only, as all else
        self._view = self._look()
        self._thread = threading.Thread(target=self._run, name="served-engine", daemon=True)
        self._thread.start()

    # For any thread.

    @property
    def ready(self) -> bool:
        """Whether its programs are compiled and it takes requests."""
        return self._state == "ready"

    @property
    def ended(self) -> bool:
        """Whether its thread is gone; after `close` it is, unless a program was being compiled."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether a fault has ended it; the log has which."""
        return self._state == "failed"

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Take a request; its number. See `contract.ServingEngine`."""
        return self.submit_all([(request, deliver)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Deliver]]) -> list[int]:
        """Take requests that belong together, all of them or none; their numbers. See `contract.ServingEngine`."""
        jobs = [self._job(request, deliver) for request, deliver in requests]
        with self._changed:
            if self._state != "ready":
                raise Closed(_WORDS[self._state])
            if self._queued >= self.options.queue:
                raise QueueFull(f"{self._queued} requests wait already")
            self._queued += len(jobs)
            for job in jobs:
                self._numbers += 1
                job.number = self._numbers
                self._commands.append(("submit", job))
            self._changed.notify_all()
        return [job.number for job in jobs]

    def cancel(self, number: int, finish: Finish = "cancelled") -> None:
        """End a request at the next step, if it is still there; it is delivered, and counted, as `finish`."""
        with self._changed:
            if self._state in ("ready", "stopping"):
                self._commands.append(("cancel", (number, finish)))
                self._changed.notify_all()

    def view(self) -> View:
        """What it did when it last looked."""
        return self._view

    def close(self, grace: float) -> None:
        """Take no further requests, finish those that are here within so many seconds, cancel the rest, and end."""
        with self._changed:
            starting = self._state == "starting"
            if self._state in ("starting", "ready"):
                self._state = "stopping"
            self._deadline = time.monotonic() + grace
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace if starting else None)  # a program that is being compiled can't be given up

    def _job(self, request: Request, deliver: Deliver) -> Job:
        """A request and all that is made of it in its caller's thread, so that what can't be made is its caller's error
        alone; it gets its number when it is taken."""
        self._check(request)
        group, depth, settings = group_of(self.programs, self.model, request.sampler, request.depth, self._offered)
        job = Job(0, request.prompt, request.max_tokens, depth, group)
        job.of, job.shares = Answer(request, deliver, request.sampling.numbers(), settings), not request.scored
        job.of.echo(depth)
        return job

    def _check(self, request: Request) -> None:
        its, vocabulary = self.options, self.model.config.vocab_size
        if not request.prompt:
            raise UserError("the prompt is empty; begin it with the begin-of-text token")
        if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            raise UserError(f"the prompt has a token outside the model's vocabulary of {vocabulary}")
        least = 0 if request.echo else 1
        if request.max_tokens < least:
            raise UserError(f"max_tokens {request.max_tokens}: must be {least} or more")
        if not all(0 <= each < 2**31 for each in (request.number, *request.stop_ids)):
            raise UserError("number and stop_ids: must be from 0 to 2^31 - 1")
        if request.logprobs is not None and not 0 <= request.logprobs <= self._likeliest:
            raise UserError(f"logprobs {request.logprobs}: must be from 0 to {self._likeliest}")
        length = len(request.prompt) + request.max_tokens
        if length > its.context or not self._scheduler.fits(length):
            most = min(its.context, self._pages[0].count * its.page)
            tokens = f"{len(request.prompt)} tokens of prompt and {request.max_tokens} to be written"
            raise TooLong(f"{tokens} don't fit the context of {most} tokens")

    # The engine's thread.

    def _run(self) -> None:
        finish: Finish = "cancelled"
        try:
            self._warm_up()
            before: Turn | None = None
            while self._listen(wait=before is None):
                turn = self._dispatch()
                if before is not None:
                    self._receive(before)
                before = turn
                self._view = self._look()
        except Exception:
            logger.exception("the engine has stopped")
            finish = "failed"
        with self._changed:
            self._state = "failed" if finish == "failed" else "closed"
            came_last = [given for name, given in self._commands if name == "submit"]
            self._commands.clear()
        for job in [*self._jobs.values(), *came_last]:
            self._jobs.setdefault(job.number, job)
            self._end(job, finish)
        self._view = self._look()

    def _listen(self, wait: bool) -> bool:
        """Do what was asked for; whether the engine goes on. With `wait` it sleeps while there is nothing to do."""
        with self._changed:
            while wait and self._state == "ready" and not self._commands and self._scheduler.idle:
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
        for name, given in commands:
            if name == "submit":
                self._jobs[given.number] = given
                self._scheduler.wait(given)
            elif given[0] in self._jobs:
                self._end(self._jobs[given[0]], given[1])
        if self._state == "ready":
            return True
        return bool(self._jobs) and self._deadline is not None and time.monotonic() < self._deadline

    def _dispatch(self) -> Turn | None:
        """Hand the device chunks and a tick, as far as there are some; what to wait for."""
        turn = Turn()
        chunks = self._scheduler.chunks()
        for _ in range(chunks):
            found = self._scheduler.chunk()
            if found:
                self._dispatch_chunk(turn, found)
        group = self._scheduler.turn()
        if group is not None:
            self._dispatch_tick(turn, group)
        return turn if chunks or group is not None else None

    def _dispatch_chunk(self, turn: Turn, found: Sequence[tuple[Job, int]]) -> None:
        tokens, *numbers = self._no_prompts()
        for job, start in found:
            if start == job.shared and job.begun == 1:
                self._leaves_queue()
                self._statistics.prompt_tokens += len(job.prompt)
                self._statistics.shared_tokens += job.shared
            own = job.prompt[start : start + self.options.chunk]
            tokens[job.shard, : len(own)] = own
            put(numbers, (start, len(job.prompt), job.depth), job.shard)
        table = self._table(self._shards, {job.shard: job for job, _ in found})
        turn.chunk, rest, self._pool = self._programs.chunk(self.model, self._pool, table, tokens, *numbers)
        if scored := {job.shard: (job, start) for job, start in found if job.of.request.scored}:
            following = np.zeros_like(tokens)
            for number, (job, start) in scored.items():
                own = job.of.following(start, self.options.chunk)
                following[number, : len(own)] = own
            turn.scored.append((scored, self._programs.score(self._likeliest, self.model, rest, following)))
        joined = [job for job, _ in found if job.joined]
        for number in sorted({job.group for job in joined}):
            own = [job for job in joined if job.group == number]
            joining = {
                job.row: Joining(job.of.request, job.depth, job.of.sampling, job.of.settings)
                for job in own
                if job.row is not None
            }
            chosen = self._groups[number].join(self.model, turn.chunk, joining)
            turn.first.append(({job.shard: (job, job.begun) for job in own}, chosen))

    def _no_prompts(self) -> list[np.ndarray]:
        """Of each device what a chunk gets where no prompt is computed: tokens, start, length and depth."""
        tokens = np.zeros((self._shards, self.options.chunk), np.int32)
        return [tokens, *(np.full(self._shards, number, np.int32) for number in (0, 1, 1))]

    def _dispatch_tick(self, turn: Turn, number: int) -> None:
        self._scheduler.grow(number)
        group = self._groups[number]
        jobs = {job.row: job for job in self._scheduler.going(number) if job.row is not None}
        if not jobs:  # all of them were among the youngest
            return
        requests = {row: job.of.request for row, job in jobs.items()}
        table = self._table(group.rows, jobs)
        self._pool, turn.brought = group.tick(self.model, self._pool, table, requests, self.options.collect)
        turn.group, turn.owners = number, {row: (job, job.begun) for row, job in jobs.items()}

    def _table(self, rows: int, jobs: dict[int, Job]) -> np.ndarray:
        table = np.full((rows, self.options.pages_per_row), self._pages[0].count, np.int32)
        for row, job in jobs.items():
            table[row, : len(job.pages)] = job.pages
        return table

    def _receive(self, turn: Turn) -> None:
        """Wait for what a turn has brought, and deliver it."""
        begun = max(turn.begun, self._free)
        jax.block_until_ready((turn.chunk, [found for _, found in turn.scored], [chosen for _, chosen in turn.first]))
        self._free = time.perf_counter()
        self._statistics.prompt_seconds += self._free - begun
        for scored, found in turn.scored:
            chosen = jax.device_get(found)
            for number, (job, start) in scored.items():
                own = slice(number * self.options.chunk, (number + 1) * self.options.chunk)
                job.of.scored(start, jax.tree.map(lambda each, own=own: each[own], chosen))
        for owners, chosen in turn.first:
            token, logprobs = jax.device_get(chosen)
            for number, (job, begun) in owners.items():
                if turn.still(job, begun):
                    own = slice(number, number + 1)
                    logs = jax.tree.map(lambda each, own=own: each[own], logprobs)
                    self._deliver(job, token[own], np.array([job.depth]), logs)
        if turn.brought is None:
            return
        begun, brought = self._free, jax.device_get(turn.brought)
        self._free = time.perf_counter()
        self._statistics.decode_seconds += self._free - begun
        group = self._groups[turn.group]
        steps = int(brought.rounds.max()) * group.steps_a_round  # who has done sooner waits for the others
        # A sampler whose rows go together is taken to compute what lies outside of the depths once a token.
        apart, at_once = group.sampler.rows_apart, group.at_once * self._shards
        borders = int(brought.borders.max()) * at_once if apart else np.sum(brought.tokens >= 0)
        self._statistics.count(steps, at_once * group.lanes, int(brought.work.sum()), int(borders))
        for row, (job, begun) in turn.owners.items():
            if turn.still(job, begun):
                job.of.in_flight = tuple(depth for depth in brought.in_flight[row].tolist() if depth >= 0)
                logprobs = jax.tree.map(lambda each, row=row: each[row], brought.logprobs)
                self._deliver(job, brought.tokens[row], brought.depths[row], logprobs, decoded=True)

    def _deliver(self, job: Job, tokens: np.ndarray, depths: np.ndarray, logprobs: Any, decoded: bool = False) -> None:
        """Give a request its next tokens, those that it doesn't have yet."""
        new, finish = job.of.next_tokens(job, tokens, depths, logprobs)
        job.delivered += len(new)
        self._statistics.add([token.depth for token in new], decoded)
        if finish is not None:
            self._end(job, finish, tuple(new))
        elif new and not job.of.deliver(Update(tuple(new))):
            self._end(job, "cancelled")

    def _end(self, job: Job, finish: Finish, tokens: tuple = ()) -> None:
        if not job.begun:
            self._leaves_queue()
        del self._jobs[job.number]
        self._scheduler.leave(job)
        self._statistics.finished[finish] += 1
        job.of.deliver(Update(tokens, finish))

    def _leaves_queue(self) -> None:
        with self._changed:
            self._queued -= 1

    def _look(self) -> View:
        rows = [None if job is None else job.of.view(job) for rows in self._scheduler.rows for job in rows]
        pages, free = (sum(each) for each in zip(*((its.count, its.available) for its in self._pages), strict=True))
        return self._statistics.view(tuple(rows), len(self._scheduler.waiting), pages, free)

    def _warm_up(self) -> None:
        """Compile every program by letting it do nothing."""
        begun, its = time.monotonic(), self.options
        count = 2 + sum(2 * len(group.choosings) for group in self._groups)
        names = ", ".join(group.sampler.label for group in self._groups)
        devices = f" on {self._shards} devices" if self._shards > 1 else ""
        self._report(f"compiling {count} programs for {its.rows} rows each of {names}{devices}")
        nobody = self._table(self._shards, {})
        nothing = self._no_prompts()
        hidden, rest, self._pool = self._programs.chunk(self.model, self._pool, nobody, *nothing)
        self._programs.score(self._likeliest, self.model, rest, nothing[0])
        for group in self._groups:
            if self._state == "starting":
                self._pool = group.warm_up(self.model, self._pool, hidden, self._table(group.rows, {}), its.collect)
                self._report(f"  {group.sampler.label}: there after {time.monotonic() - begun:.1f} s")
        jax.block_until_ready(self._pool)
        with self._changed:
            if self._state == "starting":
                self._state = "ready"
        if self._state == "ready":
            self._report(f"ready: compiled {count} programs in {time.monotonic() - begun:.1f} s")


def _is_memory(kept: Any) -> bool:
    return hasattr(kept, "paged")
