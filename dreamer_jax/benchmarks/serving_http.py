"""The load of `serving.py` on a server of OpenAI's API, whoever has written it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np

from dreamer_jax.benchmarks.serving import Arrival, Timeline, summary
from dreamer_jax.errors import UserError

TOKENS = 256
"""Prompts are of token ids below; every vocabulary has them."""
PATIENCE = 600.0
"""Seconds that a server may be silent."""


class Remote:
    """A server.

    Args:
        url: such as http://127.0.0.1:8000.
        key: that it wants; None for none.

    Attributes:
        refusal: why it refused the last request that it did.

    Raises:
        UserError: it isn't there, isn't ready, or isn't one of OpenAI's API.
    """

    def __init__(self, url: str, key: str | None = None):
        try:
            parts = urllib.parse.urlsplit(url)
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            right = right and parts.path in ("", "/", "/v1", "/v1/")
        except ValueError:  # brackets without an end, a port beyond 65535
            right = False
        if not right:
            raise UserError(f"--url {url}: must be such as http://127.0.0.1:8000")
        self.url, self._parts, self.refusal = url, parts, ""
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            self.model = json.loads(self._get("/v1/models"))["data"][0]["id"]
        except (ValueError, TypeError, LookupError):
            raise UserError(f"--url {url}: /v1/models names no model; is it a server of OpenAI's API?") from None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=PATIENCE)

    def _get(self, path: str) -> str:
        connection = self._connect()
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"--url {self.url}: nobody answers ({error})") from None
        finally:
            connection.close()
        if response.status != 200:
            raise UserError(f"--url {self.url}: {path} is answered with {response.status}")
        return text

    def share_of_bound(self) -> float | None:
        """Since the server's start; None of a server that isn't ours."""
        try:
            text = self._get("/metrics")
        except UserError:
            return None
        values = [line.split()[1] for line in text.splitlines() if line.startswith("dreamer_share_of_bound ")]
        return float(values[0]) if values else None

    def ask(self, body: dict[str, Any], line: Timeline, begin: float) -> None:
        """One request, streamed; what becomes of it goes into the line."""
        connection = self._connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body).encode(), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                line.finish = f"refused: {response.status}"
                self.refusal = f"{response.status}: {_reason(response.read())}"
                return
            for text in response:
                field, _, data = text.strip().partition(b":")
                if field != b"data":  # a comment, which keeps the connection, or the name of an event
                    continue
                if data.strip() == b"[DONE]":
                    return
                self._take(json.loads(data), line, time.perf_counter() - begin)
            line.finish = "failed"
        except (OSError, http.client.HTTPException, ValueError, TypeError, LookupError):  # no answer of OpenAI's API
            line.finish = "failed"
        finally:
            connection.close()

    def _take(self, chunk: dict[str, Any], line: Timeline, now: float) -> None:
        for choice in chunk["choices"]:
            # Servers other than ours don't say how many tokens a chunk has: one, as a rule. One whose text is empty may
            # hold half a character; such tokens are in the usage at the end.
            tokens = choice.get("tokens", [{}] if choice.get("text") else [])
            if tokens:
                line.brought.append((now, len(tokens)))
                line.depths += sum(token.get("depth", 0) for token in tokens)
            line.finish = choice.get("finish_reason") or line.finish
        if chunk.get("usage"):
            line.counted = int(chunk["usage"]["completion_tokens"])


def _reason(body: bytes) -> str:
    """What a server says in a refusal, in one line."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:300]


def bench_remote(remote: Remote, plan: Sequence[Arrival], extra: dict[str, Any], seed: int) -> dict[str, Any]:
    """The summary of a load.

    Args:
        remote: the server.
        plan: when requests come, and how long they are; an answer may end earlier.
        extra: further fields of every request.
        seed: of the tokens.

    Raises:
        UserError: nothing was answered.
    """
    rng = np.random.default_rng(seed)
    bodies = [
        {
            "model": remote.model,
            "prompt": rng.integers(0, TOKENS, each.lengths.prompt).tolist(),
            "max_tokens": each.lengths.answer,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        for each in plan
    ]
    lines = [Timeline(each.seconds) for each in plan]
    begin, threads = time.perf_counter(), []
    for each, body, line in zip(plan, bodies, lines, strict=True):
        time.sleep(max(0.0, begin + each.seconds - time.perf_counter()))
        threads.append(threading.Thread(target=remote.ask, args=(body, line, begin), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if not any(line.tokens or line.finish in ("stop", "length") for line in lines):  # an answer may have no token
        reason = remote.refusal or "its streams are not those of OpenAI's API, or it gave up"
        raise UserError(f"--url {remote.url}: none of {len(lines):,} requests was answered ({reason})")
    return summary(lines, time.perf_counter() - begin, remote.share_of_bound())
