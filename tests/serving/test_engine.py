"""A served engine gives every request what it would get alone, whatever comes and goes beside it."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dreamer_jax.errors import UserError
from dreamer_jax.inference import Adaptive, DiffusionForcing, Lossless, Sampling, Speculative, Static
from dreamer_jax.inference.samplers.contract import Choosing
from dreamer_jax.serving import engine as served_engine
from dreamer_jax.serving.answers import Turn
from dreamer_jax.serving.contract import Closed, QueueFull, Request, TooLong
from dreamer_jax.serving.engine import ServedEngine
from dreamer_jax.serving.groups import Group
from dreamer_jax.serving.scheduler import Job
from tests.inference.test_samplers import model_of
from tests.serving.cases import (
    FORCING,
    OPTIONS,
    Taken,
    agree,
    alone,
    begun_anew,
    check,
    drawn_request,
    logarithms,
    serve,
    served,
    until,
    wide,
)

FEW_PAGES = dataclasses.replace(OPTIONS, pages=18)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with wide():
        yield


@pytest.fixture(scope="module")
def one_choosing():
    """Compile only the program that chooses tokens in every way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(True, True, likeliest),))
        yield


@pytest.fixture(scope="module")
def dreamer(one_choosing):
    """An engine with fewer pages than its rows could use."""
    engine = served("dreamer", FEW_PAGES)
    yield engine
    engine.close(0)
    assert not [thread for thread in threading.enumerate() if thread.name == "served-engine" and thread.is_alive()]


def test_requests_get_what_they_get_alone(dreamer, monkeypatch):
    """Twenty of them, with joins, leaves, cancellation, prefixes that are shared, and pages that are short."""
    again, rng = begun_anew(dreamer, monkeypatch), np.random.default_rng(0)
    taken = check("dreamer", dreamer, [drawn_request(rng, "dreamer", few=True) for _ in range(20)], rng)
    assert again, "pages were never short"
    assert dreamer.view().shared_tokens
    assert {its.finish for its in taken} == {"length", "stop", "cancelled"}


