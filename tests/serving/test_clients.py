"""Clients that leave, that don't read, that send too much, and many at once: nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import tracemalloc
import urllib.request
from http.client import IncompleteRead

import pytest

pytest.importorskip("starlette", reason="extra `serve`")
pytest.importorskip("uvicorn", reason="extra `serve`")
pytest.importorskip("openai", reason="the client that people have")

from dreamer_jax.serving import connections, server, streaming
from tests.serving.asking import client, get, post, said, until
from tests.serving.fake import FakeEngine
from tests.serving.many import ask_all
from tests.serving.served import NAME, make, running


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_not_read(chunked):
    """100 MB: the answer comes, and no more than is allowed was in memory."""
    part = b"x" * (1 << 20)
    tracemalloc.start()
    try:
        with (
            running(make(FakeEngine())) as url,
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as sock,
        ):
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 104857600"
            sock.sendall(f"{head}{length}\r\n\r\n".encode())
            for _ in range(100):
                sock.sendall(b"100000\r\n" + part + b"\r\n" if chunked else part)
            if chunked:
                sock.sendall(b"0\r\n\r\n")
            answer = sock.recv(1 << 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.startswith(b"HTTP/1.1 413 ") and b"body has more than" in answer
    assert peak < 8 * connections.LARGEST_BODY


def test_a_client_that_leaves_frees_its_row():
    engine = FakeEngine(pace=0.01)
    with running(make(engine)) as url:
        other = client(url).completions.create(model=NAME, prompt="stays", max_tokens=60, stream=True)
        stream = client(url).completions.create(model=NAME, prompt="leaves", max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: 1 in engine.cancelled)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as sock:  # not streamed
            body = b'{"prompt": "leaves", "max_tokens": 500}'
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(body), body))  # fmt: skip
            until(lambda: len(engine.submitted) == 3)
        until(lambda: 2 in engine.cancelled)
        assert "".join(chunk.choices[0].text for chunk in other) == said("stays", 0, 60)
        text = get(f"{url}/metrics")[1]
    assert 'dreamer_dropped_total{reason="gone"} 2' in text and 'dreamer_answers_total{reason="cancelled"} 2' in text
    assert 'path="/v1/completions",status="0"} 1' in text and 'status="500"' not in text  # to nobody, and no defect


def test_a_client_that_does_not_read_loses_its_own_connection(monkeypatch):
    monkeypatch.setattr(streaming, "MOST_WAITING", 500)
    engine = FakeEngine(pace=0.0001, block=50, context=1 << 20)
    with running(make(engine)) as url, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        body = b'{"prompt": "slow", "max_tokens": 1000000, "stream": true}'
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%b" % (len(body), body))  # fmt: skip
        until(lambda: len(engine.submitted) == 1)
        others = [client(url).completions.create(model=NAME, prompt="quick", max_tokens=40) for _ in range(5)]
        assert [answer.choices[0].text for answer in others] == [said("quick", 0, 40)] * 5
        until(lambda: 0 in engine.cancelled, 20)
        until(lambda: 'dropped_total{reason="slow"} 1' in get(f"{url}/metrics")[1])
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1 << 16):
                received += part
    assert received.startswith(b"HTTP/1.1 200 OK") and b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")


def test_who_waits_for_what_may_become_a_stop_string_is_not_slow(monkeypatch):
    """Neither while it is held back nor where all of it becomes certain in the last step."""
    monkeypatch.setattr(streaming, "MOST_WAITING", 50)
    monkeypatch.setattr(server, "Answering", lambda *of: answers.append(streaming.Answering(*of)) or answers[-1])
    answers: list[streaming.Answering] = []
    with running(make(FakeEngine(says=lambda request: [97] * 300))) as url:
        body = {"model": NAME, "prompt": "x", "max_tokens": 300, "stop": "a" * 299 + "x", "n": 2}
        streamed = list(client(url).completions.create(**body, stream=True))
        assert not answers[0].slow.is_set() and 'reason="slow"' not in get(f"{url}/metrics")[1]
    texts = ["".join(chunk.choices[0].text for chunk in streamed if chunk.choices[0].index == n) for n in (0, 1)]
    assert texts == ["a" * 300] * 2


def test_a_failure_in_mid_stream_ends_the_connection():
    engine = FakeEngine(fails_at=5)
    with running(make(engine)) as url:
        status, body, _ = post(url, b'{"prompt": "a", "max_tokens": 50}')
        assert status == 500 and body["error"]["type"] == "server_error"
        request = urllib.request.Request(
            f"{url}/v1/completions", b'{"prompt": "a", "max_tokens": 50, "stream": true}',
            {"Content-Type": "application/json"},
        )  # fmt: skip
        received = b""
        with pytest.raises((ConnectionError, IncompleteRead)), urllib.request.urlopen(request, timeout=20) as response:
            while part := response.read1():
                received += part
    assert b"[DONE]" not in received and received.count(b'"depth"') == 5  # what there is comes


@pytest.mark.slow
@pytest.mark.parametrize("requests", [100, 1000])
def test_many_requests_over_64_connections(requests):
    """None is lost, none mixed up, and memory doesn't grow with their number."""
    engine = FakeEngine(rows=16, queue=128, pace=0)
    sizes: list[int] = []
    asked = [{"model": NAME, "prompt": f"<{n}>", "max_tokens": 5 + n % 40} for n in range(requests)]

    def then(number: int) -> None:
        if number % (requests // 4) == 0:
            gc.collect()
            sizes.append(sum(type(each) is streaming.Answering for each in gc.get_objects()))

    with running(make(engine)) as url:
        found = asyncio.run(ask_all(url, asked, then))
        until(lambda: not any(engine.view().rows))
        gc.collect()
        left = [each for each in gc.get_objects() if type(each) is streaming.Answering]
    assert [its and its.text for its in found] == [said(its["prompt"], 0, its["max_tokens"]) for its in asked]
    assert engine.view().finished == {"length": requests}
    assert max(sizes) <= 64 and len(left) <= 1
