"""`dreamer completion bash|zsh|fish`: what a shell needs to complete commands, names of configurations and options."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from dreamer_jax.errors import UserError

USAGE = """\
usage: dreamer completion bash|zsh|fish

Prints a function for the shell. To have completion from now on:
  bash   echo 'eval "$(dreamer completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(dreamer completion zsh)"' >> ~/.zshrc
  fish   dreamer completion fish > ~/.config/fish/completions/dreamer.fish"""

BASH = """\
_dreamer() {
    local IFS=$'\\n'
    COMPREPLY=($(dreamer completion of "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _dreamer dreamer
"""
FISH = """\
complete -c dreamer -a '(dreamer completion of (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}", "fish": FISH}

SETTINGS = ("train", "budget", "match", "plan", "bench", "config", "study", "frontier")
"""Commands that take any key of a configuration as an option."""
KINDS = dict.fromkeys(SETTINGS, "configuration") | {"study": "study", "data": "mixture", "frontier": "none"}
"""Command -> what of the package it takes by name."""
OF_ACTIONS = {"data show": "configuration", "data build": "none"}
"""Actions of commands that take something else by name."""


def run(arguments: list[str]) -> int:
    """Print the script of a shell, or, after `of`, what the last of the words may become."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in SCRIPTS and arguments[1:]:
        raise UserError(f"completion: it takes the shell alone; leave out {arguments[1]}")
    if arguments[0] == "of":
        print("\n".join(candidates(arguments[1:])))
    elif arguments[0] in SCRIPTS:
        print(SCRIPTS[arguments[0]], end="")
    else:
        raise UserError(f"completion: unknown shell '{arguments[0]}'; one of: {', '.join(SCRIPTS)}")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """What the last word, perhaps empty, may become; none where the shell should offer files.

    Args:
        words: behind `dreamer`, as far as they are written.
    """
    from dreamer_jax.cli.main import COMMANDS

    *before, word = words or [""]
    if not before:
        found = list(COMMANDS)
    elif before[0] not in COMMANDS:
        found = []
    elif before[-1].startswith("--") and "." in before[-1]:
        found = _values(before[-1].removeprefix("--"))
    elif before[-1].startswith("--") and (choices := _choices(before)):
        found = choices
    elif word.startswith("-"):
        found = _options(before)
    else:
        found = _names(before)
    return [each for each in found if each.startswith(word)]


def _names(before: Sequence[str]) -> list[str]:
    """Actions of a command, or names of files of the package."""
    from dreamer_jax.configs import files, name_of

    actions = _actions(before[0]) if len(before) == 1 else []
    kind = OF_ACTIONS.get(" ".join(before[:2]), KINDS.get(before[0]))
    return actions or [name_of(path) for path, its in files().items() if its == kind]


def _actions(command: str) -> list[str]:
    """Of a command with a usage such as `dreamer data prepare ...` or `dreamer checkpoint list|verify|prune ...`."""
    printed = _help([command])
    if several := re.match(rf"usage: dreamer {command} (?:\[-h\] )?([a-z]+(?:\|[a-z]+)+)(?: |$)", printed, re.M):
        return several[1].split("|")
    return list(dict.fromkeys(re.findall(rf"^(?:usage:|      ) dreamer {command} ([a-z][a-z-]*)", printed, re.M)))


def _options(before: Sequence[str]) -> list[str]:
    """The options that a command's help names, and the keys of configurations."""
    from dreamer_jax.cli.main import OPTION
    from dreamer_jax.config.keys import key_types
    from dreamer_jax.config.models import at_hand

    keys = [f"--{key}" for family in at_hand() for key in key_types(family.config)]
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*(?![a-z0-9_.-])", _help([before[0], *_action(before)]))
    settings = before[0] in SETTINGS or list(before[:2]) == ["data", "show"]
    return list(dict.fromkeys([*named, *(keys if settings else []), OPTION]))


def _choices(before: Sequence[str]) -> list[str]:
    """Of an option whose help is such as `--preset {paper,laptop}`."""
    found = re.search(rf"{re.escape(before[-1])} \{{([^}}]*)\}}", _help([before[0], *_action(before)]))
    return re.split(r",\s*", found[1]) if found else []


def _action(before: Sequence[str]) -> list[str]:
    return [word for word in before[1:2] if word in _actions(before[0])]


def _values(key: str) -> list[str]:
    """Of a setting with a choice of values."""
    from dreamer_jax.config.keys import key_types
    from dreamer_jax.config.models import at_hand

    kinds = [its[key] for its in map(key_types, (family.config for family in at_hand())) if key in its]
    if key == "model.family":
        return [family.key for family in at_hand()]
    return [str(value).lower() if isinstance(value, bool) else str(value) for kind in kinds[:1] for value in _all(kind)]


def _all(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [True, False] if kind is bool else [value for part in get_args(kind) for value in _all(part)]


def _help(words: Sequence[str]) -> str:
    """What a command prints for `--help`."""
    from dreamer_jax.cli.main import COMMANDS

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit, UserError):
        importlib.import_module(COMMANDS[words[0]][0]).run([*words[1:], "--help"])
    return printed.getvalue()
