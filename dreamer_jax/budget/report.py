"""The budget of one configuration as plain data (for `--json`) and as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dreamer_jax.budget import analytic, memory
from dreamer_jax.config.sections import Config
from dreamer_jax.families import build

Report = dict[str, Any]


def report(
    config: Config,
    context: int = 1024,
    batch: int = 1,
    work: Sequence[analytic.Work] | None = None,
    deepest: analytic.Work | None = None,
    trained: int | None = None,
) -> Report:
    """Everything `dreamer budget` says.

    Args:
        config: the model, and the training whose memory and FLOPs are asked for.
        context: tokens of a generated sequence.
        batch: sequences generated at once.
        work: of the train steps, see `training.work`; default, they go to the model's depth.
        deepest: the step for whose activations there must be memory; default, one of the model's depth.
        trained: parameters that have moments; default, all.
    Returns:
        Nested dicts of numbers: parameters, FLOPs per token, bytes.
    """
    model = build(config.model)
    average = analytic.average_context(context, model.flags.causal)
    return {
        "model": model.describe(),
        "context": context,
        "average_context": average,
        "batch": batch,
        "parameters": _with_total(analytic.parameters(model)),
        "parameters_folded": _with_total(analytic.parameters(model, folded=True)),
        "active_parameters": _with_total(analytic.active_parameters(model)),
        "flops_per_token": _with_total(analytic.matmul_flops(model, average)),
        "flops_per_token_unfolded": _with_total(analytic.matmul_flops(model, average, folded=False)),
        "elementwise_flops_per_token": _with_total(analytic.elementwise_flops(model, average)),
        "flops_per_pass": analytic.pass_flops(model),
        "training": _training(config, work, deepest, trained),
        "generation_bytes": _with_total(memory.generation(model, context, batch)),
        "generation_bytes_folded": _with_total(memory.generation(model, context, batch, folded=True)),
    }


def render(report: Report, sentence: str) -> str:
    """The report as text, under a sentence on the model."""
    blocks = [
        _heading(report, sentence),
        _parts(report),
        *([_folding(report)] if report["parameters"] != report["parameters_folded"] else []),
        _training_text(report),
        _memory_text(report),
    ]
    return "\n\n".join(blocks)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _training(
    config: Config, work: Sequence[analytic.Work] | None, deepest: analytic.Work | None, trained: int | None
) -> dict[str, Any]:
    model, length = build(config.model), config.data.places
    copies = config.data.copies  # times that a token is computed
    rows = config.training.batch_size // config.training.microbatches // config.mesh.size
    remat = config.training.remat
    context = analytic.average_context(length, model.flags.causal)
    forward = copies * analytic.total(analytic.matmul_flops(model, context))
    forward_elementwise = copies * analytic.total(analytic.elementwise_flops(model, context))
    work, deepest = work or analytic.whole(model), deepest or analytic.whole(model)[0]
    useful = [copies * its for its in analytic.training_flops(model, length, work)]
    executed = [copies * its for its in analytic.executed_training_flops(model, length, remat == "full", work)]
    return {
        "sequence_length": length,
        "copies": copies,
        "depth": sum(its.share * its.depth for its in work),
        "deepest": deepest.depth,
        "rows": rows,
        "remat": remat,
        "forward_flops_per_token": forward,
        "forward_elementwise_flops_per_token": forward_elementwise,
        "flops_per_token": useful[0],
        "elementwise_flops_per_token": useful[1],
        "factor": useful[0] / forward,
        "executed_flops_per_token": executed[0],
        "executed_elementwise_flops_per_token": executed[1],
        "executed_factor": executed[0] / forward,
        "bytes": {
            kind: _with_total(memory.training(model, length, rows, kind, deepest, trained)) for kind in ("none", "full")
        },
    }


def _with_total(parts: dict[str, int] | dict[str, float]) -> dict[str, float]:
    return {**parts, "total": sum(parts.values())}


def _heading(report: Report, sentence: str) -> str:
    return (
        f"{sentence}\n"
        f"forward FLOPs: folded (Eq. 8), average context {report['average_context']:g} of {report['context']} "
        "generated tokens"
    )


def _parts(report: Report) -> str:
    whole = report["parameters"]["total"]
    rows = []
    for part in report["parameters"]:
        count, flops = report["parameters"][part], report["flops_per_token"][part]
        elementwise = report["elementwise_flops_per_token"][part]
        active = report["active_parameters"][part]
        mega = [_mega(flops), _mega(elementwise), _mega(flops + elementwise)]
        rows.append([part, f"{count:,}", f"{100 * count / whole:.1f} %", f"{active:,}", *mega])
    header = ["per part", "parameters", "share", "active", "MFLOP/token", "elementwise", "both"]
    once = report["flops_per_pass"]
    note = f"\nkeys and values of texts, once a pass for all its tokens: {_mega(once)} MFLOP" if once else ""
    return table(header, rows) + note


def _folding(report: Report) -> str:
    stored, folded = report["parameters"]["total"], report["parameters_folded"]["total"]
    branches, product = report["flops_per_token_unfolded"]["total"], report["flops_per_token"]["total"]
    rows = [
        ["two branches (Eq. 7)", f"{stored:,}", _mega(branches)],
        ["folded (Eq. 8)", f"{folded:,}", _mega(product)],
        ["saved", f"{stored - folded:,}", _mega(branches - product)],
    ]
    return table(["shared experts", "parameters", "MFLOP/token"], rows)


def _training_text(report: Report) -> str:
    its = report["training"]
    rows = []
    for name, prefix, factor in (
        ("forward", "forward_", 1.0),
        ("model FLOPs", "", its["factor"]),
        (f"executed, remat {its['remat']}", "executed_", its["executed_factor"]),
    ):
        flops, elementwise = its[f"{prefix}flops_per_token"], its[f"{prefix}elementwise_flops_per_token"]
        rows.append([name, f"{factor:.3f}", _mega(flops), _mega(elementwise), _mega(flops + elementwise)])
    drawn = f", {its['depth']:.3g} depths on average" if its["depth"] != report["model"]["depth"] else ""
    copies = f" ({its['copies']} of each token)" if its["copies"] > 1 else ""
    header = [f"training, S = {its['sequence_length']}{copies}{drawn}", "factor", "MFLOP/token", "elementwise", "both"]
    return table(header, rows)


def _memory_text(report: Report) -> str:
    stored, folded = report["generation_bytes"], report["generation_bytes_folded"]
    rows = [[name, _bytes(stored[name]), _bytes(folded[name])] for name in stored]
    title = f"generating {report['context']} tokens, batch {report['batch']}"
    generation = table([title, "as stored", "folded"], rows)

    its = report["training"]
    none, full = its["bytes"]["none"], its["bytes"]["full"]
    rows = [[name, _bytes(none[name]), _bytes(full[name])] for name in none]
    deep = f", {its['deepest']} depths" if its["deepest"] != report["model"]["depth"] else ""
    title = f"training {its['rows']} rows of {its['sequence_length']} at once{deep}"
    return generation + "\n\n" + table([title, "remat none", "remat full"], rows)


def _mega(flops: float) -> str:
    return f"{flops / 1e6:,.3f}"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.4f} {unit}"
    return f"{number:.0f}  B"
