"""`dreamer convert FOLDER RUN --to FAMILY`: a pretrained stack of layers as a model of recurrent depth."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, natural, positive
from dreamer_jax.config.models.recursive import Sharing
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Write the run; returns the exit code."""
    parser, own = _parser()
    options = parser.parse_args(arguments)
    for family, actions in own.items():
        for action in actions if family != options.to else ():
            if getattr(options, action.dest) != action.default:
                raise UserError(f"{action.option_strings[0]} is an option of --to {family}, not of --to {options.to}")
    from dreamer_jax.config import load_config
    from dreamer_jax.export.form import note_on_tokenizer
    from dreamer_jax.export.sources import read_source
    from dreamer_jax.export.writing import refuse_existing

    refuse_existing(Path(options.run))  # before anything large is read
    source = read_source(Path(options.folder))
    print(f"{options.folder}: {source.kind.name}, {source.layers} layers, hidden size {source.hidden_size}", flush=True)
    TARGETS[options.to](source, options)
    out = options.run
    spec = load_config(Path(out) / "config.yaml").config.data.tokenizer
    print(f"tokenizer: {spec}{note_on_tokenizer(spec)}")
    train = f"dreamer train {out}/config.yaml --training.initial_weights {out} --run.dir NEW"
    print(f"done: {out}; train it on your data with `{train}`")
    return 0


def _recursive(source: Any, options: argparse.Namespace) -> None:
    from dreamer_jax.export.conversion import write_converted
    from dreamer_jax.export.recursive_conversion import config_of, params_of, tied_layers
    from dreamer_jax.families import build

    config = config_of(source, options.loops, options.sharing, options.rank)
    tied = tied_layers(source, config, options.init)
    if config.ends:
        print(f"first and last layer: layer 0 and layer {source.layers - 1}")
    for k, its in enumerate(tied):
        print(f"shared layer {k}: {its}", flush=True)
    write_converted(source, config, Path(options.run), lambda: params_of(source, config, tied))
    print(f"converted: {build(config).headline()}")


def _huginn(source: Any, options: argparse.Namespace) -> None:
    from dreamer_jax.export.conversion import write_converted
    from dreamer_jax.export.huginn_conversion import config_of, params_of, split_of
    from dreamer_jax.families import build

    sizes = options.prelude, options.core, options.coda
    if None in sizes:
        raise UserError("--to huginn needs --prelude, --core and --coda, such as 0-3, 10-17 and 18-21, or 4, 8 and 4")
    if (options.select is None) != (options.text is None):
        raise UserError("--select influence and --text FILE are given together")
    if options.select and any(isinstance(its, tuple) for its in sizes):
        raise UserError("--select chooses the layers; say how many with --prelude, --core and --coda")
    if options.seed is not None and options.adapter != "random":
        raise UserError("--seed is of --adapter random; give both or leave it out")
    influence = None
    if options.select:
        from dreamer_jax.export.influence import block_influence, rows_of

        rows = rows_of(source, Path(options.text))
        influence = block_influence(source, rows)
        for l, its in enumerate(influence):
            print(f"layer {l}: influence {its:.4f} on {rows.size} tokens")
    split = split_of(source, *sizes, influence)
    for part, layers in split._asdict().items():
        print(f"{part}: layers {', '.join(map(str, layers)) or 'none'}")
    kept = {l for layers in split for l in layers}
    print(f"dropped: {', '.join(str(l) for l in range(source.layers) if l not in kept) or 'none'}", flush=True)
    config = config_of(source, split)
    seed = options.seed or 0
    write_converted(source, config, Path(options.run), lambda: params_of(source, split, options.adapter, seed))
    print(
        f"converted: {build(config).headline()}; trained, recurrences grow from 1 to model.depth {config.depth} over "
        f"model.curriculum_steps {config.curriculum_steps}"
    )


TARGETS = {"recursive": _recursive, "huginn": _huginn}
"""Family -> what makes a model of it and says so."""


def _parser() -> tuple[Parser, dict[str, list[argparse.Action]]]:
    """The parser, and family -> options that are its alone."""
    parser = Parser(
        prog="dreamer convert",
        description="Make a model of recurrent depth from a Llama, Qwen3 or OLMo 2 folder, without running its code.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="config.json, safetensors and perhaps tokenizer.json")
    parser.add_argument("run", metavar="RUN", help="the run directory to write; nothing may exist there")
    parser.add_argument("--to", choices=TARGETS, required=True, help="the family")
    return parser, {"recursive": _recursive_options(parser), "huginn": _huginn_options(parser)}


def _recursive_options(parser: Parser) -> list[argparse.Action]:
    group = parser.add_argument_group("--to recursive")
    return [
        group.add_argument("--loops", type=positive, default=2, metavar="B", help="applications of a shared layer (2)"),
        group.add_argument(
            "--sharing", choices=typing.get_args(Sharing), default="cycle", help="order of the layers (cycle)"
        ),
        group.add_argument(
            "--init",
            choices=("stepwise", "average", "lower", "upper"),
            default="stepwise",
            help="which layers the shared ones start as (stepwise: evenly spaced, the first and the last among them)",
        ),
        group.add_argument(
            "--rank",
            type=_rank,
            default=0,
            metavar="R",
            help="of the LoRA of every matrix, started by SVD, with all norms kept; `full` gives the source (0: none)",
        ),
    ]


def _huginn_options(parser: Parser) -> list[argparse.Action]:
    group = parser.add_argument_group("--to huginn", "Layers are numbered from 0: 0-3,7 is a list, 4 says how many.")
    places = {
        "prelude": "layers of the prelude; so many: the first",
        "core": "layers of the core; so many: the last before those of the coda",
        "coda": "layers of the coda; so many: the last",
    }
    return [
        *(group.add_argument(f"--{part}", type=_layers, metavar="LAYERS", help=its) for part, its in places.items()),
        group.add_argument(
            "--select", choices=("influence",), help="keep those layers that change their input most, on --text"
        ),
        group.add_argument("--text", metavar="FILE", help="what --select reads; its first 8192 tokens"),
        group.add_argument(
            "--adapter",
            choices=("identity", "random"),
            default="identity",
            help="what the core's input starts as: what the prelude put out, or a random mix of it and the state",
        ),
        group.add_argument("--seed", type=natural, metavar="N", help="of the random adapter (0)"),
    ]


def _layers(text: str) -> int | tuple[int, ...]:
    """`4`: how many. `0-3,7`: which."""
    if text.isdecimal():
        return int(text)
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise argparse.ArgumentTypeError(f"'{text}' is neither a number nor a list of layers such as 0-3,7")
        found += range(int(first), int(last) + 1)
    return tuple(found)


def _rank(text: str) -> int | str:
    if text == "full":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of 0 or more nor `full`")
    return int(text)
