"""`dreamer export RUN OUT`: a trained model as a folder for PyTorch and transformers, verified."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from dreamer_jax.cli.arguments import Parser, positive
from dreamer_jax.errors import UserError, how_to_install


def run(arguments: list[str]) -> int:
    """Export a run, or verify a folder that exists; returns the exit code."""
    options = _parser().parse_args(arguments)
    _require("torch", "safetensors")
    from dreamer_jax.export.description import form_of
    from dreamer_jax.export.writing import refuse_existing
    from dreamer_jax.runs.leaves import open_model

    out = Path(options.out)
    if not options.verify_only:
        refuse_existing(out)
    model = open_model(options.run, options.step, options.average)
    form = form_of(model.config)
    if options.format not in (None, form.family):
        raise UserError(f"--format {options.format}: {options.run} is of the family {form.family}, and so is its form")
    _require(*form.packages)
    if options.verify_only:
        if options.dtype or options.keep_shared:
            raise UserError("--verify-only takes neither --dtype nor --keep-shared: the folder says what it is")
        _verify(out, model)
        return 0
    _export(out, model, options)
    return 0


def _require(*packages: str) -> None:
    """Refuse to go on without packages of the extra `export`."""
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise UserError(
            f"an export is verified with {' and '.join(packages)}, which are not installed; " + how_to_install("export")
        )


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer export",
        description="Write a trained model as a folder for PyTorch and transformers. It appears once it is verified.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or one checkpoint in it (RUN/checkpoints/500)")
    parser.add_argument("out", metavar="OUT", help="the folder to write; nothing may exist there")
    parser.add_argument("--step", type=int, help="the checkpoint (the newest)")
    parser.add_argument(
        "--average", type=positive, default=1, metavar="N", help="the mean of the last N checkpoints' weights (1)"
    )
    parser.add_argument("--format", metavar="FAMILY", help="form of the folder (that of the run's family)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the matrices (the run's model.dtype)")
    parser.add_argument(
        "--keep-shared", action="store_true", help="keep shared experts apart, to train on in PyTorch; else fold them"
    )
    parser.add_argument("--verify-only", action="store_true", help="compare the folder OUT with RUN, and write nothing")
    return parser


def _export(out: Path, model: Any, options: argparse.Namespace) -> None:
    from dreamer_jax.export.writing import export

    dtype = options.dtype or model.config.model.dtype
    print(f"exporting step {model.step} of {model.directory} in {dtype}", flush=True)
    export(model, out, dtype, options.keep_shared, lambda folder: _verify(folder, model))
    print(f"done: {out}")


def _verify(folder: Path, model: Any) -> None:
    from dreamer_jax.export.verification import verify

    print(f"verified: {verify(folder, model, lambda text: print(text, flush=True))}")
