"""Groups of rows that go through one program, and which group a request's sampler belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dreamer_jax.errors import UserError
from dreamer_jax.inference.model import FoldedModel, PyTree
from dreamer_jax.inference.programs import Kinds
from dreamer_jax.inference.samplers import Adaptive, DiffusionForcing, Lossless, Sampler, Speculative, Static
from dreamer_jax.inference.samplers.contract import DECODE_BLOCK, Choosing, Chosen
from dreamer_jax.inference.samplers.criteria import CRITERIA
from dreamer_jax.inference.sampling import Sampling, SamplingNumbers
from dreamer_jax.serving import scheduler
from dreamer_jax.serving.contract import Request
from dreamer_jax.serving.programs import Brought, OneByOne, Programs, Row, Rows, in_flight

NOT_SERVED = "sampler speculative: rows wait for each other's drafts, so it isn't served; take lossless"


class Joining(NamedTuple):
    """A row that takes a place: its request, L of its passes, the numbers of its sampling and its sampler's."""

    request: Request
    depth: int
    sampling: SamplingNumbers
    settings: Any


class Group:
    """B places for rows of one sampler's program: their state on the device, and what the host knows of them.

    Args:
        programs: that are compiled.
        model: at the largest depth that is served.
        sampler: whose program; what isn't a number of each row is a number of all of them, as this one has it.
        rows: that a step takes, of each device.
        places: of each device, where rows don't wait for each other; elsewhere there are as many as `rows`.
        shards: devices; B counts the places of all of them.
        steps: depth steps of a tick.
        choosings: programs that are compiled, each fit for what those before it are fit for.
        stops: tokens that may end a row, at most.
    """

    def __init__(
        self,
        programs: Programs,
        model: FoldedModel,
        sampler: Sampler,
        rows: int,
        places: int,
        shards: int,
        steps: int,
        choosings: Sequence[Choosing],
        stops: int,
    ):
        self.sampler, self.choosings, self.at_once = sampler.program, tuple(choosings), rows
        self._programs, self._shards = programs, shards
        self._own = places if sampler.rows_apart else rows
        self.rows = rows = self._own * shards
        self._progress, self._carried = programs.fixed(model, programs.places(sampler, self._own, model))
        flying = jax.eval_shape(in_flight, self._carried.by_row, self._progress)
        self.lanes = max(1, flying.shape[1])
        inner = sampler.inner_recurrences if isinstance(sampler, DiffusionForcing) else 1
        self.steps_a_round, self.rounds = inner, max(1, steps // inner)
        self._limit = min(self.rounds, DECODE_BLOCK)
        # Positions that enter a row's flight in a round, and tokens that a round may bring it.
        enter, leave = (sampler.headway, self.lanes) if isinstance(sampler, DiffusionForcing) else (1, 1)
        self.advance = min(self.rounds * enter, self._limit + leave - 1)
        self._stop_ids = np.full((rows, stops), -1, np.int32)
        self._sampling = jax.tree.map(lambda each: np.repeat(np.asarray(each), rows), Sampling(1.0).numbers())
        numbers = sampler.numbers()
        self._settings = jax.tree.map(lambda each: np.repeat(np.asarray(each), rows), numbers)
        if isinstance(sampler, DiffusionForcing):
            self._settings = self._settings._replace(**shared(numbers))

    @property
    def plan(self) -> scheduler.Group:
        """For the scheduler: two ticks may be on their way before what they bring is known."""
        return scheduler.Group(self._own, 2 * self.advance + self.lanes)

    def join(self, model: FoldedModel, hidden: Any, joining: Mapping[int, Joining]) -> Chosen:
        """Rows after their prompts take places, at most one of each device; the first tokens [devices].

        Args:
            model: that the programs get.
            hidden: of the devices' last chunks.
            joining: by place.
        """
        row = Row(*(np.full(self._shards, each, np.int32) for each in (self._own, 1, 0, 0, 1)))
        places = np.arange(self._shards) * self._own
        for place, its in joining.items():
            request, length, shard = its.request, len(its.request.prompt), place // self._own
            stops = request.stop_ids[: self._stop_ids.shape[1]]  # the host looks at all of them
            self._stop_ids[place] = (*stops, *[-1] * (self._stop_ids.shape[1] - len(stops)))
            put(self._sampling, its.sampling, place)
            put(self._settings, its.settings, place)
            places[shard] = place
            numbers = place % self._own, length, request.number, length + request.max_tokens - 1, its.depth
            put(row, Row(*numbers), shard)
        self._progress, self._carried, chosen = self._programs.join(
            Kinds(self._choosing([its.request for its in joining.values()]), self.sampler),
            model,
            hidden,
            self._progress,
            self._carried,
            row,
            jax.tree.map(lambda each: each[places], self._sampling),
            self._stop_ids[places],
        )
        return chosen

    def tick(
        self,
        model: FoldedModel,
        pool: PyTree,
        table: np.ndarray,
        requests: dict[int, Request],
        collect: float,
        choosing: Choosing | None = None,
    ) -> tuple[PyTree, Brought]:
        """A tick of the requests in these places, with their pages [B, M]; the pool.

        Args:
            model, pool: that the programs get.
            table: of the pages, by their numbers on their devices.
            requests: by place.
            collect: see `Options`.
            choosing: the program; by default the first that is fit for the requests.
        """
        alive = np.isin(np.arange(self.rows), list(requests))
        # The arrays change while the program may still read them.
        stop_ids, sampling, settings = jax.tree.map(np.copy, (self._stop_ids, self._sampling, self._settings))
        rows = Rows(table, alive, stop_ids, sampling, settings, np.int32(self.rounds), np.float32(collect))
        kinds = Kinds(choosing or self._choosing(requests.values()), self.sampler)
        pool, self._progress, self._carried, brought = self._programs.tick(
            kinds, self._limit, self.at_once, model, pool, self._progress, self._carried, rows
        )
        return pool, brought

    def warm_up(self, model: FoldedModel, pool: PyTree, hidden: Any, table: np.ndarray, collect: float) -> PyTree:
        """Compile every program by letting it do nothing; the pool."""
        for choosing in self.choosings:
            sampling = Sampling(float(choosing.draws), top_k=int(choosing.ranks))
            request = Request((0,), 1, sampling, logprobs=choosing.logprobs)
            self.join(model, hidden, {0: Joining(request, 1, sampling.numbers(), self.sampler.numbers())})
            pool, _ = self.tick(model, pool, table, {}, collect, choosing)
        return pool

    def _choosing(self, requests: Any) -> Choosing:
        """The first program that is fit for all of them."""
        draws = any(request.sampling.draws for request in requests)
        ranks = any(request.sampling.ranks for request in requests)
        likeliest = max((-1 if request.logprobs is None else request.logprobs for request in requests), default=-1)
        for choosing in self.choosings:
            offered = -1 if choosing.logprobs is None else choosing.logprobs
            if draws <= choosing.draws and ranks <= choosing.ranks and likeliest <= offered:
                return choosing
        raise ValueError("no program for these requests")  # `submit` has looked at each


def put(arrays: PyTree, values: PyTree, place: int) -> None:
    """Set one place of arrays [B]; a number for all rows stays."""
    for array, value in zip(jax.tree.leaves(arrays), jax.tree.leaves(values), strict=True):
        if array.ndim:
            array[place] = np.asarray(value)


def shared(numbers: PyTree) -> dict[str, np.ndarray]:
    """Of the numbers of diffusion forcing those that all rows have in common: each decides how the positions of all
    rows go together."""
    return {name: np.asarray(getattr(numbers, name)) for name in ("inner", "init_scale")}


def programs_of(model: FoldedModel, samplers: Sequence[Sampler]) -> list[Sampler]:
    """Samplers, one of each program that serves these, each once. Static rows go with adaptive ones where they can.

    Raises:
        UserError: one of them isn't for this model, or not for serving.
    """
    found: list[Sampler] = []
    for sampler in sorted(samplers, key=lambda its: isinstance(its, Static)):
        own = sampler.for_model(model)
        if isinstance(own, Speculative):
            raise UserError(NOT_SERVED)
        if not own.prefills:
            raise UserError(f"sampler {own.name}: prompts go through all depths first here; leave prefill at true")
        if isinstance(own, Static):
            program = next((its for its in found if takes_static(its)), OneByOne())
        elif isinstance(own, Adaptive):
            program = OneByOne(own.criterion)
        elif isinstance(own, Lossless):  # the first one takes all, see `group_of`
            program = next((its for its in found if isinstance(its, Lossless)), own)
        else:
            program = own
        if program not in found:
            found.append(program)
    return found


def _go_together(program: Sampler, sampler: Sampler) -> bool:
    """Whether two samplers of one program can have rows in one group."""
    if not isinstance(program, DiffusionForcing):
        return True
    return shared(program.numbers()) == shared(sampler.numbers())


def takes_static(program: Sampler) -> bool:
    """Whether a program is one for static rows: no criterion, or one that reads no logits and whose value falls."""
    if not isinstance(program, OneByOne):
        return False
    its = None if program.criterion is None else CRITERIA[program.criterion]
    return its is None or not (its.reads_logits or its.rises)


def group_of(
    served: Sequence[Sampler], model: FoldedModel, sampler: Sampler, depth: int | None, offered: Iterable[str]
) -> tuple[int, int, PyTree]:
    """Which of the programs takes a request: its number, L, and the sampler's settings as the program's numbers.

    Args:
        served: the programs.
        model: at the largest depth that is served.
        sampler, depth: of the request.
        offered: samplers that are served, by name and settings, for messages.

    Raises:
        UserError: none of them, or the model can't do it.
    """
    problem = sampler.refusal(model.family)
    if problem is not None:
        raise UserError(f"sampler {sampler.name}: {problem}")
    depth = model.total_depth if depth is None else model.family.check_depth(depth)
    if depth > model.total_depth:
        raise UserError(f"depth {depth}: this server goes to {model.total_depth}; start it with --depth {depth}")
    own = sampler.at(depth)
    for number, program in enumerate(served):
        if isinstance(own, Static):
            if takes_static(program):
                return number, depth, program.numbers()
        elif isinstance(own, Adaptive):
            if program == OneByOne(own.criterion):
                return number, depth, own.numbers()
        elif isinstance(own, Lossless):  # how many are in flight changes no text
            if isinstance(program, Lossless):
                return number, depth, own.numbers()
        elif type(program) is type(own) and program.program == own.program and _go_together(program, own):
            if depth != model.total_depth:
                raise UserError(f"sampler {own.name}: its depth is the server's, {model.total_depth}")
            return number, depth, own.numbers()
    if isinstance(own, Speculative):
        raise UserError(NOT_SERVED)
    has = ", ".join(offered)
    raise UserError(f"sampler {sampler.label}: this server has compiled {has}; start it with one more --offer")
