"""Reading `CONFIG [--section.key value ...]`, the words that most commands begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dreamer_jax.config import LoadedConfig, UserError, load_config


def read_config(command: str, arguments: Sequence[str]) -> LoadedConfig | None:
    """The configuration that the words of a command name.

    Args:
        command: the command's own words, such as "train", for usage and help.
        arguments: one file and any number of `--section.key value`, in any order.
    Returns:
        The configuration, or None when help was asked for and has been printed.
    Raises:
        UserError: the file is missing from the words, or the configuration is wrong.
    """
    files, overrides, help_asked = _split(arguments)
    usage = f"usage: dreamer {command} CONFIG [--section.key value ...]"
    if help_asked:
        _print_help(command, files)
        return None
    if not files:
        raise UserError(f"{command}: no configuration is named; {usage}")
    if len(files) > 1:
        raise UserError(f"{command}: unexpected '{files[1]}' after the configuration '{files[0]}'; {usage}")
    return load_config(files[0], overrides)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """(files, overrides, whether help is asked for); an option is followed by its value or holds it after `=`."""
    files: list[str] = []
    overrides: list[str] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word in ("--help", "-h"):
            return files, overrides, True
        if not word.startswith("-"):
            files.append(word)
            continue
        overrides.append(word)
        if "=" not in word and remaining and not remaining[0].startswith("--"):
            overrides.append(remaining.pop(0))
    return files, overrides, False


def _print_help(command: str, files: Sequence[str]) -> None:
    """Every setting with its docstring; its default is the file's value where a file is named."""
    import tyro  # slow to import, and needed for help only

    from dreamer_jax.config import Config

    defaults = load_config(files[0]).config if len(files) == 1 else Config()
    with contextlib.suppress(SystemExit):  # raised once the help is printed
        tyro.cli(
            Config,
            default=defaults,
            args=["--help"],
            prog=f"dreamer {command} {files[0] if files else 'CONFIG'}",
            use_underscores=True,
        )
