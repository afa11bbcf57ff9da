"""What tests ask a server, and what the fake engine answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any


def client(url: str, key: str = "none", **options: Any) -> Any:
    """The one from PyPI."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20, **options)


def post(url: str, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any], Any]:
    """(status, JSON, headers) of a raw body."""
    headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    request = urllib.request.Request(f"{url}{path}", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def get(url: str, **headers: str) -> tuple[int, str]:
    """(status, text)."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def said(prompt: str, number: int = 0, tokens: int = 16) -> str:
    """What the fake engine answers to a prompt of letters."""
    return (chr(97 + number) + prompt * tokens)[:tokens]
