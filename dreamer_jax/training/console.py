"""What a person sees while training: one line a log interval, readable in a terminal and in a log file."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape

from dreamer_jax.config.sections import Config


class _Out(RichConsole):
    _told = False

    def on_broken_pipe(self) -> None:
        """Nobody reads: rich would end the program here, as if by its own wish; `cli.main` has a code for that."""
        raise  # the BrokenPipeError that is being handled

    def print(self, *objects: Any, **how: Any) -> None:
        """A disk that is full where the output goes to ends no run: what can't be written there is lost."""
        try:
            super().print(*objects, **how)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._buffer.clear()
            if not self._told:
                self._told = True
                with contextlib.suppress(OSError):
                    print(f"dreamer: the log can't be written ({error.strerror}); the run goes on", file=sys.stderr)


class Console:
    """Prints the progress of one run.

    Args:
        config: of the run.
        quiet: print nothing: another process of the job does.
    """

    def __init__(self, config: Config, quiet: bool = False):
        self._steps = config.training.steps
        self._out = _Out(highlight=False, soft_wrap=True, quiet=quiet)

    def say(self, text: str) -> None:
        """A plain line."""
        self._out.print(escape(text))

    def progress(self, step: int, record: Mapping[str, float], seconds_left: float) -> None:
        """Step, share done, time left, loss, learning rate, gradient norm, throughput."""
        left = datetime.timedelta(seconds=round(seconds_left))
        line = (
            f"step {step:>{len(str(self._steps))}}/{self._steps} {step / self._steps:4.0%}  eta {left}  "
            f"[bold]loss {record['loss']:.4f}[/bold]  lr {record['learning_rate']:.2e}  "
            f"grad {record['gradient_norm']:.3f}  {record['time/tokens_per_second']:,.0f} tokens/s"
        )
        if record.get("skipped"):
            line += f"  skipped {record['skipped']:.0f}"
        if "time/model_flop_utilisation" in record:
            line += f"  MFU {record['time/model_flop_utilisation']:.1%}"
        self._out.print(line)

    def evaluation(self, step: int, record: Mapping[str, float]) -> None:
        """Held-out and harder metrics."""
        values = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in record.items())
        self._out.print(f"[cyan]step {step}  {escape(values)}[/cyan]")

    def examples(self, title: str, records: Sequence, answers: Sequence[str]) -> None:
        """Prompts with the expected and the given answer."""
        self._out.print(f"\n[bold]{title}[/bold]")
        for record, given in zip(records, answers, strict=True):
            right = given == record.completion
            mark = "[green]right[/green]" if right else f"[red]wrong[/red], expected {escape(repr(record.completion))}"
            self._out.print(f"  {escape(record.prompt.strip())}\n    -> {escape(repr(given))}  {mark}")
