"""An engine that computes many requests at once, each as if it were alone.

Its thread goes in turns. A turn hands the device a chunk or a few, if a prompt is to be computed, and a tick of one
group of rows, if any goes on; then it waits for what the turn before has brought, delivers it, and looks at what came
in meanwhile. So the device always has work while the host decides, and a decision (a row that joins or ends, a page
more) takes effect one turn later. What a request is answered is a function of its prompt, its settings and its seed;
whoever shares its programs changes nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.inference.model import FoldedModel
from dreamer_jax.inference.samplers import Adaptive, Lossless, Sampler, Static
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.serving import programs
from dreamer_jax.serving.answers import Answer, Turn
from dreamer_jax.serving.contract import Closed, Deliver, Finish, QueueFull, Request, TooLong, Update, View
from dreamer_jax.serving.groups import Group, group_of, programs_of
from dreamer_jax.serving.options import Options
from dreamer_jax.serving.pages import Pages
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
        options: sizes.
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
    ):
        self.model, self.options, self._report = model, options or Options(), report
        chosen = samplers_for(model) if samplers is None else samplers
        self.samplers: dict[str, Sampler] = {}
        for its in chosen:
            self.samplers.setdefault(its.name, its)
        self.programs = programs_of(model, chosen)
        its = self.options
        self._pages = Pages(its.all_pages, its.page, its.chunk)
        self._pool = programs.beside(model, programs.pool(model, its.all_pages, its.page))
        if not all(hasattr(kept, "paged") for kept in jax.tree.leaves(self._pool, is_leaf=_is_memory)):
            raise UserError(f"what this model ({model.family.headline()}) keeps of a text can't lie in pages")
        likeliest = min(its.logprobs, model.config.vocab_size)
        sizes = its.rows, its.steps or model.total_depth, choosings(likeliest), its.stop_ids
        self._groups = [Group(model, program, *sizes) for program in self.programs]
        self._scheduler = Scheduler([group.plan for group in self._groups], self._pages)
        self._statistics = Statistics(model.family, its.context, model.total_depth)
        self._hidden = self._nothing = programs.beside(model, self._no_hidden())

        self._changed = threading.Condition()  # guards what follows
        self._commands: deque[tuple[str, Any]] = deque()
        self._numbers, self._queued = 0, 0
        self._state = "starting"
        self._deadline: float | None = None
        self._jobs: dict[int, Job] = {}  # the engine's thread only, as all else
        self._view = self._look()
        self._thread = threading.Thread(target=self._run, name="served-engine", daemon=True)
        self._thread.start()

    # For any thread.

    @property
    def ready(self) -> bool:
        """Whether its programs are compiled and it takes requests."""
        return self._state == "ready"

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Take a request; its number. See `contract.ServingEngine`."""
        self._check(request)
        group, depth, settings = group_of(self.programs, self.model, request.sampler, request.depth)
        with self._changed:
            if self._state != "ready":
                raise Closed(_WORDS[self._state])
            if self._queued >= self.options.queue:
                raise QueueFull(f"{self._queued} requests wait already")
            self._queued += 1
            self._numbers += 1
            job = Job(self._numbers, request.prompt, request.max_tokens, depth, group)
            job.of = Answer(request, deliver, settings)
            self._commands.append(("submit", job))
            self._changed.notify_all()
            return job.number

    def cancel(self, number: int) -> None:
        """End a request at the next step, if it is still there; it is delivered as "cancelled"."""
        with self._changed:
            if self._state in ("ready", "stopping"):
                self._commands.append(("cancel", number))
                self._changed.notify_all()

    def view(self) -> View:
        """What it did when it last looked."""
        return self._view

    def close(self, grace: float) -> None:
        """Take no further requests, finish those that are here within so many seconds, cancel the rest, and end."""
        with self._changed:
            if self._state in ("starting", "ready"):
                self._state = "stopping"
            self._deadline = time.monotonic() + grace
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check(self, request: Request) -> None:
        its, vocabulary = self.options, self.model.config.vocab_size
        if not request.prompt:
            raise UserError("the prompt is empty; begin it with the begin-of-text token")
        if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            raise UserError(f"the prompt has a token outside the model's vocabulary of {vocabulary}")
        if request.max_tokens < 1:
            raise UserError(f"max_tokens {request.max_tokens}: must be 1 or more")
        most = self._groups[0].choosings[-1].logprobs or 0
        if request.logprobs is not None and not 0 <= request.logprobs <= most:
            raise UserError(f"logprobs {request.logprobs}: must be from 0 to {most}")
        length = len(request.prompt) + request.max_tokens
        if length > its.context or not self._scheduler.fits(length):
            most = min(its.context, self._pages.count * its.page)
            raise TooLong(f"{len(request.prompt)} prompt tokens and {request.max_tokens} more: {most} fit together")

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
            elif given in self._jobs:
                self._end(self._jobs[given], "cancelled")
        if self._state == "ready":
            return True
        return bool(self._jobs) and self._deadline is not None and time.monotonic() < self._deadline

    def _dispatch(self) -> Turn | None:
        """Hand the device chunks and a tick, as far as there are some; what to wait for."""
        turn = Turn()
        chunks = self._scheduler.chunks()
        for _ in range(chunks):
            found = self._scheduler.chunk()
            if found is not None:
                self._dispatch_chunk(turn, *found)
        group = self._scheduler.turn()
        if group is not None:
            self._dispatch_tick(turn, group)
        return turn if chunks or group is not None else None

    def _dispatch_chunk(self, turn: Turn, job: Job, start: int) -> None:
        answer: Answer = job.of
        if start == job.shared:
            self._hidden = self._nothing
            if job.begun == 1:
                self._leaves_queue()
                self._statistics.prompt_tokens += len(job.prompt)
                self._statistics.shared_tokens += job.shared
        tokens = np.zeros((1, self.options.chunk), np.int32)
        own = job.prompt[start : start + self.options.chunk]
        tokens[0, : len(own)] = own
        numbers = np.int32(start), np.int32(len(job.prompt)), np.int32(job.depth)
        self._hidden, self._pool = programs.chunk(
            self.model, self._pool, self._table(1, {0: job}), tokens, *numbers, self._hidden
        )
        turn.chunk = self._hidden
        if job.joined:
            assert job.row is not None
            group = self._groups[job.group]
            chosen = group.join(self.model, self._hidden, job.row, answer.request, job.depth, answer.settings)
            turn.first.append((job, job.begun, chosen))

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
        table = np.full((rows, self.options.pages_per_row), self._pages.count, np.int32)
        for row, job in jobs.items():
            table[row, : len(job.pages)] = job.pages
        return table

    def _receive(self, turn: Turn) -> None:
        """Wait for what a turn has brought, and deliver it."""
        jax.block_until_ready(turn.chunk)
        for job, begun, chosen in turn.first:
            token, logprobs = jax.device_get(chosen)
            if turn.still(job, begun):
                self._deliver(job, token, np.array([job.depth]), logprobs)
        if turn.brought is None:
            return
        brought = jax.device_get(turn.brought)
        group = self._groups[turn.group]
        steps = int(brought.rounds) * group.steps_a_round
        self._statistics.count(steps, group.rows * group.lanes, int(brought.work))
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

    def _no_hidden(self) -> jax.Array:
        """Zeros of the type that a readout has, which may be wider than the model's."""
        shape, none = (1, self.model.family.readout_size), np.int32(0)
        narrow = jnp.zeros(shape, self.model.config.dtype)
        tokens = np.zeros((1, self.options.chunk), np.int32)
        given = self.model, self._pool, self._table(1, {}), tokens, none, none, none, narrow
        return jnp.zeros(shape, jax.eval_shape(programs.chunk, *given)[0].dtype)

    def _leaves_queue(self) -> None:
        with self._changed:
            self._queued -= 1

    def _look(self) -> View:
        rows = [None if job is None else job.of.view(job) for rows in self._scheduler.rows for job in rows]
        return self._statistics.view(
            tuple(rows), len(self._scheduler.waiting), self._pages.count, self._pages.available
        )

    def _warm_up(self) -> None:
        """Compile every program by letting it do nothing."""
        begun, its = time.monotonic(), self.options
        count = 1 + sum(2 * len(group.choosings) for group in self._groups)
        names = ", ".join(group.sampler.name for group in self._groups)
        self._report(f"compiling {count} programs for {its.rows} rows each of {names}")
        tokens, numbers = np.zeros((1, its.chunk), np.int32), [np.int32(n) for n in (0, 1, 1)]
        nobody = self._table(1, {})
        hidden, self._pool = programs.chunk(self.model, self._pool, nobody, tokens, *numbers, self._nothing)
        for group in self._groups:
            if self._state == "starting":
                self._pool = group.warm_up(self.model, self._pool, hidden, self._table(group.rows, {}), its.collect)
        jax.block_until_ready(self._pool)
        self._report(f"compiled {count} programs in {time.monotonic() - begun:.1f} s")
        with self._changed:
            if self._state == "starting":
                self._state = "ready"


def _is_memory(kept: Any) -> bool:
    return hasattr(kept, "paged")
