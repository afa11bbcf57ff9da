"""The folders of a run's checkpoints: which are there, which are whole, which go. No arrays are read here."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from dreamer_jax.errors import UserError
from dreamer_jax.parallel.distributed import largest
from dreamer_jax.runs.integrity import is_complete, is_unverifiable, manifests, problem_of

_STEP = re.compile(r"0|[1-9][0-9]*", re.ASCII)


class StepFolders:
    """`checkpoints/` of a run, with one folder for each saved step.

    Args:
        place: the run directory.
    """

    def __init__(self, place: epath.Path):
        self.path = place / "checkpoints"

    def __getitem__(self, step: int) -> epath.Path:
        return self.path / str(step)

    def all(self) -> list[int]:
        """Every step that has a folder, also those cut short, in order. What else lies there is no step.

        Raises:
            UserError: there is something else in the place of the folder.
        """
        local = "://" not in os.fspath(self.path)
        if local and os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise UserError(f"{self.path} is no folder, or a link to one that isn't there; is its disk mounted?")
        try:
            steps = [path for path in self.path.iterdir() if _STEP.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):  # the second: of what it would lie in, which is said elsewhere
            return []
        return sorted(int(path.name) for path in steps if not local or os.path.isdir(path))

    def complete(self) -> list[int]:
        """The steps that were saved to their end, in order; see `is_complete`."""
        return [step for step in self.all() if is_complete(self[step])]

    def newest_good(
        self, say: Callable[[str], None], items: Sequence[str] = (), usable: Callable[[int], bool] = lambda _: True
    ) -> int | None:
        """The newest step whose files are as they were written, or None.

        Every file of it has been read. All processes of a job must call this together: each reads a share.

        Args:
            say: gets a line for every newer step that is not used, with the reason.
            items: look at these parts only.
            usable: a further condition.
        """
        together = jax.process_index(), jax.process_count()
        steps = self.all()
        for step in reversed(steps):
            problem = problem_of(self[step], items, *together)
            if largest(problem is not None):
                reason = problem or "another process found it damaged"
                older = "; trying the one before" if step != steps[0] else ""
                say(f"checkpoint {step} can't be used: {reason}{older}")
            elif usable(step):
                if is_unverifiable(self[step]):
                    say(f"checkpoint {step} was saved by an early version without checksums; it can't be verified")
                return step
        return None

    def meta(self, step: int) -> dict[str, Any]:
        """What a step says of itself beside its arrays."""
        return json.loads((self[step] / "meta" / "metadata").read_text())

    def skipping(self, step: int) -> bool:
        """Whether the last train step before it was skipped, as far as can be read: a run that diverges can't go back
        to such a one."""
        try:
            return bool(self.meta(step).get("run", {}).get("streak"))
        except (OSError, ValueError):  # damaged
            return True

    @contextlib.contextmanager
    def reading(self, *steps: int) -> Iterator[None]:
        """Arrays of steps are read in this block: training may remove them meanwhile, and what is gone reads as zeros.

        Raises:
            UserError: one was removed.
        """
        try:
            yield
        except Exception:
            self._require(steps)
            raise
        self._require(steps)

    def _require(self, steps: Sequence[int]) -> None:
        for step in steps:
            if not is_complete(self[step]):
                raise UserError(
                    f"{self[step]} was removed while it was read, as training does with older checkpoints; run the "
                    "command again, or raise checkpoint.keep"
                ) from None

    def disqualify(self, step: int) -> None:
        """Take a step's manifests away: it counts no longer, and the next checkpoint removes it."""
        for path in manifests(self[step]):
            path.unlink()

    def remove(self, step: int) -> None:
        """Remove a step. Cut short, this leaves a step that is not complete."""
        with contextlib.suppress(FileNotFoundError):  # another process was first
            self.disqualify(step)
            (self[step] / "meta" / "metadata").unlink(missing_ok=True)  # by which steps of early versions count
            self[step].rmtree()

    def remove_after(self, step: int) -> None:
        """Remove all later steps."""
        for later in self.all():
            if later > step:
                self.remove(later)

    def prune(self, keep: int, keep_every: int) -> list[int]:
        """Remove what needn't be kept; returns the steps that went.

        The newest `keep` complete steps stay, and every multiple of `keep_every`; and the newest that isn't `skipping`.
        Steps cut short go if there is a complete one after them.
        """
        complete = self.complete()
        if not complete:
            return []
        kept = set(complete[-keep:]) | {step for step in complete if keep_every and step % keep_every == 0}
        kept.add(next((step for step in reversed(complete) if not self.skipping(step)), complete[-1]))
        gone = [step for step in self.all() if step < complete[-1] and step not in kept]
        for step in gone:
            self.remove(step)
        return gone

    def unfinished(self) -> list[epath.Path]:
        """Folders that a save which was cut short has left under a temporary name."""
        try:
            return sorted(path for path in self.path.iterdir() if ".orbax-checkpoint-tmp" in path.name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove_unfinished(self) -> None:
        """Remove what `unfinished` finds; nobody may be saving."""
        for path in self.unfinished():
            path.rmtree(missing_ok=True)
