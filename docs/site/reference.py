"""The pages of the reference, written from the code: commands, settings, and the front door in Python.

python docs/site/reference.py FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints
from unittest import mock

from docstrings import docstring, field_docstrings, prose, table, type_name, value_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("commands", "configuration", "models", "python", "contributing", "changelog")
"""What `write` writes, without `.md`; the site's link check asks for it."""
SETTINGS = "Every setting of a [configuration](configuration.md) is an option: `--section.key VALUE`.\n"


def version() -> str:
    """Of the package."""
    from dreamer_jax import __version__

    return __version__


def write(folder: Path) -> None:
    """Write all pages; one that hasn't changed keeps its time, so that Sphinx needn't read it again."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "commands": commands(),
        "configuration": configuration(),
        "models": models(),
        "python": python(),
        "contributing": from_root("CONTRIBUTING.md"),
        "changelog": from_root("CHANGELOG.md"),
    }
    assert tuple(texts) == PAGES
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def from_root(name: str) -> str:
    """A page of the checkout's root, with its links as seen from the folder of the reference."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](../")


# Commands


class _Seen(BaseException):
    """Raised in place of parsing: the parser is complete."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_or_help(module: str, words: Sequence[str]) -> argparse.ArgumentParser | str:
    """The parser of a command, or, where it has none, what it prints for `--help`."""
    from dreamer_jax.cli.arguments import Parser

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise _Seen(self)

    printed = io.StringIO()
    try:
        with mock.patch.object(Parser, "parse_args", stop), contextlib.redirect_stdout(printed):
            importlib.import_module(module).run([*words, "--help"])
    except _Seen as seen:
        return seen.parser
    return printed.getvalue().strip()


def commands() -> str:
    """The page of commands."""
    from dreamer_jax.cli.main import COMMANDS, OPTION

    parts = [
        "# Commands\n",
        "Written from the program itself; `dreamer COMMAND --help` says the same. Exit codes: 0 success, 2 something "
        "that you can mend (one line says what), 130 interrupted; of `dreamer train` also "
        "[75](../checkpoints.md#being-stopped).\n",
        f"`{OPTION} FILE_OR_MODULE`, with any command: a family of models from outside of the package "
        "([how](../add_family.md)).\n",
        table(("command", ""), [(f"[`dreamer {name}`](#dreamer-{name})", prose(its)) for name, (_, its) in
                                COMMANDS.items()]),
    ]  # fmt: skip
    for name, (module, summary) in COMMANDS.items():
        parts += [f"## dreamer {name}\n", *_command(module, name, f"{summary[0].upper()}{summary[1:]}.\n")]
    return "\n".join([*parts, samplers(), *launching()])


def _command(module: str, name: str, summary: str) -> Iterator[str]:
    """What the page says of one command, actions included; a parser's own description says more than the summary."""
    if name == "train":  # its options are the settings
        from dreamer_jax.cli.train import PROCESSES

        yield summary
        usage = "usage: dreamer train CONFIG [--section.key value ...]"
        yield f"```text\n{usage}\n\n{PROCESSES.strip()}\n```\n\n{SETTINGS}"
        return
    found = parser_or_help(module, [])
    if isinstance(found, argparse.ArgumentParser):
        yield from _options(found)
        return
    yield f"{summary}\n```text\n{found}\n```\n"
    for action in dict.fromkeys(re.findall(rf"^(?:usage:|      ) dreamer {name} ([a-z-]+) ", found, re.MULTILINE)):
        inner = parser_or_help(module, [action])
        if isinstance(inner, argparse.ArgumentParser):
            yield f"### dreamer {name} {action}\n"
            yield from _options(inner)


def _options(parser: argparse.ArgumentParser, level: int = 3) -> Iterator[str]:
    """Usage, description and options of a parser, and of the parsers within it."""
    if parser.description:
        yield f"{prose(parser.description)}\n"
    with mock.patch.dict(os.environ, COLUMNS="100"):  # argparse asks how wide the terminal is
        yield f"```text\n{parser.format_usage().strip()}\n```\n"
    rows, inner = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = [(choice, its) for choice, its in action.choices.items()]
        elif not isinstance(action, argparse._HelpAction):
            rows.append((_written(action), prose((action.help or "") % {"prog": parser.prog})))
    if rows:
        yield table(("option", ""), rows)
    if parser.epilog:
        yield f"{prose(parser.epilog)}\n"
    for choice, its in inner:
        yield f"{'#' * level} {parser.prog} {choice}\n"
        yield from _options(its, level + 1)


