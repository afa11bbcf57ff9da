"""From a file and command line overrides to a checked `Config` that knows where every value came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dreamer_jax.config.files import Setting, read_settings
from dreamer_jax.config.keys import convert, did_you_mean, key_types, nearest_key, sections
from dreamer_jax.config.sections import Config
from dreamer_jax.errors import ConfigError

DEFAULT = "default"
COMMAND_LINE = "command line"
_DOTTED = re.compile(r"[a-z_]+\.[a-z0-9_]+")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and the origin of each of its values."""

    config: Config
    """The configuration itself."""
    origins: dict[str, str]
    """Dotted key -> "default", "file:line" or "command line"."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration: defaults, then the file's `base:`, then the file, then the overrides.

    Args:
        path: a YAML file.
        overrides: command line words, `["--model.depth", "8", "--run.dir=runs/a"]`.
    Raises:
        ConfigError: anything that is wrong, with the file and line (or "command line") it was written in.
    """
    settings = read_settings(Path(path))
    settings |= read_overrides(overrides)
    return build(settings)


def read_overrides(words: Sequence[str]) -> dict[str, Setting]:
    """Command line words -> settings.

    These go through the same conversion and messages as a file's values; tyro, which knows the schema too, only
    writes `--help`. So there is one set of rules, and loading a configuration needs nothing but YAML.

    Raises:
        ConfigError: an option is unknown, doubled, lacks its value or has one of the wrong type.
    """
    found: dict[str, Setting] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{COMMAND_LINE}: unexpected '{word}'; settings are written --section.key value")
        key, equals, written = word[2:].partition("=")
        if key not in key_types():
            raise ConfigError(f"{COMMAND_LINE}: unknown option '--{key}'{did_you_mean(nearest_key(key), '--')}", key)
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: --{key} needs a value: --{key} VALUE", key)
            written = remaining.pop(0)
        if key in found:
            raise ConfigError(f"{COMMAND_LINE}: --{key} is given twice; remove one", key)
        try:
            found[key] = Setting(convert(key, written), COMMAND_LINE)
        except ConfigError as error:
            raise ConfigError(f"{COMMAND_LINE}: {error}", key) from None
    return found


def build(settings: Mapping[str, Setting]) -> LoadedConfig:
    """A checked configuration from settings; what isn't set keeps its default.

    Raises:
        ConfigError: the values contradict each other; the message starts with the origin of the one at fault.
    """
    origins = {key: settings[key].origin if key in settings else DEFAULT for key in key_types()}
    try:
        parts = {
            section: section_type(
                **{
                    key.partition(".")[2]: setting.value
                    for key, setting in settings.items()
                    if key.startswith(f"{section}.")
                }
            )
            for section, section_type in sections().items()
        }
        return LoadedConfig(Config(**parts), origins)
    except ConfigError as error:
        raise ConfigError(_with_origin(error, origins), error.key) from None


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
