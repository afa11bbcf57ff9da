"""A run is a directory: config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, figures/, summary.json.

It may lie on a bucket (gs://...). Checkpoints then go there directly; the small files are written to a local folder
and copied, because a bucket can't append to a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from dreamer_jax.config import Config, LoadedConfig, difference, load_config, to_yaml
from dreamer_jax.errors import UserError, how_to_install
from dreamer_jax.parallel.distributed import is_primary, wait_for_all

CHANGEABLE = (
    "training.steps",
    "training.log_every",
    "mesh.",
    "checkpoint.",
    "safety.",
    "evaluation.",
    "analysis.",
    "run.dir",
)
"""Keys that may change when a run is resumed: they don't alter what a step computes."""
PLACES = ("data.path", "data.heldout_path", "data.mixture", "data.knowledge", "data.tokenizer")
"""Keys that say where files lie; fingerprints say whether they are the same."""

LAST_SECTION = "\nrun:"
"""Of a written configuration."""

SCHEDULE = ("training.schedule", "training.cooldown_steps", "training.learning_rate_floor", "training.steps")
ALLOWED = {"learning_rate": ("training.learning_rate", "training.warmup_steps", *SCHEDULE), "depth": ("model.depth",)}
"""Name of a change that `checkpoint.allow` permits -> the keys it is about."""

SMALL_FILES = ("config.yaml", "*.jsonl", "summary.json", "figures/*.png", "events.out.tfevents.*")
"""What is copied to a bucket, and back when the run goes on."""


def path_of(directory: str | Path) -> epath.Path:
    """A run's directory as an absolute path; also of a bucket.

    Raises:
        UserError: a bucket is named and the packages for it are missing.
    """
    text = os.fspath(directory)
    if "://" not in text:
        return epath.Path(text).absolute()
    try:
        path = epath.Path(text)
        path.exists()
    except ImportError as error:
        raise UserError(f"{text}: reading a bucket needs gcsfs; {how_to_install('gcs')} ({error})") from None
    return path


