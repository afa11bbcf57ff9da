"""`dreamer budget CONFIG`: parameters, FLOPs per token and memory of a model, by part."""

from __future__ import annotations

import dataclasses
import json

import jax

from dreamer_jax.budget.report import Report, render, report
from dreamer_jax.cli.arguments import Parser, positive, split_overrides
from dreamer_jax.config import Config, LoadedConfig, load_config
from dreamer_jax.config.loading import COMMAND_LINE
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.training.optimizer import trained_parameters
from dreamer_jax.training.work import deepest_of, work_of


def run(arguments: list[str]) -> int:
    """Print the budget of the configuration that the words name; returns the exit code."""
    words, overrides = split_overrides(arguments)
    parser = _parser()
    options = parser.parse_args(words)
    if options.devices and not options.program:
        raise UserError("budget: --devices goes with --program")
    config = with_depth(load_config(options.config, overrides), options.depth)
    jax.config.update("jax_platforms", "cpu")  # draws of depths are all that is computed: no accelerator is taken
    trained = trained_parameters(config.training, build(config.model))
    its = report(config, options.context, options.batch, work_of(config), deepest_of(config), trained)
    if options.program:
        its["program"] = _program(config, options.devices or 1)
    print(json.dumps(its, indent=2) if options.json else _text(its, build(config.model).sentence()))
    return 0


def with_depth(loaded: LoadedConfig, depth: int | None) -> Config:
    """The configuration at another depth; None leaves it.

    Raises:
        UserError: the command line gives the depth twice.
    """
    config = loaded.config
    if depth is None:
        return config
    if loaded.origins.get("model.depth") == COMMAND_LINE:
        raise UserError("--depth and --model.depth are the same; give one of them")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, depth=depth))


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer budget",
        description="Parameters, FLOPs per token and memory of a model, by part.",
        epilog="Any `--section.key value` overrides a value of CONFIG. What is counted how: docs/budget.md.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a name such as dr_da_16")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--context", type=positive, default=1024, help="tokens of a generated sequence (1024)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences generated at once (1)")
    parser.add_argument("--depth", type=positive, help="depth of the model, instead of CONFIG's")
    parser.add_argument("--program", action="store_true", help="count the lowered program too and compare")
    parser.add_argument("--devices", type=positive, help="of an abstract mesh to lower for, with --program (1)")
    return parser


def _program(config: Config, devices: int) -> dict[str, float]:
    from dreamer_jax.budget import program

    length = min(config.data.sequence_length, 256)
    lowered = program.count(config.model, length, batch=devices, devices=devices)
    expected = program.expected(config.model, length, batch=devices)
    return {
        "sequence_length": length,
        "devices": devices,
        "parameters": lowered.parameters,
        "parameters_analytic": expected.parameters,
        "flops_per_token": lowered.flops_per_token,
        "flops_per_token_analytic": expected.flops_per_token,
    }


def _text(its: Report, sentence: str) -> str:
    text = render(its, sentence)
    if "program" in its:
        found = its["program"]
        difference = 100 * (found["flops_per_token"] / found["flops_per_token_analytic"] - 1)
        text += (
            f"\n\nlowered program ({found['devices']} devices, dense attention over S = {found['sequence_length']}): "
            f"{found['parameters']:,} parameters ({found['parameters'] - found['parameters_analytic']:+,}), "
            f"{found['flops_per_token'] / 1e6:,.3f} MFLOP/token ({difference:+.4f} %)"
        )
    return text
