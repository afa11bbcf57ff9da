"""Many requests at once, by the client from PyPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OPEN = 64
"""Connections."""


class Said(NamedTuple):
    """An answer: its text, and the depth of each of its tokens."""

    text: str
    depths: list[int]


async def ask_all(
    url: str, asked: Sequence[dict[str, Any]], then: Callable[[int], None], pace: Sequence[float | None] = (0.0,)
) -> list[Said | None]:
    """Completions over `OPEN` connections, every other one streamed.

    Args:
        url: of the server.
        asked: what each asks for.
        then: gets the number of each request when it is answered.
        pace: seconds between two reads of a stream, of the requests in turn; one that has None leaves after the first
            part, and its answer is None.
    """
    import openai

    gate = asyncio.Semaphore(OPEN)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as asks:

        async def streamed(options: dict[str, Any], wait: float | None) -> Said | None:
            parts = []
            async with await asks.completions.create(**options, stream=True) as stream:
                async for chunk in stream:
                    parts.append(chunk.choices[0])
                    if wait is None:
                        return None
                    await asyncio.sleep(wait)
            return _said(parts)

        async def one(number: int) -> Said | None:
            async with gate:
                if number % 2:
                    found = await streamed(asked[number], pace[number % len(pace)])
                else:
                    found = _said((await asks.completions.create(**asked[number])).choices)
            then(number)
            return found

        return await asyncio.gather(*(one(number) for number in range(len(asked))))


def _said(parts: Sequence[Any]) -> Said:
    tokens = [token for part in parts for token in part.tokens]
    assert "".join(token["text"] for token in tokens) == "".join(part.text for part in parts)
    return Said("".join(part.text for part in parts), [token["depth"] for token in tokens])
