"""The server as its clients see it: the client from PyPI, raw sockets of those that misbehave, a fake engine."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="extra `serve`")
pytest.importorskip("uvicorn", reason="extra `serve`")
openai: Any = pytest.importorskip("openai", reason="the client that people have")

from dreamer_jax.serving import process  # noqa: E402
from dreamer_jax.serving.keys import Keys  # noqa: E402
from dreamer_jax.serving.streaming import event  # noqa: E402
from tests.serving.asking import client, get, post, said, until  # noqa: E402
from tests.serving.fake import TOKENIZER, FakeEngine  # noqa: E402
from tests.serving.served import NAME, make, running  # noqa: E402

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def plain():
    """(address, engine) of a server that is never hurt."""
    engine = FakeEngine()
    with running(make(engine)) as url:
        yield url, engine


@pytest.fixture
def ask(plain):
    """Completions of that server."""
    return lambda **fields: client(plain[0]).completions.create(**{"model": NAME, "prompt": "x", **fields})


def test_a_completion_and_its_depths(ask):
    answer = ask(prompt=["hello", "world"], n=2, max_tokens=7)
    assert [choice.text for choice in answer.choices] == [said(p, n, 7) for p in ("hello", "world") for n in (0, 1)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 28, 40)
    tokens = [token for choice in answer.choices for token in choice.tokens]
    assert usage.mean_depth == pytest.approx(sum(token["depth"] for token in tokens) / 28, abs=1e-3)
    ids = repeats_its_prompt_ids("hello", 7)
    assert [token["depth"] for token in answer.choices[0].tokens] == [1 + (i + n) % 12 for n, i in enumerate(ids)]


def repeats_its_prompt_ids(prompt: str, count: int) -> list[int]:
    return list(said(prompt, 0, count).encode())


def test_tokens_as_a_prompt_and_the_settings_of_a_request(plain, ask):
    more = {"top_k": 5, "min_p": 0.1, "depth": 3, "exit": {"criterion": "kl"}, "min_depth": 2}
    assert ask(prompt=[256, 104, 105], seed=7, temperature=0.5, extra_body=more).choices[0].text == said("hi")
    request = plain[1].submitted[-1]
    assert request.prompt == (256, 104, 105) and request.stop_ids == (TOKENIZER.eos,)
    assert (request.depth, request.sampler.min_depth, request.sampler.criterion) == (3, 2, "kl")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 5, 0.1, 7)


def test_a_stream_is_the_same_text_in_parts(ask):
    whole = ask(prompt="héllo 世界", max_tokens=30, n=2, stop=["zzz"])
    parts: dict[int, str] = {0: "", 1: ""}
    ends, tokens = {}, 0
    chunks = list(ask(prompt="héllo 世界", max_tokens=30, n=2, stop=["zzz"], stream=True,
                      stream_options={"include_usage": True}))  # fmt: skip
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert choice.index not in ends and chunk.usage is None and "\ufffd" not in choice.text[:-1]
        assert "".join(token["text"] for token in choice.tokens) == choice.text
        parts[choice.index] += choice.text
        tokens += len(choice.tokens)
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert [parts[0], parts[1]] == [choice.text for choice in whole.choices]
    assert ends == {0: "length", 1: "length"} and len(chunks) > 10
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and tokens == 60


def test_an_event_is_one_line_however_lines_are_told():
    """Some clients split what they read where Unicode ends lines."""
    content = {"text": "a\u2028b\x85c\u2029d\r\n\x0b\x0c\x1c\x1d\x1e é世"}
    line, rest = event(content).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == content and not rest and "é世" in line


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_frees_the_row(plain, ask, stream):
    engine = plain[1]
    before = len(engine.cancelled)
    answer = ask(prompt="abc-", max_tokens=400, stop=["c-a", "never"], stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "aab"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert sum(len(chunk.choices[0].tokens) for chunk in chunks) == 3
    if not stream:
        assert answer.usage.completion_tokens == 6  # those of the stop string were computed, too
    until(lambda: len(engine.cancelled) > before and not any(engine.view().rows))
    assert engine.ended_as[engine.cancelled[-1]] == "stop"  # as which it is counted: nobody has left


def test_the_end_of_text(plain):
    engine = FakeEngine(says=lambda request: [104, 105, TOKENIZER.eos, 33])
    with running(make(engine)) as url:
        answer = client(url).completions.create(model=NAME, prompt="x", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")


def test_logprobs_of_completions(ask):
    found = ask(prompt="né", max_tokens=4, logprobs=3).choices[0].logprobs
    assert found.tokens == ["a", "n", "token_id:195", "token_id:169"] and found.token_logprobs == [-0.5] * 4
    assert found.text_offset == [0, 1, 2, 2]
    assert found.top_logprobs[0] == {"A": -0.25, "token_id:195": -2.0, f"token_id:{TOKENIZER.eos}": -3.5}


def test_an_echo_has_the_prompt_before_the_answer(ask):
    """With its logarithms, of which the first token has none; begin-of-text is a token without text."""
    answer = ask(prompt="né", max_tokens=2, logprobs=1, echo=True)
    choice, bos = answer.choices[0], f"token_id:{TOKENIZER.bos}"
    assert choice.text == "néan" and "".join(token["text"] for token in choice.tokens) == choice.text
    assert [token["depth"] for token in choice.tokens][:4] == [0, 4, 4, 4]
    assert choice.logprobs.tokens == [bos, "n", "token_id:195", "token_id:169", "a", "n"]
    assert choice.logprobs.token_logprobs == [None, -0.75, -0.75, -0.75, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, *[{"A": -0.25}] * 5]
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 2)
    scored = ask(prompt=[104, 105], max_tokens=0, logprobs=0, echo=True)
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == ("hi", "length", 0)
    assert choice.logprobs.token_logprobs == [None, -0.75]
    assert ask(prompt="ab", max_tokens=5, stop=["b"], echo=True).choices[0].text == "abaa"  # stops are of the answer


def test_a_stream_begins_with_the_echo(ask):
    whole = ask(prompt="né", max_tokens=9, logprobs=1, echo=True).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(prompt="né", max_tokens=9, logprobs=1, echo=True, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text and len(chunks) > 3
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for chunk in chunks for each in getattr(chunk.logprobs, name)] == getattr(whole.logprobs, name)


def test_the_end_of_text_is_the_last_token_of_a_scored_prompt():
    """So whoever takes the last logarithm away, that of the answer, takes none of the prompt's."""
    engine = FakeEngine(says=lambda request: [TOKENIZER.eos])
    with running(make(engine)) as url:
        answer = client(url).completions.create(model=NAME, prompt=[104, 105], max_tokens=1, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("hi", "stop", 1)
    assert choice.logprobs.tokens == ["h", "i", f"token_id:{TOKENIZER.eos}"]
    assert choice.logprobs.token_logprobs == [None, -0.75, -0.5]


@pytest.mark.parametrize("ends", [False, True])
def test_the_harness_reads_the_logarithms_of_continuations(ends):
    """Of two prompts at once, as it asks and reads; also where the first token of the answer is the end of text."""
    harness = pytest.importorskip("lm_eval.models.openai_completions", reason="extra `eval`").LocalCompletionsAPI
    engine = FakeEngine(says=lambda request: [TOKENIZER.eos if ends else 97])
    texts, contexts = [[256, 104, 105, 33, 33], [256, 104, 33]], [2, 2]
    body = {"prompt": texts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    with running(make(engine)) as url:
        status, answer, _ = post(url, json.dumps(body).encode())
    assert status == 200
    assert harness.parse_logprobs(answer, texts, contexts) == [(3 * -0.75, False), (-0.75, False)]


def test_logprobs_of_chat(plain):
    answer = client(plain[0]).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "n"}], max_tokens=2, logprobs=True, top_logprobs=2
    )
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97]) and second.token == "n"
    assert [(each.token, each.bytes) for each in first.top_logprobs] == [("A", [65]), ("token_id:195", None)]


