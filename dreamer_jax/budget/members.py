"""A matched set, every variant of a family at several depths, and matched models as configuration files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from dreamer_jax.budget import matching
from dreamer_jax.config import Config, load_config, to_yaml
from dreamer_jax.config.keys import values_of
from dreamer_jax.configs import FOLDER
from dreamer_jax.errors import UserError
from dreamer_jax.families import build as build_model


@dataclass(frozen=True)
class Member:
    """One model of a set; its match is to the baseline at the same depth."""

    name: str
    match: matching.Match


def build(
    sizes: Any, baseline: Any, depths: list[int], variants: list[str], context: int, granularity: int
) -> list[Member]:
    """Every variant at every depth, matched to the baseline at that depth (which keeps its own knobs' values).

    Args:
        sizes: the section `model` of the members, but for variant, depth and the knobs.
        baseline: what the members cost, once it is set to their depth.
        depths, variants: of the members.
        context, granularity: as in `matching.match`.
    Raises:
        UserError: an unknown variant, or a budget that can't be met.
    """
    known = get_args(get_type_hints(type(sizes)).get("variant"))
    if not known or not hasattr(sizes, "depth"):
        raise UserError(f"models of the family {sizes.family} have no variants to make a matched set of")
    members = []
    for depth in depths:
        reference = build_model(replace(baseline, depth=depth))
        for variant in variants:
            if variant not in known:
                raise UserError(f"unknown variant '{variant}'; use some of {','.join(known)}")
            model = build_model(replace(sizes, variant=variant, depth=depth))
            target = matching.target_of(reference, model, context)
            knobs = {knob.key: getattr(reference.config, knob.key) for knob in model.knobs()}
            if matching.changed(model, knobs) == reference:
                found = matching.Match(reference, matching.cost(reference, context), target, ())
            else:
                found = matching.match(model, target, context, granularity)
            members.append(Member(file_stem(variant, depth), found))
    return members


def file_stem(variant: str, depth: int) -> str:
    """("DR+DA", 16) -> "dr_da_16"."""
    return f"{variant.lower().replace('+', '_')}_{depth}"


MARK = "# Written by `dreamer match`: "
"""How a file of `dreamer match` begins, by which it is known."""


def write(model: Any, base: Path, out: Path, comment: str) -> None:
    """Write a configuration that is `base` but for the values in which `model` differs.

    Args:
        model: the model the file shall describe.
        base: an existing configuration; the file refers to it by a relative `base:`. A file outside of the package
            holds all values instead of referring into the package, which may be replaced or lie elsewhere tomorrow.
        out: the file; its folder is made, an old file that `dreamer match` wrote is replaced.
        comment: of the file's first line, after `MARK`.
    Raises:
        UserError: `out` is a file that `base` itself is made of, or another than `dreamer match` writes, or can't be
            written.
    """
    loaded = load_config(base)
    made_of = {base.resolve()} | {Path(origin.rpartition(":")[0]).resolve() for origin in loaded.origins.values()}
    if out.resolve() in made_of:
        raise UserError(f"{out}: {base} is made of this file, so it can't be written on top of it; name another")
    if out.is_file() and not out.read_bytes().startswith(MARK.encode()):
        raise UserError(f"{out}: exists, and isn't a file of `dreamer match`; name another, or remove it first")
    if base.resolve().is_relative_to(FOLDER) and not out.resolve().is_relative_to(FOLDER):
        text = to_yaml(replace(loaded.config, model=model))
    else:
        mine = values_of(Config(model=model))
        theirs = values_of(Config(model=loaded.config.model))
        changed = [f"  {key.partition('.')[2]}: {mine[key]}" for key in mine if mine[key] != theirs[key]]
        lines = [f"base: {_relative(base, out.parent)}", "", *(["model:", *changed] if changed else [])]
        text = "\n".join(lines).rstrip() + "\n"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f"{MARK}{comment}\n{text}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: can't be written ({error.strerror})") from None


def _relative(base: Path, folder: Path) -> str:
    return Path(os.path.relpath(base.resolve(), folder.resolve())).as_posix()
