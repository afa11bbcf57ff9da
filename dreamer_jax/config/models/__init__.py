"""Settings of the section `model`, one file and one dataclass a family, and the register of families.

A family is found by its key, `model.family`:

- built in: its file here, `<key>.py` with `CONFIG`, and dreamer_jax/families/<key>.py with `CORE`;
- from outside of the package: one module with both, named by an entry point of the group `dreamer_jax.families`
  (name = key, value = module), or by `--family-module` on the command line, as a module or as a .py file.

`CONFIG` is a frozen dataclass whose first field is `family: Literal["key"] = "key"`, `CORE` the model's class
(dreamer_jax/families/contract.py). A module is imported when its family is asked for; that of `--family-module` always,
because it alone knows its key.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.abc
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dreamer_jax.config.values import ModelConfig
from dreamer_jax.errors import ConfigError

DEFAULT = "dreamer"
ENTRY_POINTS = "dreamer_jax.families"
BUILT_IN = "built in"
OPTION = "--family-module"
VARIABLE = "DREAMER_FAMILY_MODULE"
"""Environment variable in which the command line leaves the values of `--family-module`, for child processes; between
them stands what stands between the folders of PATH.

A run's config.yaml never names code to import, because a run directory may come from somebody else. So whoever starts a
killed run again gives the same command line again, `--family-module` included."""


@dataclass(frozen=True)
class Registered:
    """A family of models.

    Attributes:
        key: its name in `model.family`.
        config: the dataclass of its section `model`.
        core: the module with its model, `CORE`; imported when a model is built, because that takes jax.
        origin: how it was found, in words.
    """

    key: str
    config: type[ModelConfig]
    core: str
    origin: str


@dataclass(frozen=True)
class _Place:
    """Where a family is said to be; nothing of it needs to be imported yet."""

    key: str
    module: str
    origin: str


def find(key: str) -> Registered:
    """The family of this key.

    Raises:
        ConfigError: there is none, there are several, or its module can't be used.
    """
    places = _places()
    mine = [place for place in places if place.key == key]
    if not mine:
        keys = sorted({place.key for place in places})
        alike = difflib.get_close_matches(key, keys, n=1)
        hint = f"; did you mean '{alike[0]}'?" if alike else ""
        raise ConfigError(
            f"model.family: unknown family '{key}'{hint} "
            f"(known: {', '.join(keys)}; one from outside of the package needs {OPTION} FILE_OR_MODULE, "
            "or in Python load(..., family_module=FILE_OR_MODULE))",
            "model.family",
        )
    if len(mine) > 1:
        origins = " and ".join(place.origin for place in mine)
        raise ConfigError(
            f"model.family: family '{key}' is there twice: {origins}; rename or remove one", "model.family"
        )
    return _registered(mine[0])


def key_of(config: type[ModelConfig]) -> str:
    """The key of the family that a dataclass belongs to."""
    default: Any = config.__dataclass_fields__["family"].default
    return default


def known() -> tuple[str, ...]:
    """The keys of all families."""
    return tuple(sorted({place.key for place in _places()}))


def at_hand() -> tuple[Registered, ...]:
    """The families that can be looked at without importing what nobody asked for: all but those of entry points."""
    return tuple(_registered(place) for place in (*_built_in(), *_given()))


def give(*modules: str) -> None:
    """Make families known, here and in child processes, beside those that are; a file takes the place of one of its
    name.

    Args:
        modules: values of `--family-module`.
    Raises:
        ConfigError: there is no such file, or two of them have one name.
    """
    new = [_lasting(module) for module in modules]
    given = {_name_of(each): each for each in (*_values(), *new)}
    for each in new:
        if given[_name_of(each)] != each:
            raise ConfigError(f"{OPTION}: {each} and {given[_name_of(each)]} have one name; rename one of them")
    os.environ[VARIABLE] = os.pathsep.join(given.values())


def give_working(module: str) -> None:
    """`give`, of a module that is imported at once: one that can't be used is given back, so that whatever is loaded
    next in this process isn't looked for in it.

    Raises:
        ConfigError: it can't be used.
    """
    before = os.environ.get(VARIABLE, "")
    give(module)
    try:
        _place_of(_lasting(module))
    except BaseException:
        os.environ[VARIABLE] = before
        if _is_file_name(module):
            sys.modules.pop(_name_of(module), None)  # it may be mended and given again
        raise


def _values() -> list[str]:
    return [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]


def _lasting(text: str) -> str:
    """The value of `--family-module` as child processes can use it: a module's name, or a file's absolute path.

    Raises:
        ConfigError: there is no such file.
    """
    if not _is_file_name(text):
        return text
    if not Path(text).is_file():
        raise ConfigError(f"{OPTION} {text}: no such file; name a .py file, or a module such as package.module")
    path = os.path.abspath(text)
    if os.pathsep in path:
        raise ConfigError(f"{OPTION} {text}: its path has a '{os.pathsep}'; move or link it to one without")
    return path


def _places() -> list[_Place]:
    return [*_built_in(), *_given(), *_installed(tuple(sys.path))]


@functools.cache
def _installed(path: tuple[str, ...]) -> tuple[_Place, ...]:
    """The families of entry points. Looking through everything that is installed on `path` takes milliseconds."""
    found = []
    for point in metadata.entry_points(group=ENTRY_POINTS):
        package = f" of package {point.dist.name}" if point.dist else ""
        found.append(_Place(point.name, point.module, f"entry point '{point.name} = {point.value}'{package}"))
    return tuple(found)


def _built_in() -> list[_Place]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [_Place(name, f"{__name__}.{name}", BUILT_IN) for name in names]


def _given() -> list[_Place]:
    """The families of `--family-module`."""
    return [_place_of(each) for each in _values()]


def _place_of(given: str) -> _Place:
    name, path, origin = _name_of(given), _lasting(given), f"{OPTION} {given}"
    if _is_file_name(given) and getattr(sys.modules.get(name), "__file__", path) != path:
        del sys.modules[name]  # another file of this name, in this process
    return _Place(key_of(_config_of(_import(name, origin), origin)), name, origin)


def _registered(place: _Place) -> Registered:
    if place.origin == BUILT_IN:
        config, core = importlib.import_module(place.module).CONFIG, f"dreamer_jax.families.{place.key}"
        return Registered(place.key, config, core, place.origin)
    config = _config_of(_import(place.module, place.origin), place.origin)
    if key_of(config) != place.key:
        raise ConfigError(
            f"{place.origin}: CONFIG is of family '{key_of(config)}'; the entry point must have that name"
        )
    return Registered(place.key, config, place.module, place.origin)


def _import(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:  # anything else is a defect of the module, and its traceback says where
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        hint = "; name an installed module, or a file that ends in .py" if absent else ""
        raise ConfigError(f"{origin}: can't be imported: {error}{hint}") from error


def _config_of(module: ModuleType, origin: str) -> type[ModelConfig]:
    """`CONFIG` of a module from outside, which must be complete."""
    for name in ("CONFIG", "CORE"):
        if not hasattr(module, name):
            raise ConfigError(
                f"{origin}: has no {name}; a family's module defines CONFIG, a dataclass, and CORE, a model"
            )
    config = module.CONFIG
    frozen = isinstance(config, type) and getattr(getattr(config, "__dataclass_params__", None), "frozen", False)
    field = config.__dataclass_fields__.get("family") if frozen else None
    if field is None or not isinstance(field.default, str):
        raise ConfigError(f'{origin}: CONFIG must be a frozen dataclass with a field `family: Literal["key"] = "key"`')
    needed = ("hidden_size", "vocab_size", "dtype", "implementation")
    if missing := [name for name in needed if name not in config.__dataclass_fields__ and not hasattr(config, name)]:
        raise ConfigError(f"{origin}: CONFIG has no {', '.join(missing)}; every family has {', '.join(needed)}")
    return config


def _is_file_name(text: str) -> bool:
    return text.endswith(".py") or not all(part.isidentifier() for part in text.split("."))


def _name_of(given: str) -> str:
    """The name under which a value of `--family-module` is imported."""
    return "dreamer_family_" + re.sub(r"\W", "_", Path(given).stem) if _is_file_name(given) else given


class _GivenFile(importlib.abc.MetaPathFinder):
    """Makes the file of `--family-module` importable by its name wherever that is asked for.

    A spawned process that unpickles a configuration asks before anybody has looked for a family."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for given in _values():
            if _is_file_name(given) and fullname == _name_of(given):
                return importlib.util.spec_from_file_location(fullname, os.path.abspath(given))
        return None


sys.meta_path.append(_GivenFile())
