"""`dreamer convert FOLDER RUN --to FAMILY`: a pretrained stack of layers as a model of recurrent depth."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive
from dreamer_jax.config.models.recursive import Sharing


def run(arguments: list[str]) -> int:
    """Write the run; returns the exit code."""
    options = _parser().parse_args(arguments)
    from dreamer_jax.export.sources import read_source

    source = read_source(Path(options.folder))
    print(f"{options.folder}: {source.kind.name}, {source.layers} layers, hidden size {source.hidden_size}", flush=True)
    TARGETS[options.to](source, options)
    out = options.run
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


TARGETS = {"recursive": _recursive}
"""Family -> what makes a model of it and says so."""


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer convert",
        description="Make a model of recurrent depth from a Llama, Qwen3 or OLMo 2 folder, without running its code.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="config.json, safetensors and perhaps tokenizer.json")
    parser.add_argument("run", metavar="RUN", help="the run directory to write; nothing may exist there")
    parser.add_argument("--to", choices=TARGETS, required=True, help="the family")
    recursive = parser.add_argument_group("--to recursive")
    recursive.add_argument("--loops", type=positive, default=2, metavar="B", help="applications of a shared layer (2)")
    recursive.add_argument(
        "--sharing", choices=typing.get_args(Sharing), default="cycle", help="order of the layers (cycle)"
    )
    recursive.add_argument(
        "--init",
        choices=("stepwise", "average", "lower", "upper"),
        default="stepwise",
        help="which layers the shared ones start as (stepwise: evenly spaced, the first and the last among them)",
    )
    recursive.add_argument(
        "--rank",
        type=_rank,
        default=0,
        metavar="R",
        help="of the LoRA of every matrix, started by SVD, with all norms kept; `full` gives the source (0: none)",
    )
    return parser


def _rank(text: str) -> int | str:
    if text == "full":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of 0 or more nor `full`")
    return int(text)
