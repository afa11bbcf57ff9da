"""`--sampler NAME --sampler.key value`, for every command that generates."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dreamer_jax.cli.arguments import Parser
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from dreamer_jax.inference import Sampler

NAMES = ("static", "adaptive", "speculative", "lossless", "diffusion-forcing")
"""Of all samplers; `inference.SAMPLERS` has them, which takes a second to import."""
SECTION = "--sampler."


def add_sampler(parser: Parser) -> None:
    """The option `--sampler`."""
    parser.add_argument(
        "--sampler",
        default="static",
        metavar="NAME",
        help=f"how tokens go through the depths: {', '.join(NAMES)} (static); its settings, --sampler.KEY VALUE, are "
        f"listed by `{parser.prog} --sampler NAME --help`",
    )


def parse(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Sampler | None]:
    """The options of a command, and the sampler that they name; None when help for one was asked for and printed.

    Raises:
        UserError: an option, the sampler's name or one of its settings is wrong.
    """
    words, settings = _split(arguments)
    if {"--help", "-h"} & set(words) and any(word.partition("=")[0] == "--sampler" for word in words):
        named = Parser(add_help=False, allow_abbrev=False)
        named.add_argument("--sampler")
        _print_help(parser.prog, _known(named.parse_known_args(words)[0].sampler))
        return argparse.Namespace(), None
    options = parser.parse_args(words)
    name = _known(options.sampler)
    return options, make_sampler(name, settings)


def make_sampler(name: str, settings: Sequence[tuple[str, str | None]], prefix: str = SECTION) -> Sampler:
    """A sampler from its name and its settings as they are written, behind `prefix` in messages.

    Raises:
        UserError: there is no such sampler or setting, or a value is wrong.
    """
    from dreamer_jax.inference.samplers.by_name import sampler_of

    values: dict[str, str] = {}
    for key, written in settings:
        if key in values:
            raise UserError(f"{prefix}{key} is given twice; remove one")
        if written is None:
            raise UserError(f"{prefix}{key} needs a value: {prefix}{key} VALUE")
        values[key] = written
    return sampler_of(_known(name), values, prefix)


def _known(name: str | None) -> str:
    if name in NAMES:
        return name
    alike = difflib.get_close_matches(name or "", NAMES, n=1)
    raise UserError(
        f"--sampler '{name or ''}': there is no such sampler; "
        + (f"did you mean '{alike[0]}'?" if alike else f"one of {', '.join(NAMES)}")
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """(the other words, keys and values of the sampler's settings)."""
    words: list[str] = []
    settings: list[tuple[str, str | None]] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith(SECTION):
            words.append(word)
            continue
        key, equals, written = word.removeprefix(SECTION).partition("=")
        value: str | None = written
        if not equals:
            value = None if not remaining or remaining[0].startswith("--") else remaining.pop(0)
        settings.append((key, value))
    return words, settings


def _print_help(program: str, name: str) -> None:
    """What a sampler does, and its settings with their docstrings."""
    import tyro  # slow to import, and needed for help only

    from dreamer_jax.inference import SAMPLERS

    kind = SAMPLERS[name]
    # A dataclass within another: so the options are called --sampler.key, as they are written.
    shown = dataclasses.make_dataclass("Shown", [("sampler", kind, kind())], frozen=True)
    with contextlib.suppress(SystemExit):  # raised once the help is printed
        tyro.cli(
            shown,
            args=["--help"],
            prog=f"{program} ... --sampler {name}",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),  # yes and no are values, as everywhere
        )
