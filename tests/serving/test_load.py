"""The load benchmark: its arrivals, what it makes of times, and that it finds the pace of an engine that is known."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dreamer_jax.benchmarks.serving import (
    MODES,
    Arrival,
    Lengths,
    Replayed,
    Timeline,
    arrivals,
    bench_serving,
    bound,
    drive,
    read_lengths,
    steady,
    summary,
    uniform,
)
from dreamer_jax.benchmarks.serving_http import Remote
from dreamer_jax.cli import bench_serve
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import Adaptive, Static
from dreamer_jax.serving.contract import RowView, Token, Update, View
from tests.serving.asking import until
from tests.serving.fake import FakeEngine

SHORT = Lengths(3, 5)


def test_arrivals_are_a_poisson_process():
    """Gaps of mean 1 / rate whose standard deviation is their mean, and which know nothing of each other."""
    times = np.array([each.seconds for each in arrivals([SHORT], 20_000, 50.0, seed=1)])
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03) and gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert [each.seconds for each in arrivals([SHORT], 3, math.inf, seed=1)] == [0, 0, 0]
    two = [SHORT, Lengths(7, 1)]
    assert [each.lengths for each in arrivals(two, 3, 1.0, seed=1)] == [two[0], two[1], two[0]]


def test_lengths_are_within_their_bounds():
    found = uniform((2, 5), (8, 8), 500, seed=0)
    assert {each.prompt for each in found} == {2, 3, 4, 5} and {each.answer for each in found} == {8}


def test_a_summary_of_times_that_are_known():
    """Two requests: tokens at 1, 2 and, two together, 4 seconds; one at 2.5 that arrived at 2; and one refused."""
    lines = [
        Timeline(0.0, [(1.0, 1), (2.0, 1), (4.0, 2)], depths=24, finish="length"),
        Timeline(2.0, [(2.5, 1)], depths=6, finish="stop"),
        Timeline(3.0, finish="refused: QueueFull"),
    ]
    found = summary(lines, 4.0, None)
    assert (found["tokens"], found["tokens_per_second"], found["mean_depth"]) == (5, 1.25, 6.0)
    assert found["finished"] == {"length": 1, "refused: QueueFull": 1, "stop": 1}
    assert found["first_token_ms"]["50"] == pytest.approx(750)  # of 1 and 0.5 seconds
    assert found["between_tokens_ms"] == pytest.approx({"50": 1000, "90": 1000, "99": 1000})
    assert summary([Timeline(0.0)], 1.0, None)["first_token_ms"] is None


class OneByOne:
    """Of the contract what `drive` asks for: each request has one token, which takes 20 ms."""

    def __init__(self):
        self.waiting, self.done = queue.Queue(), 0
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, request, deliver):
        self.waiting.put(deliver)

    def work(self):
        while True:
            deliver = self.waiting.get()
            time.sleep(0.02)
            self.done += 1
            deliver(Update((Token(1, 1),), "length"))

    def view(self):
        row = RowView(1, "static", 0, (), 1, 0.0)
        counts = dict.fromkeys(("tokens", "decoded", "decoded_depths", "row_steps", "border_rows"), self.done)
        empty = View((row,), self.waiting.qsize(), 8, 4, 0, 0, 0, 0, 0, 0, 0, 0, {}, None)
        return empty._replace(**counts, decode_seconds=self.done * 0.02)


def test_an_engine_is_looked_at_while_requests_arrive():
    """Ten at once and then as many as it can do: requests wait all the time, not from the last arrival only."""
    plan = [Arrival(max(0.0, (i - 10) / 50), Lengths(1, 1)) for i in range(60)]
    _, seconds, looks = drive(OneByOne(), plan, Static(), 5, seed=0)
    assert looks[0][0] < 0.1
    found = steady(looks, {"flops": (1.0, 1.0)})
    assert found is not None and found["seconds"] > 0.6 * seconds


def test_the_bound_in_its_limits():
    assert bound(0, 1, 12, 6) == 2 and bound(5, 0, 12, 6) == 1 and bound(3, 2, 12, 12) == 1
    assert bound(4, 1, 12, 6) == pytest.approx(1.6)


def test_what_is_steady_lies_between_the_first_full_moment_and_the_last():
    """Two rows; of three looks in the middle the first and the last count: 10 tokens that took 6 depths each, in 80
    places of steps and 12 outside of the depths, which at F0 = 2 s and Fr = 0.5 s would have cost 50 s at the least."""
    row = RowView(1, "static", 3, (1,), 1, 1.0)
    nothing = View((row, None), 3, 8, 4, 0, 0, 0, 0, 0, 0, 0, 0, {}, None)

    def look(at: float, decoded: int, queue: int = 1, free: bool = False) -> tuple[float, View]:
        counts = {"tokens": decoded + 2, "decoded": decoded, "decoded_depths": 6 * decoded, "row_steps": 8 * decoded}
        counts |= {"border_rows": round(1.2 * decoded), "decode_seconds": 7.0 * decoded}
        return at, nothing._replace(rows=(row, None if free else row), queue=queue, **counts)

    looks = [look(0.5, 2), look(0.6, 4), look(0.7, 4, queue=0)]  # a shorter time before
    looks += [look(1, 5, free=True), look(2, 10), look(4, 15), look(102, 20), look(110, 30, queue=0)]
    found = steady(looks, {"flops": (3.0, 1.0), "seconds": (2.0, 0.5)})
    assert found == pytest.approx(
        {
            "seconds": 100.0,
            "tokens_per_second": 0.1,
            "decoded_per_second": 1 / 7,
            "mean_depth": 6.0,
            "steps_a_token": 8.0,
            "borders_a_token": 1.2,
            "share_of_bound": 9 / 11.6,
        }
    )
    assert steady(looks[3:5], {"flops": (3.0, 1.0)}) is None
    spent = look(3, 10)[1]._replace(decode_seconds=80.0)  # answers of one token, which comes of the prompt
    assert steady([look(2, 10), (3, spent)], {"flops": (3.0, 1.0)}) is None


def test_costs_by_the_clock_are_medians_of_a_row(monkeypatch):
    """By a clock on which what lies outside of the depths takes 6 s and a depth 3 s, the first time 100 s more."""
    from dreamer_jax.benchmarks import step_costs
    from tests.inference.test_samplers import model_of
    from tests.serving.cases import wide

    spans = [106.0, 103.0, *[6.0, 3.0] * step_costs.REPEATS]
    times = iter(np.cumsum([each for span in spans for each in (0.0, span)]).tolist())
    monkeypatch.setattr(step_costs, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    with wide():
        assert step_costs.step_costs(model_of("dreamer"), rows=4, context=8) == (1.5, 0.75)


def test_requests_wait_for_their_arrival_and_not_for_each_other():
    """Steps of 20 ms and answers of 20 tokens: the second comes while the first is written; of three more, when both
    rows are taken, one waits and two are too many."""
    engine = FakeEngine(rows=2, queue=1, pace=0.02)
    long = Lengths(3, 20)
    plan = [Arrival(0.0, long), Arrival(0.05, long), *(Arrival(0.15, long) for _ in range(3))]
    lines, seconds, _ = drive(engine, plan, Static(), 23, seed=0)
    engine.close(0)
    assert [line.finish for line in lines[:3]] == ["length"] * 3
    assert [line.finish for line in lines[3:]] == ["refused: QueueFull"] * 2
    assert all(line.brought[0][0] >= line.arrived for line in lines[:3])
    assert lines[1].brought[0][0] < lines[0].brought[-1][0] <= lines[2].brought[0][0]
    found = summary(lines, seconds, None)
    assert found["tokens"] == 60 and found["between_tokens_ms"]["50"] > 19.9 and seconds > 38 * 0.02
    assert all(max(request.prompt) < 23 for request in engine.submitted)


def test_a_model_that_halts_by_itself_has_no_full_depth():
    plan, costs = arrivals([SHORT], 4, math.inf, seed=0), {"flops": (4.0, 1.0)}
    found = bench_serving(
        lambda mode: FakeEngine(rows=4, pace=0.001), plan, Replayed((3, 9)), 23, 0, costs, lambda line: None, MODES[:2]
    )
    assert list(found["modes"]) == ["depth batching", "slowest row"]
    assert list(found["allowed"]["flops"]) == list(found["by_the_clock"]) == ["slowest row"]


def test_all_modes_get_the_same_work(capsys):
    engines: list[FakeEngine] = []

    def engine_for(mode: str) -> FakeEngine:
        engines.append(FakeEngine(rows=4, pace=0.001))
        return engines[-1]

    plan = arrivals([SHORT, Lengths(4, 7)], 12, math.inf, seed=0)
    found = bench_serving(engine_for, plan, Replayed((3, 9)), 23, 0, {"flops": (4.0, 1.0)}, lambda line: None)
    assert list(found["modes"]) == list(MODES) and found["depth"] == 12
    asked = [[(request.prompt, request.max_tokens) for request in engine.submitted] for engine in engines]
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) == 12
    samplers = [{type(request.sampler) for request in engine.submitted} for engine in engines]
    assert samplers == [{Replayed}, {Replayed}, {Static}]
    batched = found["modes"]["depth batching"]
    depths = sum((3, 9)[n % 2] for each in plan for n in range(each.lengths.answer))
    assert batched["mean_depth"] == pytest.approx(depths / 72) and batched["tokens"] == 72
    assert found["allowed"] == {"flops": {"slowest row": None, "full depth": pytest.approx(16 / (4 + depths / 72))}}
    assert found["speedup"]["whole"]["full depth"] > 0 and found["speedup"]["decoding"]["full depth"] is None
    assert 0 < batched["share_of_bound"] <= 1
    assert not any(engine._thread.is_alive() for engine in engines)
    text = bench_serve.text(found)
    assert (
        "depth batching: 12 requests in" in text and "F0 and Fr in flops: over slowest row -, full depth 1.68" in text
    )


def test_an_engine_that_fails_is_not_waited_for():
    engine = FakeEngine(dies_at=0)
    until(lambda: engine.failed)
    with pytest.raises(UserError, match="depth batching: the engine has failed"):
        bench_serving(lambda mode: engine, [], Static(), 23, 0, {}, lambda line: None)


def test_a_server_under_load(capsys):
    pytest.importorskip("starlette", reason="extra `serve`")
    pytest.importorskip("uvicorn", reason="extra `serve`")
    from tests.serving.served import make, running

    engine = FakeEngine(rows=4, queue=3, pace=0.005)
    with running(make(engine)) as url:
        words = ["bench", "serve", "--url", url, "--requests", "12", "--answer-tokens", "6", "--json"]
        assert main([*words, "--sampler", "adaptive", "--sampler.threshold", "0.5"]) == 0
        found = json.loads(capsys.readouterr().out)["modes"]["as served"]
        assert main(["bench", "serve", "--url", url, "--requests", "3", "--rate", "50"]) == 0
        assert "as served: 3 requests" in capsys.readouterr().out
    ends = found["finished"]
    assert ends["length"] + ends.get("refused: 429", 0) == 12 and found["tokens"] == 6 * ends["length"]
    assert found["mean_depth"] > 1 and found["first_token_ms"]["99"] >= found["first_token_ms"]["50"] > 0
    assert 0 < found["share_of_bound"] <= 1 and engine.submitted[0].sampler == Adaptive(threshold=0.5)
    assert main(["bench", "serve", "--url", url]) == 2 and "nobody answers" in capsys.readouterr().err


@contextlib.contextmanager
def answering(*bodies: bytes, posts: int = 200) -> Iterator[str]:
    """The address of a server that answers everybody with the next body, at the end always the last one; with 200, or
    what is said of those who post."""
    left = list(bodies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(posts if self.command == "POST" else 200)
            self.end_headers()
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<html>", b'{"data": []}', b'{"data": 5}', b"[]", b"\xff", b'{"data": [{}]}'])
def test_a_server_of_another_kind(body, capsys):
    with answering(body) as url:
        assert main(["bench", "serve", "--url", url]) == 2
    said = capsys.readouterr().err
    assert "/v1/models names no model; is it a server of OpenAI's API?" in said and said.count("\n") == 1


MODELS = b'{"data": [{"id": "m"}]}'
CHUNK = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
HALF = b'data: {"choices": [{"text": "", "finish_reason": null}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}\n\n'


@pytest.mark.parametrize(
    "stream, finish, tokens",
    [
        (b": ping\n\nevent: chunk\n" + CHUNK + b": ping\n\ndata: [DONE]\n\n", "length", 1),
        (CHUNK.replace(b"data: ", b"data:") + b"data:[DONE]\n\n", "length", 1),
        (CHUNK + b'data: {"error": {"message": "no"}}\n\n', "failed", 1),
        (HALF + CHUNK + USAGE + b"data: [DONE]\n\n", "length", 2),
        (HALF + CHUNK + b"data: [DONE]\n\n", "length", 1),
        (CHUNK + b'data: {"choices": [], "usage": 5}\n\n', "failed", 1),
        (b"data: <html>\n\n", "failed", 0),
        (b"<html>", "failed", 0),
    ],
)
def test_streams_of_other_servers(stream, finish, tokens):
    with answering(MODELS, stream) as url:
        line = Timeline(0.0)
        Remote(url).ask({}, line, 0.0)
    assert (line.finish, line.tokens) == (finish, tokens)


@pytest.mark.parametrize(
    "body, status, reason",
    [
        (b'{"error": {"message": "unknown\\nfield"}}', 422, "(422: unknown field)"),
        (b"<html>\n", 404, "(404: <html>)"),
        (b"<html>", 200, "(its streams are not those of OpenAI's API, or it gave up)"),
    ],
)
def test_a_server_that_answers_nothing(body, status, reason, capsys):
    """Nothing was measured then."""
    with answering(MODELS, body, posts=status) as url:
        assert main(["bench", "serve", "--url", url, "--requests", "3", "--rate", "inf"]) == 2
    assert f"error: --url {url}: none of 3 requests was answered {reason}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name a RUN, or a server with --url URL"),
        (["runs/x", "--url", "http://h"], "name a RUN, or"),
        (["--url", "http://127.0.0.1:8000", "--rows", "4"], "--rows goes with RUN"),
        (["--url", "localhost:8000"], "must be such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:99999"], "must be such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:8000/other/v1"], "must be such as http://127.0.0.1:8000"),
        (["--url", "http://[::1"], "must be such as http://127.0.0.1:8000"),
        (["runs/x", "--rate", "0"], "'0' is not a number of requests a second"),
        (["runs/x", "--rate", "1e-300"], "'1e-300' is not a number of requests a second, 0.001 or more"),
        (["runs/x", "--prompt-tokens", "3:20"], "'3:20' is neither a number of 1 or more nor two as in 16-64"),
        (["runs/x", "--prompt-tokens", "3-"], "'3-' is neither a number of 1 or more nor two"),
        (["runs/x", "--answer-tokens", "9-3"], "the first must not be more than the second"),
        (["runs/x", "--lengths", "nowhere.jsonl"], "nowhere.jsonl: can't be read"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 3, "answer_tokens": 2, "depths": [4, 5]}\n\n{"prompt_tokens": 1, "answer_tokens": 9}\n'
    )
    assert read_lengths(path) == ([Lengths(3, 2), Lengths(1, 9)], (4, 5))
    for line in ("[]", '{"prompt_tokens": 3}', '{"prompt_tokens": 0, "answer_tokens": 2}', "{"):
        path.write_text('{"prompt_tokens": 3, "answer_tokens": 2}\n' + line)
        with pytest.raises(UserError, match="line 2: a line is JSON with prompt_tokens"):
            read_lengths(path)


@pytest.mark.slow
def test_replayed_depths_on_the_engine_itself():
    """Recorded depths of 1 and 3 in turn: the first token comes of the prompt, through all depths, the next ones take
    those of their positions. The weights are fixed to a device, as those of a checkpoint are: nothing is compiled once
    the engine is ready all the same."""
    from dreamer_jax.serving.engine import ServedEngine
    from tests.inference.test_samplers import model_of
    from tests.serving.cases import OPTIONS, wide

    plan, sampler = [Arrival(0.0, Lengths(4, 8)) for _ in range(4)], Replayed((1, 3))
    with wide():
        engine = ServedEngine(jax.device_put(model_of("dreamer"), jax.devices()[0]), [sampler], OPTIONS)
        until(lambda: engine.ready, 300)
        programs = engine._programs
        jitted: list[Any] = [programs.chunk, programs.join, programs.tick]
        before = [its._cache_size() for its in jitted]
        lines, *_ = drive(engine, plan, sampler, 23, seed=0)
        engine.close(0)
    assert [its._cache_size() for its in jitted] == before
    assert [line.finish for line in lines] == ["length"] * 4
    wanted = engine.view().depth + sum((1, 3)[position % 2] for position in range(4, 11))
    assert [line.depths for line in lines] == [wanted] * 4


def test_a_run_in_three_modes(monkeypatch, tmp_path, capsys):
    """The command: recorded depths where the lengths have them, the sampler of its options otherwise."""
    from tests.inference.test_samplers import model_of

    engines: list[FakeEngine] = []

    def engine_for(mode: str, model: Any, sampler: Any, rows: int, context: int, queue: int) -> FakeEngine:
        assert (rows, context, queue) == (4, 5 if len(engines) > 2 else 9, 6)
        engines.append(FakeEngine(rows=rows, queue=queue))
        return engines[-1]

    config = SimpleNamespace(model=SimpleNamespace(vocab_size=23))
    folded = model_of("dreamer")
    loaded = SimpleNamespace(family=folded.family, config=config, folded=lambda: folded)
    monkeypatch.setattr("dreamer_jax.model.load", lambda run: loaded)
    monkeypatch.setattr(bench_serve, "engine_for", engine_for)
    monkeypatch.setattr("dreamer_jax.benchmarks.step_costs.step_costs", lambda model, rows, context: (2.0, 1.0))
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 4, "answer_tokens": 5, "depths": [3, 9]}\n')
    words = ["bench", "serve", "runs/x", "--requests", "6", "--rows", "4", "--json"]
    assert main([*words, "--lengths", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["modes"]) == list(MODES) and found["modes"]["depth batching"]["mean_depth"] == pytest.approx(5.4)
    assert engines[0].submitted[0].sampler == Replayed((3, 9))
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--lengths", str(path)]) == 2
    assert "recorded depths are replayed with RUN only" in capsys.readouterr().err
    words += ["--prompt-tokens", "3", "--answer-tokens", "2", "--sampler", "adaptive"]
    assert main(words) == 0
    assert engines[3].submitted[0].sampler == Adaptive() and engines[5].submitted[0].sampler == Static()
    assert json.loads(capsys.readouterr().out)["speedup"]["whole"]["slowest row"] > 0
    costs = "dreamer_jax.benchmarks.step_costs.step_costs"
    monkeypatch.setattr(costs, lambda *_: pytest.fail("measured before it is refused"))
    assert main([*words[:-1], "speculative"]) == 2
    assert "it isn't served" in capsys.readouterr().err