def run_and_step(path: str | Path) -> tuple[str, int | None]:
    """(run directory, step) of what names a run or one checkpoint in it: RUN, where the step is None, or
    RUN/checkpoints/500; also on a bucket."""
    directory = os.fspath(path).rstrip("/")
    parent, _, name = directory.rpartition("/")
    if parent.rpartition("/")[2] == "checkpoints" and name.isdigit():
        return parent.rpartition("/")[0] or ".", int(name)
    return directory, None


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run are.

    Attributes:
        local: the folder for everything but checkpoints; the run directory itself unless that is on a bucket.
        place: the run directory, which holds `checkpoints/`.
    """

    local: Path
    place: epath.Path

    @property
    def remote(self) -> bool:
        """Whether the run lies on a bucket."""
        return "://" in os.fspath(self.place)

    @contextlib.contextmanager
    def alone(self, otherwise: str = "is being trained; wait for it, or name another with --run.dir") -> Iterator[None]:
        """While this process trains the run, so that no other one on a disk does: each would remove what the other has
        begun to save. The lock ends with the process, whose children don't have it.

        Args:
            otherwise: what is said of the folder where another process is at it.

        Raises:
            UserError: another process is.
        """
        with contextlib.ExitStack() as held:
            if is_primary() and not self.remote:
                with contextlib.suppress(OSError):  # a disk without locks; one that can't be written is said elsewhere
                    lock = held.enter_context((self.local / ".lock").open("w"))
                    try:
                        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except (BlockingIOError, PermissionError):
                        raise UserError(f"{self.place}: {otherwise}") from None
            yield

    def publish(self) -> None:
        """Copy the small files to the bucket, if the run lies on one. Raises what the bucket raises."""
        if self.remote and is_primary():
            for pattern in SMALL_FILES:
                for path in self.local.glob(pattern):
                    target = self.place / path.relative_to(self.local).as_posix()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())


def folder_of(directory: str | Path) -> RunFolder:
    """The folder of a run; what is on a bucket is copied to a local one first."""
    place = path_of(directory)
    if "://" not in os.fspath(place):
        return RunFolder(Path(directory), place)
    key = hashlib.sha256(os.fspath(place).encode()).hexdigest()[:16]
    local = Path(tempfile.gettempdir()) / f"dreamer-run-{os.getuid()}-{key}-{os.getpid()}"
    local.mkdir(parents=True, exist_ok=True)
    for pattern in SMALL_FILES:
        for path in place.glob(pattern):
            target = local / path.relative_to(place)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return RunFolder(local, place)


def not_a_run(directory: str | Path, local: Path) -> UserError:
    """What is said of a directory without a run, whose files are in `local`."""
    run, step = run_and_step(directory)
    if step is not None:
        return UserError(f"{directory} is one checkpoint; name its run, {run}")
    exported = (local / "config.json").is_file() and any(local.glob("*.safetensors"))
    fix = "It looks like an exported folder: `dreamer import` makes a run of it" if exported else ""
    return UserError(
        f"{directory} is not a run directory: it has no config.yaml. {fix or 'Train one with `dreamer train`'}"
    )


def config_of_run(local: Path) -> Config:
    """The configuration in a run's config.yaml, which is in `local`.

    Raises:
        UserError: the end of the file is missing: everything that isn't there would be taken for a default.
    """
    path = local / "config.yaml"
    config = load_config(path).config
    if LAST_SECTION not in path.read_text(encoding="utf-8"):
        raise UserError(
            f"{path} was cut short: it has no section run, with which every run's ends; copy it anew, or write what "
            "`config` says in the file meta/metadata of the newest checkpoint"
        )
    return config


def open_run(
    loaded: LoadedConfig,
    recorded: Callable[[epath.Path], Config | None] = lambda _: None,
    check_new: Callable[[Config], None] = lambda _: None,
) -> RunFolder:
    """Create the run directory with its configuration, or check that an existing one holds the same run.

    Args:
        loaded: the configuration.
        recorded: run directory -> the configuration of its newest checkpoint.
        check_new: called before the directory of a new run is made.
    Raises:
        UserError: if it holds another configuration (the differences are shown) or can't be written.
    """
    folder = folder_of(loaded.config.run.dir)
    saved = folder.local / "config.yaml"
    trained = recorded(folder.place)
    before = load_config(saved).config if saved.is_file() else trained
    if before is not None:
        _refuse_other(folder.place, before, loaded.config)
        if trained is not None:
            _refuse_edited(folder.place, trained, loaded.config)
    else:
        check_new(loaded.config)
        if is_primary():
            save_configuration(loaded, folder)
    wait_for_all("run directory")
    return folder


def save_configuration(loaded: LoadedConfig, folder: RunFolder) -> None:
    """Write config.yaml, which a run that goes on may change where `CHANGEABLE` and `checkpoint.allow` let it. What was
    allowed isn't written: it is for one start.

    Raises:
        UserError: if the directory can't be written.
    """
    checkpoint = dataclasses.replace(loaded.config.checkpoint, allow="")
    config = dataclasses.replace(loaded.config, checkpoint=checkpoint)
    try:
        folder.local.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.local / "config.yaml", to_yaml(config, loaded.origins))
        folder.publish()
    except OSError as error:
        raise UserError(
            f"run.dir: can't write to {folder.place}: {error.strerror or error}; choose another with "
            "--run.dir (of a study or a frontier: --out)"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one go: whoever is killed meanwhile leaves the old or the new one, never half of it.

    Raises:
        OSError: it can't be written; the error names it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name and none of the text
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # a full disk shows when there is no name any more
        raise
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _refuse_other(place: epath.Path, before: Config, now: Config) -> None:
    allowed = tuple(key for name in now.checkpoint.allowed for key in ALLOWED[name])
    changeable = CHANGEABLE
    if (before.training.schedule, now.training.schedule) != ("constant", "constant"):  # the rate depends on the end
        changeable = tuple(key for key in CHANGEABLE if key != "training.steps")
    changed = [line for line in difference(before, now) if not _about(line, changeable)]
    refused = [line for line in changed if not _about(line, allowed)]
    if not refused:
        return
    names = [name for name, keys in ALLOWED.items() if any(_about(line, keys) for line in refused)]
    allowable = tuple(key for name in names for key in ALLOWED[name])
    hint = f", or add --checkpoint.allow {','.join((*now.checkpoint.allowed, *names))} to change that"
    hint = hint if names and all(_about(line, allowable) for line in refused) else ""
    if all(_about(line, PLACES) for line in refused):
        hint = f". If those files were only moved, write their new places into {place / 'config.yaml'}"
    raise UserError(
        f"{place} holds a run with another configuration:\n  "
        + "\n  ".join(refused)
        + "\nUse another directory (--run.dir NAME; of a study or a frontier --out), or the old values to go on with "
        + f"that run{hint}"
    )


def _refuse_edited(place: epath.Path, trained: Config, now: Config) -> None:
    """Of a run whose config.yaml was edited: its newest checkpoint says what was trained. Files may have been moved.
    What `checkpoint.allow` names may differ too, since config.yaml says it from the start on that allowed it."""
    free = (*CHANGEABLE, *PLACES, "training.initial_weights", *(key for keys in ALLOWED.values() for key in keys))
    if changed := [line for line in difference(trained, now) if not _about(line, free)]:
        raise UserError(
            f"{place}: config.yaml was edited, and isn't of the run that its newest checkpoint holds:\n  "
            + "\n  ".join(changed)
            + "\nPut the old values back to go on with that run, or use another directory (--run.dir NAME)"
        )


def refuse_untrained(place: epath.Path, trained: Config, now: Config) -> None:
    """Of a run that has all its steps: what `checkpoint.allow` names can't change any more, as no step would be trained
    with it, and config.yaml would say that they were.

    Args:
        place: of the run.
        trained: the configuration of its newest checkpoint.
        now: the one that it shall go on with.

    Raises:
        UserError: something of that differs.
    """
    keys = tuple(key for its in ALLOWED.values() for key in its if key != "training.steps")
    if changed := [line for line in difference(trained, now) if _about(line, keys)]:
        raise UserError(
            f"{place}: the run is complete, so no step would be trained with\n  "
            + "\n  ".join(changed)
            + f"\nGive more --training.steps than {now.training.steps}, or the old values"
        )


def _about(line: str, keys: tuple[str, ...]) -> bool:
    """Whether a line of `difference` is about one of the keys, or is in one of the sections, which end with a dot."""
    key = line.partition(": ")[0]
    return key in keys or key.startswith(tuple(name for name in keys if name.endswith(".")))