def test_nothing_is_compiled_once_it_is_ready(dreamer):
    """Whatever is asked for; that something would be noticed is shown by a program of another size."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = np.random.default_rng(3)
        serve(dreamer, [drawn_request(rng, "dreamer") for _ in range(12)], rng)
        assert not compiled
        jax.jit(lambda x: x * 3)(np.zeros(5))
        assert compiled
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.slow  # its three programs take 15 s
def test_rows_of_diffusion_forcing_have_settings_of_their_own(one_choosing):
    """Threshold, momentum and noise by row, in one program; Huginn."""
    noisy = dataclasses.replace(FORCING, noise=0.5)
    engine, rng = served("huginn", FEW_PAGES, [noisy]), np.random.default_rng(0)
    requests = []
    for _ in range(8):
        request = drawn_request(rng, "huginn")
        sampler = dataclasses.replace(
            noisy,
            threshold=float(rng.choice([0.05, 0.3, 1.0])),
            momentum=float(rng.choice([0.0, 0.5])),
            noise=float(rng.choice([0.1, 0.9])),
        )
        sampling = Sampling(0.8, top_k=9, seed=int(rng.integers(9)))
        requests.append(dataclasses.replace(request, sampler=sampler, sampling=sampling, depth=None))
    taken = check("huginn", engine, requests, rng)
    assert len({depth for its in taken for depth in its.depths}) > 1
    with pytest.raises(UserError, match=r"this server has compiled .*; start it with one more --offer"):
        engine.submit(Request((1,), 2, sampler=dataclasses.replace(noisy, inner_recurrences=2)), Taken())
    engine.close(0)


@pytest.mark.slow  # a program for diffusion forcing, served and alone
def test_rows_whose_positions_enter_by_several_have_pages_for_all(monkeypatch):
    """Diffusion forcing with a headway, and a threshold by which positions leave as soon as their tokens stay: in two
    ticks a row comes further than it makes rounds; Huginn."""
    monkeypatch.setattr(served_engine, "choosings", lambda likeliest: (Choosing(),))
    sampler = DiffusionForcing(1, wavefront=12, headway=6, threshold=1e6)
    options = dataclasses.replace(OPTIONS, context=64, logprobs=0)
    engine, rng = served("huginn", options, [sampler]), np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 23, rng.integers(1, 9)).tolist()) for _ in range(3)]
    requests = [Request(prompt, 50, sampler=sampler) for prompt in prompts]
    taken = [Taken() for _ in requests]
    engine.submit_all(list(zip(requests, taken, strict=True)))
    for request, its in zip(requests, taken, strict=True):
        its.wait()
        assert (its.tokens, its.depths, its.finish) == alone("huginn", request)
    engine.close(0)


@pytest.mark.slow  # two hundred requests, each of which is computed alone too, and programs of three families
@pytest.mark.parametrize("family", ["dreamer", "huginn", "ouro"])
def test_many_requests_get_what_they_get_alone(family, monkeypatch):
    """With every program that chooses tokens: twenty times ten, each time beside what has stayed of those before."""
    samplers = [Static(), Adaptive(), Lossless(1), *([FORCING] if family == "huginn" else [])]
    engine = served(family, FEW_PAGES, samplers)
    again = begun_anew(engine, monkeypatch)

    @settings(max_examples=20, deadline=None, database=None, phases=(Phase.generate,))
    @given(st.integers(0, 2**32 - 1))
    def examples(seed):
        rng = np.random.default_rng(seed)
        check(family, engine, [drawn_request(rng, family) for _ in range(10)], rng)

    examples()
    print(f"{len(again)} began anew, {engine.view().shared_tokens} tokens of prompts were shared")
    assert len(again) > 10 and engine.view().shared_tokens > 50
    engine.close(0)


def test_logarithms_are_those_of_the_models_probabilities(dreamer):
    """Before temperature and filters: log_softmax of what a pass over the whole text gives."""
    request = Request((3, 1, 4, 1, 5), 6, Sampling(1.5, top_k=5, seed=7), Lossless(1), logprobs=2)
    taken = Taken()
    dreamer.submit(request, taken)
    taken.wait()
    wanted = logarithms("dreamer", (*request.prompt, *taken.tokens))[len(request.prompt) - 1 : -1]
    agree([(token, *its) for token, its in zip(taken.tokens, taken.logprobs, strict=True)], wanted, 2)


def test_a_prompt_comes_with_its_logarithms(dreamer):
    """All of them, over several chunks, at the request's depth, also where the first chunks' keys are there already."""
    prompt = (7, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4)
    dreamer.submit(Request(prompt, 1, depth=2), before := Taken())
    before.wait()
    shared = dreamer.view().shared_tokens
    for most in (0, 3):
        dreamer.submit(Request(prompt, most, depth=2, logprobs=2, echo=True), taken := Taken())
        assert taken.wait().finish == "length" and len(taken.tokens) == most
        assert [token.id for token in taken.prompt] == list(prompt)
        assert [token.depth for token in taken.prompt] == [0] + [2] * 10
        assert taken.prompt[0][2:] == (None, ())
        found = [(token.id, token.logprob, token.likeliest) for token in taken.prompt[1:]]
        agree(found, logarithms("dreamer", prompt, 2)[:-1], 2)
    assert dreamer.view().shared_tokens == shared
    dreamer.submit(Request(prompt, 1, depth=2, echo=True), plain := Taken())
    assert [token[:3] for token in plain.wait().prompt] == [
        (each, 2 if n else 0, None) for n, each in enumerate(prompt)
    ]
    assert dreamer.view().shared_tokens == shared + 8 and plain.tokens == before.tokens


def test_the_token_that_ends_a_scored_text_comes_too(dreamer):
    """Those who add up the logarithms of a prompt take away the last one, that of the answer's only token."""
    request = Request((2, 7), 14, Sampling(1.3, top_k=20, seed=5))
    text = alone("dreamer", request)[0]
    stopped = dataclasses.replace(request, stop_ids=(text[3],))
    count = text.index(text[3])
    for changes, more in (({}, 0), ({"logprobs": 0}, 0), ({"echo": True}, 0), ({"echo": True, "logprobs": 0}, 1)):
        dreamer.submit(dataclasses.replace(stopped, **changes), taken := Taken())
        assert (taken.wait().tokens, taken.finish) == (text[: count + more], "stop")


@pytest.mark.slow
def test_prompts_that_begin_anew_come_once_with_all_logarithms(dreamer, monkeypatch):
    """Ten at once, for which there are too few pages."""
    again, rng, taken = begun_anew(dreamer, monkeypatch), np.random.default_rng(1), [Taken() for _ in range(10)]
    prompts = [tuple(rng.integers(0, 23, rng.integers(2, 14)).tolist()) for _ in taken]
    for prompt, its in zip(prompts, taken, strict=True):
        dreamer.submit(Request(prompt, 18, logprobs=1, echo=True), its)
    for prompt, its in zip(prompts, taken, strict=True):
        assert [token.id for token in its.wait().prompt] == list(prompt)
        found = [(token.id, token.logprob, token.likeliest) for token in its.prompt[1:]]
        agree(found, logarithms("dreamer", prompt)[:-1], 1)
    assert again, "pages were never short"


