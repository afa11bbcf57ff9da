"""Strict reading of one YAML file and its `base:`: what is written for each key, and in which line.

Nothing is converted here: which keys there are, and of which types, is known once the family of the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dreamer_jax.config.keys import (
    INTEGERS,
    SECTIONS,
    SECTIONS_WITHIN,
    convert,
    did_you_mean,
    key_types,
    sections_within,
    unknown_key,
)
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.configs import matching, nearest_file
from dreamer_jax.errors import ConfigError

_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")
}


@dataclass(frozen=True)
class Line:
    """A key and a value as a file has them.

    Attributes:
        path: the file.
        section: where the key stands; empty for the top level, where no key of a configuration can be.
        name: the key as it is written there.
        key_node, value_node: what the reader made of both.
    """

    path: Path
    section: str
    name: str
    key_node: yaml.Node
    value_node: yaml.Node

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def origin(self) -> str:
        """file:line."""
        return at(self.path, self.key_node)

    def problem(self, model: type[ModelConfig]) -> str | None:
        """Why there can't be such a key for a model of this dataclass; None if there can."""
        if not self.section and self.name in key_types(model):  # `model.depth: 8` at the top level
            section, _, name = self.name.partition(".")
            return f"unknown key '{self.name}'; write '{name}:' on an indented line under '{section}:'"
        return unknown_key(self.key, model)

    def lines(self, model: type[ModelConfig]) -> list[Line]:
        """The lines of a section within the section `model`, which only its family knows to be one; else itself."""
        if self.key not in sections_within(model):
            return [self]
        return [each for line in _read_section(self.path, self.key, self.value_node) for each in line.lines(model)]

    def value(self, expected: Any) -> Any:
        """The value, of the type `expected`.

        Raises:
            ConfigError: it isn't one; the message starts with the file and line.
        """
        return scalar(self.path, self.key, self.value_node, expected)


def read_file(path: Path, parents: tuple[Path, ...] = ()) -> list[Line]:
    """What a file says, after what its base says.

    Args:
        path: the file; its `base:` is relative to its folder.
        parents: the files that lead here by their `base:`, to find cycles.
    Raises:
        ConfigError: a file is missing or broken, or a key doubled.
    """
    return read_text(text_of(path), path, parents)


def read_text(text: str, path: Path, parents: tuple[Path, ...] = ()) -> list[Line]:
    """The same of a text that is at hand; the path is for messages, and for what a `base:` is relative to."""
    root = parse(text, path)
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{at(path, root)}: expected sections such as 'model:', got {describe(root)}")
    return read_sections(path, entries(path, root, prefix=""), parents)


def read_sections(
    path: Path, found: Sequence[tuple[str, yaml.Node, yaml.Node]], parents: tuple[Path, ...] = ()
) -> list[Line]:
    """What sections say, after what their `base:` says; for files that hold configurations among other things.

    Args:
        path, parents: see `read_file`.
        found: the entries of a mapping, see `entries`.
    """
    base: list[Line] = []
    own: list[Line] = []
    for name, key_node, value_node in found:
        if name == "base":
            base = _read_base(path, value_node, (*parents, path))
        elif name in SECTIONS:
            own += _read_section(path, name, value_node)
        else:
            own.append(Line(path, "", name, key_node, value_node))
    return base + own


def text_of(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        ConfigError: it can't be read, or isn't one.
    """
    if path.is_dir():
        saved = path / "config.yaml"
        hint = f"; its configuration is {saved}" if saved.is_file() else "; name a YAML file"
        raise ConfigError(f"{path}: is a directory{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror})") from None


def parse(text: str, path: Path) -> yaml.Node | None:
    """The nodes of a YAML file's text, which know their lines; None when it holds nothing."""
    try:
        # Nodes instead of values: they know their lines, and nothing is converted before its type is known.
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError(f"{path}: not a configuration: it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: character #x{ord(text[error.position]):04x}") from None


def _nearest_file(path: Path) -> str:
    near = nearest_file(path)
    return did_you_mean(near) if near else ""


def entries(path: Path, node: yaml.MappingNode, prefix: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """(name, key node, value node) of a mapping, whose keys must be texts and all different."""
    first_lines: dict[str, int] = {}
    found = []
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{at(path, key_node)}: expected a key, got {describe(key_node)}")
        name = key_node.value
        if name in first_lines:
            raise ConfigError(
                f"{at(path, key_node)}: '{prefix}{name}' is set twice, first on line {first_lines[name]}; remove one",
                key=f"{prefix}{name}",
            )
        first_lines[name] = key_node.start_mark.line + 1
        found.append((name, key_node, value_node))
    return found


def _read_base(path: Path, node: yaml.Node, chain: tuple[Path, ...]) -> list[Line]:
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise ConfigError(f"{at(path, node)}: base: expected the path of one file, got {describe(node)}")
    base = path.parent / node.value
    if base.resolve() in [parent.resolve() for parent in chain]:
        cycle = " -> ".join(str(parent) for parent in (*chain, base))
        raise ConfigError(f"{at(path, node)}: base files form a cycle: {cycle}")
    if not base.is_file():
        packaged = matching(node.value, ("configuration",))
        hint = f"; the package's is {packaged[0]}" if packaged else _nearest_file(base)
        raise ConfigError(f"{at(path, node)}: base: no such file '{base}'{hint}")
    return read_file(base, chain)


def _read_section(path: Path, section: str, node: yaml.Node) -> list[Line]:
    if isinstance(node, yaml.ScalarNode) and is_nothing(node):
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{at(path, node)}: {section}: expected keys and values, got {describe(node)}")
    found: list[Line] = []
    for name, key_node, value_node in entries(path, node, prefix=f"{section}."):
        if f"{section}.{name}" in SECTIONS_WITHIN:
            found += _read_section(path, f"{section}.{name}", value_node)
        else:
            found.append(Line(path, section, name, key_node, value_node))
    return found


def scalar(path: Path, key: str, node: yaml.Node, expected: Any) -> Any:
    """The value of a key of the type `expected`; see `keys.convert`."""
    where = at(path, node)
    if expected == INTEGERS and isinstance(node, yaml.SequenceNode):
        return tuple(scalar(path, key, entry, int) for entry in node.value) or _empty(where, key)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where}: {key}: expected one value, got {describe(node)}", key)
    if node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"{where}: {key}: tags such as {node.tag} are not understood; quote the text", key)
    if is_nothing(node):
        raise ConfigError(f'{where}: {key}: has no value; remove the line, or write "" for an empty text', key)
    try:
        return convert(expected, key, node.value, quoted=node.style is not None)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", key) from None


def _empty(where: str, key: str) -> Any:
    raise ConfigError(f"{where}: {key}: expected integers such as 2 or [4, 4], got an empty list", key)


def is_nothing(node: yaml.ScalarNode) -> bool:
    """Whether nothing is written where a value could be."""
    return node.tag == "tag:yaml.org,2002:null" and node.style is None


def at(path: Path, node: yaml.Node) -> str:
    """file:line of a node."""
    return f"{path}:{node.start_mark.line + 1}"


def describe(node: yaml.Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"'{node.value}'" if node.value else "nothing"
