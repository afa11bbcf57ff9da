"""The engine's counts as Prometheus reads them (text format 0.0.4), and a picture of the engine as JSON."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dreamer_jax.serving.contract import View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds; upper borders of the histogram."""


class Metrics:
    """What the server counts itself."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.dropped: Counter[str] = Counter()
        """Requests without a whole answer, by reason: "gone", "slow"."""
        self._first = [0] * (len(BUCKETS) + 1)
        self._first_seconds = 0.0

    def first_token(self, seconds: float) -> None:
        """An answer got its first token so long after its request had come."""
        self._first[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._first_seconds += seconds

    def text(self, view: View, ready: bool) -> str:
        """All of it."""
        lines: list[str] = []

        def add(name: str, kind: str, about: str, values: Iterable[tuple[str, float | None]]) -> None:
            lines.extend([f"# HELP dreamer_{name} {about}", f"# TYPE dreamer_{name} {kind}"])
            lines.extend(f"dreamer_{name}{labels} {value:.10g}" for labels, value in values if value is not None)

        def counter(name: str, about: str, value: float) -> None:
            add(name, "counter", about, [("", value)])

        def gauge(name: str, about: str, value: float | None) -> None:
            add(name, "gauge", about, [("", value)])

        gauge("ready", "Whether requests are taken.", float(ready))
        gauge("queue", "Requests that wait.", view.queue)
        gauge("rows", "Requests that can have begun.", len(view.rows))
        gauge("rows_busy", "Requests that have begun.", sum(row is not None for row in view.rows))
        gauge("pages", "Pages of keys and values.", view.pages)
        gauge("pages_free", "Pages that are free, or hold prefixes that nothing uses now.", view.free_pages)
        gauge("depth", "Depths of a pass.", view.depth)
        gauge("occupancy", "Places in depth steps that took a position further, over all, since the start.",
              ratio(view.busy_row_steps, view.row_steps))  # fmt: skip
        gauge("mean_depth", "Depths that a generated token went through, since the start.",
              ratio(view.depths, view.tokens))  # fmt: skip
        gauge("share_of_bound", "Of the speed-up that exit depths allow, what is reached.", view.share_of_bound)
        counter("prompt_tokens_total", "Tokens of prompts.", view.prompt_tokens)
        counter("shared_prompt_tokens_total", "Tokens of prompts whose keys were there already.", view.shared_tokens)
        counter("tokens_total", "Generated tokens.", view.tokens)
        counter("depths_total", "Depths that generated tokens went through.", view.depths)
        counter("steps_total", "Depth steps.", view.steps)
        counter("row_steps_total", "Places for positions in depth steps.", view.row_steps)
        counter("busy_row_steps_total", "Places that took a position further.", view.busy_row_steps)
        finished = sorted(view.finished.items())
        add("answers_total", "counter", "Answers by how the engine ended them.",
            [(f'{{reason="{reason}"}}', count) for reason, count in finished])  # fmt: skip
        responses = sorted(self.responses.items())
        add("responses_total", "counter", "HTTP responses.",
            [(f'{{path="{path}",status="{status}"}}', count) for (path, status), count in responses])  # fmt: skip
        add("dropped_total", "counter", "Requests whose client left or read too slowly.",
            [(f'{{reason="{reason}"}}', count) for reason, count in sorted(self.dropped.items())])  # fmt: skip
        add("time_to_first_token_seconds", "histogram", "From a request to the first token of an answer.", [])
        below = 0
        for border, count in zip((*BUCKETS, None), self._first, strict=True):
            below += count
            name = "+Inf" if border is None else f"{border:g}"
            lines.append(f'dreamer_time_to_first_token_seconds_bucket{{le="{name}"}} {below}')
        lines.append(f"dreamer_time_to_first_token_seconds_sum {self._first_seconds:.10g}")
        lines.append(f"dreamer_time_to_first_token_seconds_count {below}")
        return "\n".join(lines) + "\n"


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by."""
    return part / whole if whole else None


def picture(view: View) -> dict[str, Any]:
    """A moment of the engine for the page; no text is in it."""
    return {
        "time": time.monotonic(),
        "depth": view.depth,
        "rows": [row and row._asdict() for row in view.rows],
        "queue": view.queue,
        "pages": view.pages,
        "free_pages": view.free_pages,
        "prompt_tokens": view.prompt_tokens,
        "shared_tokens": view.shared_tokens,
        "tokens": view.tokens,
        "steps": view.steps,
        "occupancy": ratio(view.busy_row_steps, view.row_steps),
        "mean_depth": ratio(view.depths, view.tokens),
        "finished": view.finished,
        "share_of_bound": view.share_of_bound,
    }
