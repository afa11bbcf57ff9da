"""What commands share: reading `CONFIG [--section.key value ...]`, option parsers, and lines of progress."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dreamer_jax.config import Config, LoadedConfig, load_config
from dreamer_jax.config.keys import FAMILY
from dreamer_jax.config.loading import read_overrides
from dreamer_jax.config.models import find, known
from dreamer_jax.errors import UserError

LARGEST = 2**31 - 1
"""Of what commands count; so many are an int32."""


class _Once(argparse.Action):
    """Keeps an option's value, and refuses a second one: of two nobody knows which is meant."""

    given = False

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if self.given and option_string:
            parser.error(f"{option_string} is given twice; remove one")
        self.given = True
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UserErrors, like those of every command."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` lists the options")


def read_config(command: str, arguments: Sequence[str]) -> LoadedConfig | None:
    """The configuration that the words of a command name.

    Args:
        command: the command's own words, such as "train", for usage and help.
        arguments: one file, or the name of one, and any number of `--section.key value`, in any order.
    Returns:
        The configuration, or None when help was asked for and has been printed.
    Raises:
        UserError: the file is missing from the words, or the configuration is wrong.
    """
    files, overrides, help_asked = split_words(arguments)
    usage = f"usage: dreamer {command} CONFIG [--section.key value ...]"
    if help_asked:
        _print_help(command, files, overrides)
        return None
    if not files:
        raise UserError(f"{command}: no configuration is named; {usage}; `dreamer config list` shows names")
    if len(files) > 1:
        raise UserError(f"{command}: unexpected '{files[1]}' after the configuration '{files[0]}'; {usage}")
    return load_config(files[0], overrides)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(a command's own words, `--section.key value` overrides of its configuration)."""
    words: list[str] = []
    overrides: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            words.append(word)
            continue
        overrides.append(word)
        if "=" not in word and remaining and not remaining[0].startswith("--"):
            overrides.append(remaining.pop(0))
    return words, overrides


def positive(text: str) -> int:
    """An argument that is an integer of one or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer of 1 or more")
    return natural(text)


def natural(text: str) -> int:
    """An argument that is an integer of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer of 0 or more")
    if int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {LARGEST:,}")
    return int(text)


def figure_file(option: str, path: str, kinds: Sequence[str] = (".png", ".svg")) -> Path:
    """Where a picture goes.

    Raises:
        UserError: it can't be written, or is of another kind.
    """
    if Path(path).suffix not in kinds:
        raise UserError(f"{option} {path}: must end in {' or '.join(kinds)}")
    if not Path(path).parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {Path(path).parent}")
    return Path(path)


def say(line: str) -> None:
    """Print a line of progress, which isn't part of a command's result. Lines of several threads stay whole."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """(files, overrides, whether help is asked for); an option is followed by its value or holds it after `=`."""
    files: list[str] = []
    overrides: list[str] = []
    help_asked = False
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word in ("--help", "-h"):
            help_asked = True
            continue
        if not word.startswith("-"):
            files.append(word)
            continue
        overrides.append(word)
        if "=" not in word and remaining and not remaining[0].startswith("--"):
            overrides.append(remaining.pop(0))
    return files, overrides, help_asked


def _print_help(command: str, files: Sequence[str], overrides: Sequence[str]) -> None:
    """Every setting with its docstring; its default is the file's value where a file is named.

    The settings of the model are those of the family that the file names, or the last `--model.family`.
    """
    import tyro  # slow to import, and needed for help only

    defaults = load_config(files[0]).config if len(files) == 1 else Config()
    at = max((i for i, word in enumerate(overrides) if word.partition("=")[0] == f"--{FAMILY}"), default=None)
    if at is not None:
        family = read_overrides(overrides[at : at + (1 if "=" in overrides[at] else 2)])[FAMILY].value
        if family != defaults.model.family:
            defaults = dataclasses.replace(defaults, model=find(family).config())
    # tyro goes by annotations, and only that of this class says which family it is.
    shown = dataclasses.make_dataclass("Shown", [("model", type(defaults.model))], bases=(Config,), frozen=True)
    with contextlib.suppress(SystemExit):  # raised once the help is printed
        tyro.cli(
            shown,
            default=shown(**{field.name: getattr(defaults, field.name) for field in dataclasses.fields(Config)}),
            args=["--help"],
            prog=f"dreamer {command} {files[0] if files else 'CONFIG'}",
            description=Config.__doc__,
            use_underscores=True,
        )
    print(
        f"Families of models: {', '.join(known())}. The settings of another: dreamer {command} --model.family X --help"
    )