def test_what_cannot_be_served_is_refused_at_once(dreamer):
    def refused(error, message, **changes):
        with pytest.raises(error, match=message):
            dreamer.submit(dataclasses.replace(Request((1,), 4), **changes), Taken())

    refused(TooLong, "1 tokens of prompt and 32 to be written don't fit the context of 32 tokens", max_tokens=32)
    refused(UserError, "prompt is empty", prompt=())
    refused(UserError, "vocabulary of 23", prompt=(23,))
    refused(UserError, "max_tokens 0: must be 1", max_tokens=0)
    refused(UserError, "max_tokens -1: must be 0", max_tokens=-1, echo=True)
    refused(UserError, "this server goes to 3", depth=4)
    refused(UserError, "logprobs 4: must be from 0 to 3", logprobs=4)
    refused(UserError, "number and stop_ids: must be from 0", number=2**31)
    refused(UserError, "number and stop_ids: must be from 0", stop_ids=(3, -1))
    names = "static, adaptive, lossless"  # those that can be asked for, not those of programs
    refused(UserError, "sampler speculative: .* take lossless", sampler=Speculative())
    refused(
        UserError, f"sampler adaptive-criterion-kl: this server has compiled {names}; start", sampler=Adaptive("kl")
    )
    with pytest.raises(UserError, match="speculative"):
        ServedEngine(model_of("dreamer"), [Speculative()], OPTIONS)


def test_numbers_that_cannot_be_are_an_error_of_their_request_alone(dreamer):
    """Whatever a sampling lets through: the engine's thread gets numbers that are ready."""
    sampling = Sampling(1.0)
    object.__setattr__(sampling, "top_k", 10**400)
    with pytest.raises(OverflowError):
        dreamer.submit(Request((1,), 4, sampling), Taken())
    taken = Taken()
    dreamer.submit(Request((1,), 4), taken)
    assert taken.wait().finish == "length" and dreamer.ready


def test_more_stop_tokens_than_the_device_looks_at_end_a_text_too(dreamer):
    """Of three, two are looked for on the device, and the host looks for all."""
    request = Request((2, 7), 14, Sampling(1.3, top_k=20, seed=5))
    text = alone("dreamer", request)[0]
    stops = [token for token in dict.fromkeys(text) if token not in text[:4]][:1]
    others = [token for token in range(23) if token not in text][:2]
    assert stops and len(others) == 2 == dreamer.options.stop_ids
    taken = Taken()
    dreamer.submit(dataclasses.replace(request, stop_ids=(*others, *stops)), taken)
    assert (taken.wait().tokens, taken.finish) == (text[: text.index(stops[0])], "stop")


def test_a_full_queue_takes_no_more(dreamer, monkeypatch):
    """Requests that wait count, those that are computed don't; those that belong together are taken as one."""
    monkeypatch.setattr(dreamer, "options", dataclasses.replace(dreamer.options, queue=2))
    hold, taken = threading.Event(), [Taken(lambda its: hold.wait(60)), *(Taken() for _ in range(5))]
    dreamer.submit(Request((1,), 20), taken[0])
    until(lambda: taken[0].updates)  # from here on the engine's thread waits
    together = [(Request((1,), 1), its) for its in taken[2:]]
    with pytest.raises(TooLong):
        dreamer.submit_all([*together, (Request((1,), 32), Taken())])
    dreamer.submit(Request((1,), 1), taken[1])
    numbers = dreamer.submit_all(together)
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    with pytest.raises(QueueFull, match="5 requests wait"):
        dreamer.submit(Request((1,), 1), Taken())
    hold.set()
    assert [its.wait().finish for its in taken] == ["length"] * 6
    assert dreamer._queued == 0


def test_one_who_fails_to_take_an_answer_loses_it_alone(dreamer):
    def fails(its: Taken) -> None:
        raise RuntimeError("a client that is gone")

    broken, other = Taken(fails), Taken()
    dreamer.submit(Request((1, 2), 10), broken)
    dreamer.submit(Request((1, 2), 10), other)
    assert other.wait().tokens == alone("dreamer", Request((1, 2), 10))[0]
    until(lambda: not any(dreamer.view().rows))
    assert len(broken.tokens) < 10