def _written(action: argparse.Action) -> str:
    """An option as it is typed."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = str(value).replace("|", "\\|")
    if not action.option_strings:
        return f"`{value}`"
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{option}{takes}`" for option in action.option_strings)


def samplers() -> str:
    """Settings of every sampler."""
    from dreamer_jax.inference import SAMPLERS

    parts = ["## Settings of samplers\n", "Of `dreamer generate`, `chat` and `eval`; see [samplers](../samplers.md).\n"]
    for name, kind in SAMPLERS.items():
        parts += [f"### --sampler {name}\n", docstring(kind)]
        parts += [fields_table(kind, "--sampler.")] if dataclasses.fields(kind) else ["No settings.\n"]
    return "\n".join(parts)


def launching() -> Iterator[str]:
    """What starts runs in the cloud."""
    from dreamer_jax.launching import cli
    from dreamer_jax.launching.settings import Settings

    yield "\n## bash launch/tpu\n"
    yield "Runs on TPU VMs; [how](../running.md#one-tpu-vm). `bash launch/gke/jobset` takes the same settings.\n"
    parser = cli._parser()
    (actions,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    rows = [(f"`{name} NAME`", prose(its.description or "")) for name, its in actions.choices.items()]
    yield table(("command", ""), rows)
    own: dict[str, str] = {}
    settings = {f"--{name.replace('_', '-')}" for name in field_docstrings(Settings)}
    for its in actions.choices.values():
        for action in its._actions:
            if action.option_strings and action.help and not settings & set(action.option_strings):
                own.setdefault(_written(action), prose(action.help))
    yield table(("option", ""), [row for row in own.items() if "--help" not in row[0]])
    yield "Settings, as options or in a TOML file with `_` for `-`:\n"
    rows = [
        (
            f"`--{field.name.replace('_', '-')}`",
            value_text(field.default),
            prose(field_docstrings(Settings)[field.name]),
        )
        for field in dataclasses.fields(Settings)
        if field.name not in ("name", "options")
    ]
    yield table(("setting", "default", "meaning"), rows)


# Settings


def fields_table(kind: type, prefix: str) -> str:
    """A row for every field that holds a value: key, type, default, meaning."""
    hints, said, rows = get_type_hints(kind), field_docstrings(kind), []
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        shown = "none" if default == {} else value_text(default)
        rows.append((f"`{prefix}{field.name}`", type_name(annotation), shown, prose(said.get(field.name, ""))))
    return table(("key", "type", "default", "meaning"), rows)


def within(kind: type, name: str) -> Iterator[tuple[str, type]]:
    """A section and the sections in it, by their dotted names."""
    yield name, kind
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from within(hints[field.name], f"{name}.{field.name}")


def configuration() -> str:
    """The page of settings that all models share, and of the files that prepare data."""
    from dreamer_jax.config.sections import Config
    from dreamer_jax.data.mixture import BenchmarkSpec, Mixture, SourceSpec

    parts = [
        "# Configuration\n",
        "A configuration is a YAML file of sections; any key is also an option, `--section.key VALUE`. What a file and "
        "the command line leave out has the default here. `dreamer config show NAME` prints the values of a "
        "configuration and where each comes from; `base: other.yaml` in a file builds on another file. Unknown keys, "
        "keys given twice and wrong types are refused with file, line and the nearest name.\n",
        "The section `model` has the settings of the model's family: [settings of models](models.md).\n",
    ]
    for field in dataclasses.fields(Config):
        if field.name != "model":
            for name, kind in within(get_type_hints(Config)[field.name], field.name):
                parts += [f"## {name}\n", docstring(kind), fields_table(kind, f"{name}.")]
    parts += ["## Mixtures\n", "The file of `dreamer data prepare`; [an example](../data.md#the-mixture-file).\n"]
    for name, kind in within(Mixture, ""):
        prefix = f"{name.lstrip('.')}." if name else ""
        parts += [f"### {prefix.rstrip('.')}\n" if prefix else "", docstring(kind), fields_table(kind, prefix)]
    for name, kind in (("sources.NAME", SourceSpec), ("decontaminate.benchmarks.NAME", BenchmarkSpec)):
        parts += [f"### {name}\n", docstring(kind), fields_table(kind, f"{name}.")]
    return "\n".join(parts)


def models() -> str:
    """The page of settings of every family."""
    from dreamer_jax.config.models import BUILT_IN, at_hand

    parts = [
        "# Settings of models\n",
        "`model.family` says which of these the section `model` has. `dreamer config show NAME` prints those of a "
        "configuration.\n",
    ]
    for family in at_hand():
        if family.origin == BUILT_IN:
            parts += [f"## {family.key}\n", docstring(family.config), fields_table(family.config, "model.")]
    return "\n".join(parts)


# Python


def signature(thing: Any, name: str) -> str:
    """A call as a person types it, without annotations."""
    plain = inspect.signature(thing)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in plain.parameters.values() if p.name != "self"]
    shown = plain.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    text = f"{name}{shown}"
    if len(text) > 90:  # an argument a line
        text = "\n".join([f"{name}(", *(f"    {line}," for line in str(shown)[1:-1].split(", ")), ")"])
    return f"```python\n{text}\n```\n"


def python() -> str:
    """The page of the front door."""
    import dreamer_jax
    from dreamer_jax.inference import Sampling, Scores, Text

    parts = [
        "# In Python\n",
        "`dreamer_jax.load` opens a trained model; everything else is a method of what it returns. "
        "[Generating text](../inference.md#from-python) shows them in use.\n",
    ]
    for name in dreamer_jax.__all__:
        thing = getattr(dreamer_jax, name)
        if inspect.isfunction(thing):
            parts[2:2] = [f"## {name}\n", signature(thing, f"dreamer_jax.{name}"), docstring(thing)]
        elif inspect.isclass(thing):
            parts += [f"## {name}\n", docstring(thing)]
            for key, member in vars(thing).items():
                if not key.startswith("_"):
                    call = signature(member, f"model.{key}") if inspect.isfunction(member) else ""
                    parts += [f"### model.{key}\n", call, docstring(member)]
    parts += ["## What it returns\n"]
    for thing in (Text, Scores, Sampling):
        parts += [f"### {thing.__name__}\n", docstring(thing)]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    write(Path(sys.argv[1]))
