"""From a file and command line overrides to a checked `Config` that knows where every value came from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from dreamer_jax.config.files import Line, read_file, read_text
from dreamer_jax.config.keys import FAMILY, convert, key_types, sections, unknown_key
from dreamer_jax.config.models import DEFAULT as DEFAULT_FAMILY
from dreamer_jax.config.models import find
from dreamer_jax.config.sections import Config
from dreamer_jax.config.values import ModelConfig
from dreamer_jax.configs import find as find_file
from dreamer_jax.errors import ConfigError

DEFAULT = "default"
COMMAND_LINE = "command line"
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and the origin of each of its values."""

    config: Config
    """The configuration itself."""
    origins: dict[str, str]
    """Dotted key -> "default", "file:line" or "command line"."""


@dataclass(frozen=True)
class Setting:
    """The value of a key that a person set, and where: "file:line" or "command line"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Word:
    """A key and a value as the command line has them, as `Line` is for files.

    Attributes:
        key: what stands after `--`.
        written: the value; None if there is none.
        again: whether the key is there already.
        origin: who wrote it, as messages say.
    """

    key: str
    written: str | None
    again: bool = False
    origin: str = COMMAND_LINE

    def lines(self, model: type[ModelConfig]) -> list[Word]:
        """Itself, as `Line` has lines."""
        return [self]

    def problem(self, model: type[ModelConfig]) -> str | None:
        """Why there can't be such an option for a model of this dataclass; None if there can."""
        again = f"--{self.key} is given twice; remove one" if self.again else None
        return unknown_key(self.key, model, "--") or again

    def value(self, expected: Any) -> Any:
        """The value, of the type `expected`.

        Raises:
            ConfigError: there is none, or of another type; the message starts with `origin`.
        """
        if self.written is None:
            raise ConfigError(f"{self.origin}: --{self.key} needs a value: --{self.key} VALUE", self.key)
        try:
            return convert(expected, self.key, self.written)
        except ConfigError as error:
            raise ConfigError(f"{self.origin}: {error}", self.key) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration: defaults, then the file's `base:`, then the file, then the overrides.

    Args:
        path: a YAML file, or the name of a configuration of the package.
        overrides: command line words, `["--model.depth", "8", "--run.dir=runs/a"]`.
    Raises:
        ConfigError: anything that is wrong, with the file and line (or "command line") it was written in.
    """
    return build(settings_of([*read_file(find_file(path, "configuration")), *split_words(overrides)]))


def load_text(text: str) -> LoadedConfig:
    """The same of the text of a file, such as the one that a checkpoint has of its run."""
    return build(settings_of(read_text(text, Path("config.yaml"))))


def read_overrides(words: Sequence[str]) -> dict[str, Setting]:
    """Command line words -> settings.

    These go through the same conversion and messages as a file's values; tyro, which knows the keys too, only
    writes `--help`. So there is one set of rules, and loading a configuration needs nothing but YAML.

    Raises:
        ConfigError: an option is unknown, doubled, lacks its value or has one of the wrong type.
    """
    return settings_of(split_words(words))


def settings_of(written: Sequence[Line | Word]) -> dict[str, Setting]:
    """Key -> setting, once the family is known: the last `model.family` decides which keys there are.

    Args:
        written: what files and command line say; what comes later counts. What it replaces is checked all the same.
    Raises:
        ConfigError: a key is unknown or one of another family, or a value of the wrong type.
    """
    families = [each for each in written if each.key == FAMILY]
    family = Setting(families[-1].value(str), families[-1].origin) if families else Setting(DEFAULT_FAMILY, DEFAULT)
    model = _model_of(family)
    settings: dict[str, Setting] = {}
    for each in [line for some in written for line in some.lines(model)]:
        if problem := each.problem(model):
            raise ConfigError(f"{each.origin}: {problem}", each.key)
        # A base may name another family than the file that is based on it.
        value = each.value(str if each.key == FAMILY else key_types(model)[each.key])
        settings[each.key] = Setting(value, each.origin)
    return settings


def build(settings: Mapping[str, Setting]) -> LoadedConfig:
    """A checked configuration from settings; what isn't set keeps its default.

    Raises:
        ConfigError: the values contradict each other; the message starts with the origin of the one at fault.
    """
    model = _model_of(settings.get(FAMILY, Setting(DEFAULT_FAMILY, DEFAULT)))
    origins = {key: settings[key].origin if key in settings else DEFAULT for key in key_types(model)}
    try:
        parts = {
            section: _section(section_type, section, settings) for section, section_type in sections(model).items()
        }
        return LoadedConfig(Config(**parts), origins)
    except ConfigError as error:
        raise ConfigError(_with_origin(error, origins), error.key) from None


def _section(section_type: type, name: str, settings: Mapping[str, Setting]) -> Any:
    """A section from the settings of its keys, and the sections in it from theirs."""
    values, hints = {}, get_type_hints(section_type)
    for field in dataclasses.fields(section_type):
        key = f"{name}.{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _section(hints[field.name], key, settings)
        elif key in settings:
            values[field.name] = settings[key].value
    return section_type(**values)


def split_words(words: Sequence[str]) -> list[Word]:
    """Command line words -> keys and values, not yet converted.

    Raises:
        ConfigError: a word is no `--section.key`.
    """
    found: list[Word] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{COMMAND_LINE}: unexpected '{word}'; settings are written --section.key value")
        key, equals, written = word[2:].partition("=")
        if not equals:
            written = None if not remaining or remaining[0].startswith("--") else remaining.pop(0)
        found.append(Word(key, written, any(key == each.key for each in found)))
    return found


def _model_of(family: Setting) -> type[ModelConfig]:
    """The dataclass of a family."""
    try:
        return find(family.value).config
    except ConfigError as error:
        if error.key is None or family.origin == DEFAULT:
            raise
        raise ConfigError(f"{family.origin}: {error}", error.key) from None


def _with_origin(error: ConfigError, origins: Mapping[str, str]) -> str:
    """The message after the place where the key at fault was set, and where the keys it clashes with were."""
    message = str(error)
    named = [key for key in _DOTTED.findall(message) if key in origins and key != error.key]
    own = origins.get(error.key or "", DEFAULT)
    if own == DEFAULT:  # then what a person wrote is one of the others
        wrote = [origins[key] for key in named if origins[key] != DEFAULT]
        return f"{wrote[0]}: {message} ({error.key} has its default)" if wrote else message
    elsewhere = {key: origins[key] for key in named if origins[key] != own}
    notes = [f"{key} {'has its default' if at == DEFAULT else f'is from {at}'}" for key, at in elsewhere.items()]
    return f"{own}: {message}" + (f" ({', '.join(notes)})" if notes else "")
