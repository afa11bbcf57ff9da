"""`dreamer match`: give one model the parameters and FLOPs of another (section 3.8), or make a whole matched family."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dreamer_jax.budget import matching, members
from dreamer_jax.budget.report import table
from dreamer_jax.cli.arguments import Parser, positive, split_overrides
from dreamer_jax.cli.budget import with_depth
from dreamer_jax.config import load_config
from dreamer_jax.configs import find
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, build

PAPER_BASELINE = "la_16"
VARIANTS = "LA,DR,DR+DA"
MOST = 1e30
"""Parameters or FLOPs: more aren't searched for."""


def run(arguments: list[str]) -> int:
    """Match one model, or a family; returns the exit code."""
    words, overrides = split_overrides(arguments)
    for word in overrides:
        if word.startswith("--") and not word.startswith("--model."):
            raise UserError(f"match: {word} has no part in matching; only --model.* settings have")
    options = _parser().parse_args(words)
    if options.family:
        options.variants = options.variants or VARIANTS
        return _family(options, overrides)
    if options.variants:
        raise UserError("match: --variants are of --family")
    return _single(options, overrides)


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer match",
        usage="dreamer match CONFIG --to BASELINE [options] [--section.key value ...]\n"
        "       dreamer match CONFIG [--params N] [--flops N] [options]\n"
        "       dreamer match --family DEPTHS [--variants LA,DR,DR+DA] [--to BASELINE] [--write DIR]",
        description="Search the setting that moves the FLOPs per token (Dreamer's expert_size) and the one that moves "
        "the parameters (num_experts) until both are closest to a baseline's (section 3.8), whatever CONFIG says.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="the model to match: a YAML file, or a name such as dr_16"
    )
    parser.add_argument("--to", metavar="BASELINE", help=f"the model to cost the same as (family: {PAPER_BASELINE})")
    parser.add_argument("--params", type=_number, help="parameters to reach, instead of a baseline's; e.g. 1.17e9")
    parser.add_argument("--flops", type=_number, help="FLOPs per token to reach, instead of a baseline's; e.g. 0.94e9")
    parser.add_argument("--depth", type=positive, help="depth of both models, instead of their files'")
    parser.add_argument(
        "--hold",
        choices=("both", "flops", "params"),
        default="both",
        help="which quantity is made equal: flops moves only the one setting, params only the other (both)",
    )
    parser.add_argument("--granularity", type=positive, default=8, help="of which expert_size is a multiple (8)")
    parser.add_argument("--context", type=positive, default=1024, help="tokens of a generated sequence (1024)")
    parser.add_argument("--family", metavar="DEPTHS", type=_depths, help="a matched family, e.g. 8,16,24,32,48")
    parser.add_argument("--variants", metavar="NAMES", help=f"variants of the family ({VARIANTS})")
    parser.add_argument("--write", metavar="PATH", help="write the matched model there; of a family, a folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _single(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.config is None:
        raise UserError("match: no configuration is named; `dreamer match --help` shows the usage")
    model = build(with_depth(load_config(options.config, overrides), options.depth).model)
    found = matching.match(model, _target(options, model), options.context, options.granularity, options.hold)
    if options.write:
        goal = find(options.to, "configuration").name if options.to else "given budgets"
        comment = f"{_kind(model)} matched to {goal}: {_gap_text(found)}."
        members.write(found.family.config, find(options.config, "configuration"), Path(options.write), comment)
    print(json.dumps(_json(found), indent=2) if options.json else _text(found, options.write))
    return 0


def _target(options: argparse.Namespace, model: Family) -> matching.Target:
    """The budgets: a baseline's, or those given as numbers."""
    given = [name for name in ("params", "flops") if getattr(options, name) is not None]
    if options.to and given:
        raise UserError(f"match: --to and --{given[0]} both name a budget; use one of them")
    if options.to:
        baseline = build(with_depth(load_config(options.to), options.depth).model)
        return matching.target_of(baseline, model, options.context)
    if not given:
        raise UserError("match: nothing to match to; name a baseline with --to, or budgets with --params and --flops")
    if options.hold not in ("both", *given):
        raise UserError(f"match: --hold {options.hold} needs --{options.hold} too")
    return matching.Target(
        params=None if options.params is None else round(options.params),
        flops_per_token=options.flops,
        # The descent's start: the same whatever the file says.
        starts={knob.key: knob.smallest if knob.fine else options.granularity for knob in model.knobs()},
    )


def _family(options: argparse.Namespace, overrides: list[str]) -> int:
    for name in ("params", "flops", "depth"):
        if getattr(options, name) is not None:
            raise UserError(f"match: --{name} has no meaning for a family; leave it out")
    if options.hold != "both":
        raise UserError("match: --hold has no meaning for a family; leave it out")
    baseline_path = options.to or options.config or PAPER_BASELINE
    sizes_path = options.config or baseline_path
    baseline = load_config(baseline_path, overrides).config.model
    sizes = load_config(sizes_path, overrides).config.model
    variants = [name.strip().upper() for name in options.variants.split(",") if name.strip()]
    if not variants or len(set(variants)) < len(variants):
        raise UserError(f"match: --variants {options.variants} names none, or one twice; use some of {VARIANTS}")
    found = members.build(sizes, baseline, options.family, variants, options.context, options.granularity)
    if options.write:
        folder, base, goal = Path(options.write), *(find(path, "configuration") for path in (sizes_path, baseline_path))
        for member in found:
            model = member.match.family
            comment = f"{_kind(model)} at depth {model.depth}, the baseline of its family."
            if member.match.iterations:
                comment = f"{_kind(model)} at depth {model.depth}, matched to {goal.name} at this depth: "
                comment += f"{_gap_text(member.match)}."
            members.write(model.config, base, folder / f"{member.name}.yaml", comment)
    if options.json:
        print(json.dumps([{"name": member.name, **_json(member.match)} for member in found], indent=2))
    else:
        print(_family_table(found))
        if options.write:
            print(f"\nwritten to {options.write}: " + " ".join(f"{member.name}.yaml" for member in found))
    return 0


def _json(found: matching.Match) -> dict[str, Any]:
    target, keys = found.target, _keys(found.family)
    cost = {"params": found.cost.params, "flops_per_token": found.cost.flops_per_token}
    baseline = {"params": target.params, "flops_per_token": target.flops_per_token}
    return {
        "variant": _kind(found.family),
        "depth": found.family.depth,
        **{key: getattr(found.family.config, key) for key in keys},
        **cost,
        "memory_bytes": found.cost.memory_bytes,
        "baseline": {**baseline, "memory_bytes": target.memory_bytes},
        "gaps_percent": found.gaps_percent,
        "iterations": [
            {"searched": each.searched, **{key: each.values[key] for key in keys}, "gaps_percent": each.gaps_percent}
            for each in found.iterations
        ],
    }


def _text(found: matching.Match, written: str | None) -> str:
    gaps, keys = found.gaps_percent, _keys(found.family)
    steps = [
        [each.searched, *(str(each.values[key]) for key in keys), *map(_percent, each.gaps_percent.values())]
        for each in found.iterations
    ]
    searches = table(["searched", *keys, *(f"{matching.TITLES[name]} gap" for name in gaps)], steps)
    rows = []
    for name, title in matching.TITLES.items():
        budget = getattr(found.target, name)
        theirs = ["-", "-"] if budget is None else [f"{budget:,.0f}", _percent(gaps[name])]
        rows.append([title, f"{getattr(found.cost, name):,.0f}", *theirs])
    result = table(["", "matched", "target", "gap"], rows)
    model = found.family
    values = ", ".join(f"{key} {getattr(model.config, key)}" for key in keys)
    last = f"{_kind(model)} at depth {model.depth}: {values}"
    return "\n\n".join([searches, result, last + (f"\nwritten to {written}" if written else "")])


def _kind(model: Family) -> str:
    """The model's variant, or its family where there are none."""
    return getattr(model.config, "variant", model.config.family)


def _keys(model: Family) -> list[str]:
    """The settings that a search moves, what moves the parameters first."""
    return sorted((knob.key for knob in model.knobs()), reverse=True)


def _family_table(members: list[members.Member]) -> str:
    rows = []
    for member in members:
        model, cost, gaps = member.match.family.config, member.match.cost, member.match.gaps_percent
        sizes = [str(model.num_experts), str(model.expert_size)]
        costs = [f"{cost.params / 1e9:.4f}", f"{cost.flops_per_token / 1e9:.4f}", f"{cost.memory_bytes / 1e9:.4f}"]
        rows.append([member.name, *sizes, *costs, *(_percent(each) for each in gaps.values())])
    header = ["model", "E", "F", "params (B)", "GFLOP/token", "memory (GB)", "params gap", "FLOPs gap", "memory gap"]
    return table(header, rows)


def _gap_text(found: matching.Match) -> str:
    return ", ".join(
        f"{matching.TITLES[name]} {_percent(gap)}" for name, gap in found.gaps_percent.items() if "bytes" not in name
    )


def _percent(number: float) -> str:
    return f"{number:+.3f} %"


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    if number > MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is more than any model has ({MOST:g})")
    return number


def _depths(text: str) -> list[int]:
    depths = [positive(part.strip()) for part in text.split(",")]
    if len(set(depths)) < len(depths):
        raise argparse.ArgumentTypeError(f"'{text}' names a depth twice")
    return depths
