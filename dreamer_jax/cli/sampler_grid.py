"""`--vary SAMPLER.KEY=VALUE,VALUE ... --depths L,L`: which settings `dreamer bench samplers` goes over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dreamer_jax.cli.arguments import Parser
from dreamer_jax.cli.sampler_options import make_sampler
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from dreamer_jax.benchmarks.samplers import Grid

CACHE = "cache"
"""The one key that belongs to the model."""
FORM = "give SAMPLER.KEY=VALUE,VALUE (or cache=RULE,RULE), and RUN before the options"


def add_grid(parser: Parser) -> None:
    """The options `--vary` and `--depths`."""
    parser.add_argument(
        "--vary",
        nargs="+",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="a sampler's setting over several values, as adaptive.threshold=0.01,0.03,0.1; settings of the same "
        "sampler behind it make a curve for each of their values: lossless.guess_depth=1,2 lossless.wavefront=2,8. "
        "cache=full,latest goes over the model's rules. May be given several times",
    )
    parser.add_argument(
        "--depths", metavar="L,L", help="every token through so many depths, as 4,8,32,64; those a model can't are said"
    )


def read_grids(varied: Sequence[Sequence[str]], depths: str | None) -> list[Grid]:
    """What the options ask for.

    Raises:
        UserError: a word isn't of the form, or there is no such sampler, setting or value.
    """
    from dreamer_jax.benchmarks.samplers import Grid, Setting
    from dreamer_jax.inference import Static

    grids = [_grid([_key(word) for word in words]) for words in varied]
    names = [grid.name for grid in grids]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--vary {twice}=... is given twice; one takes all values, and a curve for each of others")
    if depths is not None:
        values = depths.split(",")
        wrong = next((value for value in values if not value.isdecimal() or int(value) < 1), None)
        if wrong is not None:
            raise UserError(f"--depths {depths}: '{wrong}' is not an integer of 1 or more; give some as 4,8,32")
        points = [(value, "", Setting(Static(), int(value))) for value in values]
        grids.insert(0, Grid("depth", tuple(points)))
    return grids


def _key(word: str) -> tuple[str, list[str]]:
    """ "adaptive.every=1,2" -> ("adaptive.every", ["1", "2"])."""
    key, equals, written = word.partition("=")
    values = written.split(",")
    if not equals or not all(values) or (key != CACHE and "." not in key):
        raise UserError(f"--vary '{word}': {FORM}")
    if len(set(values)) < len(values):
        raise UserError(f"--vary {word}: a value is given twice; remove one")
    return key, values


def _grid(keys: list[tuple[str, list[str]]]) -> Grid:
    """All combinations of the values; the first key is along the curves."""
    from dreamer_jax.benchmarks.samplers import Grid, Setting

    names = list(dict.fromkeys(key.partition(".")[0] for key, _ in keys if key != CACHE)) or ["static"]
    if len(names) > 1:
        raise UserError(f"--vary: {' and '.join(names)} are two samplers; give each a --vary of its own")
    points = []
    for values in itertools.product(*(values for _, values in keys)):
        chosen = list(zip((key for key, _ in keys), values, strict=True))
        own = [(key.partition(".")[2], value) for key, value in chosen if key != CACHE]
        sampler = make_sampler(names[0], own, f"--vary {names[0]}.")
        others = [f"{key.rpartition('.')[2]} {value}" for key, value in chosen[1:]]
        cache = next((value for key, value in chosen if key == CACHE), None)
        points.append((values[0], ", ".join(others), Setting(sampler, None, cache)))
    return Grid(keys[0][0], tuple(points))
