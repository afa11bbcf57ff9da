"""What a served engine has done, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dreamer_jax.budget.analytic import average_context, flops_by_depth
from dreamer_jax.families import Family
from dreamer_jax.serving.contract import RowView, View


class Statistics:
    """Counts since the start; see `View`.

    Args:
        family: the model.
        context: most tokens of a request.
        depth: L.
    """

    def __init__(self, family: Family, context: int, depth: int):
        self._outside, self._per_depth = flops_by_depth(family, average_context(context))
        self._depth = depth
        self.prompt_tokens = self.shared_tokens = 0
        self.finished: Counter[str] = Counter()
        self._tokens = self._depths = 0
        self._decoded = self._decoded_depths = 0  # without the first of each request, which comes of the prompt
        self._steps = self._row_steps = self._busy = self._borders = 0
        self.prompt_seconds = self.decode_seconds = 0.0

    def count(self, steps: int, places: int, busy: int, borders: int) -> None:
        """A tick of so many depth steps with so many places for positions; in so many of them, all steps together,
        there was one. What lies outside of the depths was computed for so many places all together."""
        self._steps += steps
        self._row_steps += steps * places
        self._busy += busy
        self._borders += borders

    def add(self, depths: Sequence[int], decoded: bool) -> None:
        """Tokens that were delivered, by the depths of their predecessors."""
        self._tokens += len(depths)
        self._depths += sum(depths)
        if decoded:
            self._decoded += len(depths)
            self._decoded_depths += sum(depths)

    @property
    def share_of_bound(self) -> float | None:
        """Of the speed-up over full depth that the tokens' depths allow, the part that is reached.

        With F0 the cost of a token outside of the depths and Fr that of a depth, tokens that took r depths on average
        allow a speed-up of (F0 + L Fr) / (F0 + r Fr). A step costs Fr for every place, whether a position is in it or
        not, and so does F0, so with s places in steps and b places outside of the depths for a token,
        (F0 + L Fr) / (b F0 + s Fr) is reached. The share is their quotient, (F0 + r Fr) / (b F0 + s Fr): 1 where every
        place takes a token further that is delivered. Places that nobody has, positions that were thrown away, and
        tokens that were computed twice make it less.
        """
        if not self._decoded:
            return None
        r, s, b = (each / self._decoded for each in (self._decoded_depths, self._row_steps, self._borders))
        return (self._outside + r * self._per_depth) / (b * self._outside + s * self._per_depth)

    def view(self, rows: tuple[RowView | None, ...], queue: int, pages: int, free_pages: int) -> View:
        """All of it."""
        return View(
            rows,
            queue,
            self._depth,
            pages,
            free_pages,
            self.prompt_tokens,
            self.shared_tokens,
            self._tokens,
            self._depths,
            self._steps,
            self._row_steps,
            self._busy,
            dict(self.finished),
            self.share_of_bound,
            self._decoded,
            self._decoded_depths,
            self._borders,
            self.prompt_seconds,
            self.decode_seconds,
        )