def test_a_row_that_is_gone_takes_no_more_steps(dreamer):
    """After a cancellation the places of the steps are taken by those who are left, and by nobody else."""
    first, gone = Taken(), Taken(lambda its: its.finish or dreamer.cancel(dreamer._numbers))
    for most, its in ((12, first), (31, gone)):
        dreamer.submit(Request((4,), most), its)
    assert gone.wait().finish == "cancelled" and len(gone.tokens) < 31  # it had the second place
    first.wait()
    counted, ended = dreamer.view().finished, Taken(lambda its: its.finish or dreamer.cancel(dreamer._numbers, "stop"))
    dreamer.submit(Request((4,), 31), ended)
    assert ended.wait().finish == "stop"
    until(lambda: dreamer.view().finished["stop"] == counted["stop"] + 1)
    until(lambda: not any(dreamer.view().rows))
    before, taken = dreamer.view(), Taken()
    dreamer.submit(Request((5, 6), 12), taken)
    assert len(taken.wait().tokens) == 12  # the first comes of the prompt
    until(lambda: not any(dreamer.view().rows))
    assert dreamer.view().busy_row_steps - before.busy_row_steps == 11 * dreamer.model.total_depth


def test_what_was_computed_before_a_request_began_anew_is_not_its():
    """A turn knows how often a request had begun when it was handed to the device."""
    job = Job(1, (1,), 4, 3, 0, row=0, begun=2)
    assert Turn.still(job, 2) and not Turn.still(job, 1)
    job.row = None
    assert not Turn.still(job, 2)


def test_the_view_shows_rows_and_their_flight(dreamer):
    """A wavefront has several positions on their way, the oldest deepest."""
    views = []
    taken = Taken(lambda its: views.append(dreamer.view()))
    number = dreamer.submit(Request((1, 2, 3), 16, sampler=Lossless(1)), taken)
    taken.wait()
    rows = [row for view in views for row in view.rows if row is not None]
    assert {row.request for row in rows} == {number} and {row.sampler for row in rows} == {"lossless"}
    assert any(len(row.depths) > 1 for row in rows)
    assert all(list(row.depths) == sorted(row.depths, reverse=True) for row in rows)
    assert [row.tokens for row in rows] == sorted(row.tokens for row in rows)
    view = dreamer.view()
    assert view.busy_row_steps <= view.row_steps and view.share_of_bound is not None and 0 < view.share_of_bound < 1


def test_a_fault_ends_everything_in_words(one_choosing, monkeypatch):
    """Who waits gets "failed", who comes later `Closed`, and no thread is left."""
    engine = served("dreamer", FEW_PAGES)
    taken, submitted = [Taken() for _ in range(8)], threading.Event()

    def broken(*args):
        submitted.wait(60)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._programs, "tick", broken)
    for its in taken:
        engine.submit(Request((1,), 4), its)
    submitted.set()
    assert {its.wait().finish for its in taken} == {"failed"}
    engine._thread.join(30)
    assert not engine._thread.is_alive() and not engine.ready and engine.failed
    with pytest.raises(Closed, match="failed"):
        engine.submit(Request((1,), 4), Taken())


def test_a_fault_while_programs_are_compiled_is_told():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_engine.Group, "warm_up", None)
        engine = ServedEngine(model_of("dreamer"), [Static()], OPTIONS)
        engine._thread.join(60)
    assert engine.failed and not engine.ready


def test_close_waits_no_longer_for_what_is_compiled(one_choosing, monkeypatch):
    """Nothing says then that all of it was."""
    begun, released, said = threading.Event(), threading.Event(), []

    def compiles(group, model, pool, *others):
        begun.set()
        assert released.wait(60)
        return pool

    monkeypatch.setattr(Group, "warm_up", compiles)
    engine = ServedEngine(model_of("dreamer"), None, OPTIONS, said.append)
    assert begun.wait(60)
    engine.close(0.1)
    assert not engine.ended and not engine.ready
    released.set()
    engine._thread.join(60)
    assert engine.ended and not any(line.startswith("ready") for line in said)


def test_close_finishes_what_it_can_in_time(one_choosing):
    """With grace everything is finished, without it cancelled; afterwards nothing is taken."""
    for grace, finish in ((60, "length"), (0, "cancelled")):
        engine = served("dreamer", FEW_PAGES)
        taken = [Taken() for _ in range(6)]
        for its in taken:
            engine.submit(Request((1,), 30), its)
        engine.close(grace)
        assert not engine._thread.is_alive()
        assert {its.wait().finish for its in taken} == {finish}
        with pytest.raises(Closed, match="closed"):
            engine.submit(Request((1,), 4), Taken())
