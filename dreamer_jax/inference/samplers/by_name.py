"""Samplers from their names and their settings as a person writes them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from dreamer_jax.config.keys import convert
from dreamer_jax.errors import ConfigError, UserError
from dreamer_jax.inference.samplers import SAMPLERS
from dreamer_jax.inference.samplers.contract import Sampler


def as_written(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings from JSON as a person writes them.

    Raises:
        UserError: one isn't a string, a number, or true or false.
    """
    for key, each in settings.items():
        if isinstance(each, (dict, list)) or each is None:
            raise UserError(f"{key} must be a string, a number, or true or false")
    return {key: each if isinstance(each, str) else json.dumps(each) for key, each in settings.items()}


def sampler_of(name: str, settings: Mapping[str, str], prefix: str) -> Sampler:
    """A sampler.

    Args:
        name: of `SAMPLERS`.
        settings: values as they are written.
        prefix: what stands before the name of a setting in messages.
    Raises:
        UserError: there is no such sampler or setting, or a value is wrong.
    """
    kind = SAMPLERS.get(name)
    if kind is None:
        raise UserError(f"sampler '{name}': there is none of that name; one of {', '.join(SAMPLERS)}")
    types = get_type_hints(kind)
    own = [field.name for field in dataclasses.fields(kind)]
    values = {}
    for key, written in settings.items():
        option = f"{prefix}{key}"
        if key not in own:
            alike = difflib.get_close_matches(key, own, n=1)
            settings_there = ", ".join(prefix + each for each in own) or "none"
            fix = f"did you mean '{prefix}{alike[0]}'?" if alike else f"its settings are: {settings_there}"
            raise UserError(f"the sampler {name} has no setting '{option}'; {fix}")
        try:
            values[key] = convert(types[key], option, written)
        except ConfigError as error:
            raise UserError(str(error)) from None
    try:
        return kind(**values)
    except UserError as error:  # of a sampler "sampler.KEY ..."
        raise UserError(prefix + str(error).removeprefix("sampler.")) from None
