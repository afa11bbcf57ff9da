"""The pages of the reference are made of the code: every command, option, setting and call is on them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from pathlib import Path

import pytest

import dreamer_jax
from dreamer_jax.cli.main import COMMANDS, main
from dreamer_jax.config.keys import key_types
from dreamer_jax.config.models import BUILT_IN, at_hand

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs/site"))

import docstrings  # noqa: E402
import picture  # noqa: E402
import reference  # noqa: E402

FAMILIES = [family for family in at_hand() if family.origin == BUILT_IN]
ACTIONS = ["bench train", "bench generate", "checkpoint prune", "data", "config"]


@pytest.fixture(scope="module")
def commands() -> str:
    return reference.commands()


@pytest.fixture(scope="module")
def rows() -> dict[str, list[list[str]]]:
    """Key -> the cells of each of its rows, on both pages of settings."""
    found: dict[str, list[list[str]]] = {}
    for text in (reference.configuration(), reference.models()):
        for line in text.splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                found.setdefault(cells[0].strip("`"), []).append(cells[1:])
    return found


@pytest.mark.parametrize("words", [name for name in COMMANDS if name != "train"] + ACTIONS)
def test_every_option_of_the_help_is_on_the_page(words, commands):
    """`--help` itself is asked, which the page isn't made from where a command has a parser."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*words.split(), "--help"]) == 0
    part = commands.partition(f"\n## dreamer {words.split()[0]}\n")[2].partition("\n## ")[0]
    assert part
    options = set(re.findall(r"--[a-z][a-z.-]*[a-z]", printed.getvalue())) - {"--help", "--section.key"}
    assert not {option for option in options if option not in part}


def test_every_command_has_a_row_and_a_heading(commands):
    for name in COMMANDS:
        assert f"[`dreamer {name}`](#dreamer-{name})" in commands and f"\n## dreamer {name}\n" in commands


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.key)
def test_every_setting_has_type_default_and_meaning(family, rows):
    text = reference.models().partition(f"\n## {family.key}\n")[2].partition("\n## ")[0]
    defaults = {f"model.{field.name}": field.default for field in dataclasses.fields(family.config)}
    for key in key_types(family.config):
        assert key in rows, key
        for kind, default, meaning in rows[key]:
            assert kind and default and len(meaning) > 5, f"{key} has no docstring"
        if key in defaults:
            (line,) = (line for line in text.splitlines() if line.startswith(f"| `{key}` |"))
            assert f"| {docstrings.value_text(defaults[key])} |" in line


def test_the_front_door_is_whole():
    text = reference.python()
    public = [name for name in vars(dreamer_jax.Model) if not name.startswith("_")]
    assert {"logits", "states", "generate", "score"} <= set(public)
    for name in public:
        assert f"### model.{name}\n" in text
    assert (
        "dreamer_jax.load(\n    path,\n    *,\n    step=None," in text
        and "- `average`: the parameters are the mean" in text
    )


def test_docstrings_become_markdown():
    def called(first, second):
        """What it does, `a|b`; see docs/depth_scan.md.

        Args:
            first: of x_0,
                and more.
            second: other.
        Returns:
            a thing.
        """

    assert docstrings.docstring(called) == (
        "What it does, `a|b`; see [depth_scan](../depth_scan.md).\n\n"
        "**Args**\n\n- `first`: of x_0,\n  and more.\n- `second`: other.\n\n**Returns**\n\na thing.\n"
    )
    assert docstrings.prose("x_0 | `a|b_c` <x>\n  see docs/depth_recurrent.md") == (
        "x\\_0 \\| `a\\|b_c` &lt;x> see [depth\\_recurrent](../depth_recurrent.md)"
    )

    @dataclasses.dataclass
    class Base:
        a: int = 1
        """First."""
        b: str = ""

    @dataclasses.dataclass
    class Child(Base):
        a: int = 2
        """Second,
        again."""

    assert dict(docstrings.field_docstrings(Child)) == {"a": "Second, again."}


def test_the_picture_is_what_its_script_draws():
    assert picture.OUT.read_text(encoding="utf-8") == picture.picture()


@pytest.mark.parametrize(
    ("command", "pages"),
    [("generate", "inference"), ("serve", "serving inference"), ("export", "export"), ("analyze", "analysis")],
)
def test_pages_name_all_options_of_their_command(command: str, pages: str) -> None:
    """Other pages send readers there for them."""
    parser = importlib.import_module(f"dreamer_jax.cli.{command}")._parser()
    options = {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in pages.split())
    assert "--help" in options and not [
        word for word in options - {"--help"} if f"{word}`" not in text.replace(" ", "`")
    ]