def test_a_conversation(plain):
    messages = [{"role": "user", "content": "hi"}]
    answer = client(plain[0]).chat.completions.create(model=NAME, messages=messages, max_tokens=4)
    assert answer.choices[0].message.content == "ahi\n" and answer.choices[0].message.role == "assistant"
    chunks = list(client(plain[0]).chat.completions.create(model=NAME, messages=messages, max_tokens=4, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ahi\n"
    client(plain[0]).chat.completions.create(model=NAME, messages=messages)  # as many tokens as fit
    request = plain[1].submitted[-1]
    assert request.prompt == (256, *b"hi\n") and request.max_tokens == 512 - 4


def test_models(plain):
    (model,) = client(plain[0]).models.list().data
    assert model.samplers == ["static", "adaptive", "lossless"]
    assert (model.id, model.context, model.depth) == (NAME, 512, 12)
    assert client(plain[0]).models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="this server has 'fake'"):
        client(plain[0]).models.retrieve("org/other")


def test_what_is_refused_has_a_status_and_one_line(plain, ask):
    url, _ = plain
    for fields, kind, message in [
        ({"prompt": 5}, openai.BadRequestError, "prompt must be"),
        ({"model": "gpt"}, openai.NotFoundError, "there is no such model"),
        (
            {"max_tokens": 600},
            openai.APIStatusError,
            "2 tokens of prompt and 600 to be written don't fit the context of 512 tokens; shorten the prompt",
        ),
        ({"extra_body": {"depth": 65}}, openai.BadRequestError, "trained for 64 at most"),
    ]:
        with pytest.raises(kind) as error:
            ask(**fields)
        assert message in str(error.value)
    assert post(url, b"{")[0] == 400
    assert post(url, b'{"prompt": "a", "max_tokens": 600}')[0] == 413
    status, body, headers = post(url, b"{}", "/v1/completion")
    assert status == 404 and body["error"]["code"] == "not_found"
    status, body, headers = post(url, b"{}", "/v1/models")
    assert status == 405 and headers["allow"].startswith("GET") and "takes GET" in body["error"]["message"]
    assert get(f"{url}/v1/completions")[0] == 405
    assert post(url, b"{}", Content_Type="text/plain")[0] == 415
    status, body, _ = post(url, b"{}", Host="evil.example:80")
    assert status == 403 and body["error"]["type"] == "invalid_request_error"
    half = b'"\\ud800"'  # of a surrogate pair: as a name it is in the message
    named = (b"%s: 1", b'"sampler": %s', b'"exit": {%s: 1}', b'"stream": true, "stream_options": {%s: 1}')
    wrong = [b'{"prompt": "x", ' + each % half + b"}" for each in named]
    for answer in (post(url, each) for each in (b"[1]", b'{"prompt": "x", "hint": 1}', *wrong)):
        assert answer[0] == 400 and "\n" not in answer[1]["error"]["message"]


def test_keys():
    with running(make(FakeEngine(), Keys([KEY]))) as url:
        assert client(url, KEY).completions.create(model=NAME, prompt="a").choices
        for path in ("completions", "models", "engine"):
            assert get(f"{url}/v1/{path}", Authorization="Bearer wrong")[0] == 401
        with pytest.raises(openai.AuthenticationError, match="a key is needed"):
            client(url, "wrong").models.list()
        assert get(f"{url}/metrics")[0] == 401 and get(f"{url}/health")[0] == 200
        assert get(f"{url}/")[0] == 200  # the page asks for the key


def test_a_full_queue_and_an_engine_that_is_not_ready(plain):
    engine = FakeEngine(rows=1, queue=2, pace=0.05)
    with running(make(engine)) as url:
        streams = [client(url).completions.create(model=NAME, prompt="a", max_tokens=200, stream=True) for _ in "abc"]
        until(lambda: engine.view().queue == 2)
        status, body, headers = post(url, b'{"prompt": "b"}')
        assert status == 429 and headers["retry-after"] == "1" and body["error"]["type"] == "rate_limit_error"
        for stream in streams:
            stream.close()
        until(lambda: len(engine.cancelled) >= 3 and engine.view().queue == 0)
        # However many answers it is, one request is taken where another one may wait.
        status, body, _ = post(url, b'{"prompt": ["b", "c"], "n": 8, "max_tokens": 1}')
        assert status == 200 and len(body["choices"]) == 16
        # Of several answers all are taken or none: the last prompt is too long.
        before = len(engine.submitted)
        status, body, _ = post(url, json.dumps({"prompt": ["b", "c" * 600]}).encode())
        assert status == 413 and len(engine.submitted) == before
        assert body["error"]["message"].startswith(
            "601 tokens of prompt and 16 to be written don't fit the context of 512"
        )
        engine.ready = False
        assert get(f"{url}/health")[0] == 503
        status, _, headers = post(url, b'{"prompt": "b"}')
        assert status == 503 and headers["retry-after"] == "5"


def test_an_engine_that_has_failed(monkeypatch):
    """As long as the process is there."""
    monkeypatch.setattr(process, "LOOK", 60)
    engine = FakeEngine()
    with running(make(engine)) as url:
        assert get(f"{url}/health")[0] == 200
        engine.dies_at = 0
        until(lambda: engine.failed)
        status, text = get(f"{url}/health")
        assert status == 503 and json.loads(text)["status"] == "failed"
        status, body, _ = post(url, b'{"prompt": "b"}')
        assert status == 503 and "the engine has failed" in body["error"]["message"]


def test_an_answer_that_fails_alone_says_why():
    """There was no token to choose; the engine goes on."""
    engine = FakeEngine(fails_at=3)
    with running(make(engine)) as url:
        status, body, _ = post(url, b'{"prompt": "b", "max_tokens": 9}')
        assert status == 500 and "finished: the model's logits are NaN or infinite" in body["error"]["message"]
        assert get(f"{url}/health")[0] == 200
        assert 'dreamer_answers_total{reason="failed"} 1' in get(f"{url}/metrics")[1]


def test_pictures_of_the_engine_hold_no_text(plain):
    engine = FakeEngine(pace=0.01)
    with running(make(engine)) as url:
        stream = client(url).completions.create(
            model=NAME, prompt="secret", max_tokens=300, stream=True, extra_body={"sampler": "lossless"}
        )
        next(iter(stream))
        with urllib.request.urlopen(f"{url}/v1/engine", timeout=20) as response:
            seen = json.loads(response.readline().removeprefix(b"data: "))
        stream.close()
        request = urllib.request.Request(f"{url}/v1/engine", method="HEAD")
        with urllib.request.urlopen(request, timeout=5) as response:
            assert response.status == 200 and response.read() == b""
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as sock:
            sock.sendall(b"HEAD /v1/engine HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"".join(iter(lambda: sock.recv(4096), b"")).startswith(b"HTTP/1.1 200 OK")  # and it ends
    (row,) = [row for row in seen["rows"] if row]
    assert row["sampler"] == "lossless" and row["depths"] == [12, 9, 6, 3] and seen["depth"] == 12
    assert "secret" not in json.dumps(seen)


def test_metrics_are_as_prometheus_reads_them(plain, ask):
    ask(prompt="x", max_tokens=3)
    text = get(f"{plain[0]}/metrics")[1]
    names, values = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            names.add(line.split()[2])
        elif not line.startswith("#"):
            match = re.fullmatch(r'(\w+)(\{(\w+="[^"\n]*",?)+\})? (-?[0-9.e+-]+)', line)
            assert match, line
            values[match[1] + (match[2] or "")] = float(match[4])
            assert re.sub("_(bucket|sum|count)$", "", match[1]) in names
    assert values["dreamer_tokens_total"] >= 3 and 1 <= values["dreamer_mean_depth"] <= 12
    buckets = [value for name, value in values.items() if "_bucket" in name]
    assert buckets == sorted(buckets) and buckets[-1] == values["dreamer_time_to_first_token_seconds_count"] > 0
    parser = pytest.importorskip("prometheus_client.parser")
    assert {family.name for family in parser.text_string_to_metric_families(text)}


def test_no_text_is_logged_unless_asked_for(caplog):
    caplog.set_level(logging.DEBUG, "dreamer_jax")
    secrets = ("Zanzibar", "Ouagadougou")

    def breaks(request):
        raise RuntimeError(bytes(i for i in request.prompt if i < 256).decode())

    def everything(log_text: bool) -> str:
        caplog.clear()
        engine = FakeEngine()
        with running(make(engine, log_text=log_text)) as url:
            ask = client(url).completions.create
            ask(model=NAME, prompt=secrets[0], max_tokens=30)
            list(ask(model=NAME, prompt=secrets[0], max_tokens=30, stream=True))
            client(url).chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": secrets[1]}], max_tokens=30
            )
            post(url, f'{{"prompt": "{secrets[0]}", "stop": "{secrets[1]}", "x{secrets[1]}": 1}}'.encode())
            get(f"{url}/{secrets[0]}?q={secrets[1]}")
            engine.says = breaks
            status, body, _ = post(url, f'{{"prompt": "{secrets[0]}"}}'.encode())
            assert status == 500 and secrets[0] not in json.dumps(body)
        return caplog.text

    silent = everything(False)
    assert not any(secret in silent for secret in secrets)
    assert "POST /v1/completions 200" in silent and "GET other 404" in silent and "RuntimeError in a request" in silent
    told = everything(True)
    assert f"a{secrets[0]}" in told and secrets[1] in told


def test_the_examples_of_the_page(capsys):
    """docs/serving.md, with the address of this server in place of its own."""
    page = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (curl,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    with running(make(FakeEngine())) as url:
        exec(compile(python.replace("http://127.0.0.1:8000", url), "serving.md", "exec"), {})
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("a((T&F)| ") and len(lines) > 20 and lines[1] == "a 2"
        if shutil.which("curl"):
            command = shlex.split(curl.replace("http://127.0.0.1:8000", url))
            done = subprocess.run([*command, "--silent"], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"][0]["text"] == "a((T&F)|"
