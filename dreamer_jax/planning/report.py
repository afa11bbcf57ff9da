"""The plan of one configuration as plain data (for `--json`) and as text for a person."""

from __future__ import annotations

import dataclasses
from typing import Any

from dreamer_jax.budget import analytic
from dreamer_jax.budget.report import table
from dreamer_jax.config import Config
from dreamer_jax.families import build
from dreamer_jax.planning.compiling import Compiled
from dreamer_jax.planning.roofline import Roofline
from dreamer_jax.planning.step_cost import gradient_depths
from dreamer_jax.planning.topology import Topology
from dreamer_jax.training.work import work_of

Plan = dict[str, Any]
GIB, MIB = 1 << 30, 1 << 20


def describe(config: Config, topology: Topology, compiled: Compiled | None, bound: Roofline) -> Plan:
    """Everything `dreamer plan` says; `compiled` is None when only the roofline was asked for."""
    model, training = build(config.model), config.training
    row = config.data.sequence_length
    tokens, flops = training.batch_size * row, analytic.training_flops(model, config.data.places, work_of(config))[0]
    variant = getattr(config.model, "variant", config.model.family)
    plan: Plan = {
        "topology": {"name": topology.name, "slices": topology.slices, "chips": topology.chips},
        "model": {
            "variant": variant,
            "depth": model.depth,
            "implementation": config.model.implementation,
            "dtype": config.model.dtype,
        },
        "mesh": {"slices": config.mesh.slices, "data": list(config.mesh.data), "expert": config.mesh.expert},
        "settings": settings_of(config, topology),
        "tokens": {"step": tokens, "chip": tokens // topology.chips, "row": row},
        "parameters": int(analytic.total(analytic.parameters(model))),
        "model_flops_per_token": config.data.copies * flops,
        "rows_per_expert": bound.rows_per_expert,
        "filled_share_of_expert_tiles": bound.tile_share,
        "roofline": _roofline(bound),
    }
    if compiled is not None:
        plan["compiled"] = _compiled(compiled, topology)
    return plan


def settings_of(config: Config, topology: Topology) -> dict[str, Any]:
    """The settings of the training that a sweep varies, beside the mesh."""
    training = config.training
    return {
        "microbatches": training.microbatches,
        "remat": training.remat,
        "scatter": training.scatter,
        "scatter_dtype": training.scatter_dtype,
        "gradient_depths": gradient_depths(config, topology.chip.name),
    }


def render(plan: Plan) -> str:
    """The plan as text."""
    blocks = [_heading(plan)]
    if "compiled" in plan:
        blocks += _compiled_blocks(plan)
    blocks += [_roofline_text(plan["roofline"]), _bound_text(plan)]
    return "\n\n".join(blocks)


def advice(plan: Plan) -> list[str]:
    """What to change when it doesn't fit, the cheapest first."""
    settings, tokens = plan["settings"], plan["tokens"]["chip"]
    found = []
    if settings["remat"] != "full":
        found.append("--training.remat full: keeps only the residual stream of every depth")
    at_hand = tokens // settings["microbatches"]
    if at_hand > plan["tokens"]["row"]:
        found.append(
            f"--training.microbatches {2 * settings['microbatches']}: halves the tokens at hand ({at_hand} a chip now)"
        )
    if settings["microbatches"] > 1 and settings["scatter"] == "step":
        found.append("--training.scatter microbatch: no chip holds the sums of all gradients; more on the wires")
    if plan["mesh"]["expert"] == 1:
        found.append("a mesh with an expert axis: each chip then holds a part of the experts and of their gradients")
    if plan["model"]["implementation"] == "xla":
        found.append("--model.implementation auto: the kernels need less memory than XLA's forms")
    found.append("more chips, or chips with more HBM; `--sweep` tries the meshes of a topology")
    return found


def _compiled(compiled: Compiled, topology: Topology) -> dict[str, Any]:
    its = dataclasses.asdict(compiled)
    its["total_bytes"] = compiled.total
    its["chip_bytes"] = topology.chip.memory
    return its


def _roofline(bound: Roofline) -> dict[str, Any]:
    its = dataclasses.asdict(bound)
    its["terms"] = [{**dataclasses.asdict(term), "seconds": term.seconds} for term in bound.terms]
    for kind in ("matrix", "memory", "collective"):
        its[f"{kind}_seconds"] = bound.total(kind)
    return its


def _heading(plan: Plan) -> str:
    mesh, settings, model = plan["mesh"], plan["settings"], plan["model"]
    slices = f"{mesh['slices']} slices x " if mesh["slices"] > 1 else ""
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
    flops, rows = plan["model_flops_per_token"], ""
    if plan["rows_per_expert"]:
        filled = 100 * plan["filled_share_of_expert_tiles"]
        rows = f"; {plan['rows_per_expert']:.0f} rows an expert in a product"
        rows += f" ({filled:.0f} % of the experts' matrix tiles filled)"
    return (
        f"{model['variant']}, depth {model['depth']}: {plan['parameters']:,} parameters, "
        f"{flops / 1e9:.3f} GFLOP a token in training (model FLOPs)\n"
        f"{plan['topology']['name']}, {plan['topology']['chips']} chips: mesh {slices}data "
        f"{' x '.join(map(str, mesh['data']))}, expert {mesh['expert']}; {chosen}\n"
        f"{plan['tokens']['step']:,} tokens a step, {plan['tokens']['chip']:,} a chip{rows}"
    )


def _compiled_blocks(plan: Plan) -> list[str]:
    its = plan["compiled"]
    seconds = its["seconds"]
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    times += " (of an earlier time: its report was kept)" if its["kept"] else ""
    blocks = []
    if its["memory"]:
        rows = [[name, _gib(its["memory"][name])] for name in ("arguments", "outputs", "aliased", "temp", "code")]
        share = 100 * its["total_bytes"] / its["chip_bytes"]
        rows.append(["total", _gib(its["total_bytes"])])
        if "reported_temp" in its["memory"]:
            rows.append(["(temp as memory_analysis() counts it)", _gib(its["memory"]["reported_temp"])])
        text = table(["HBM of a chip, by the compiler", "GiB"], rows)
        blocks.append(f"{text}\n{share:.0f} % of the chip's {its['chip_bytes'] / GIB:.1f} GiB; CPU time: {times}")
    if not its["fits"]:
        blocks.append(f"It does not fit.\n{its['message']}")
    if its["buffers"]:
        rows = [
            [b["array"], str(b["count"]), _gib(b["bytes"]), "yes" if b["loop"] else "no", b["name"]]
            for b in its["buffers"]
        ]
        header = ["largest values at the fullest moment", "count", "GiB", "in loop", "made by"]
        blocks.append(table(header, rows))
    if not its["fits"]:
        blocks.append("What would help:\n" + "\n".join(f"  {line}" for line in advice(plan)))
    if its["collectives"] is not None:
        blocks.append(_collectives(its))
    if its["problem"]:
        blocks.append(f"Not known: {its['problem']}")
    return blocks


def _collectives(its: dict[str, Any]) -> str:
    grouped: dict[tuple, int] = {}
    for one in its["collectives"]:
        what = ", ".join(one["arrays"][:2]) + (f", ... ({len(one['arrays'])})" if len(one["arrays"]) > 2 else "")
        where = f"x {one['times'] or 'depth'}" if one["loops"] else "no"
        where += ", overlapped" if one["overlapped"] else ""
        kind = one["kind"] + (" (fused)" if one["fused"] else "")
        key = (kind, what, " ".join(one["axes"]), one["bytes"], where)
        grouped[key] = grouped.get(key, 0) + 1
    rows = [
        [kind, str(count), f"{size / MIB:,.2f}", axes, where, what]
        for (kind, what, axes, size, where), count in sorted(grouped.items(), key=lambda item: -item[0][3])
    ]
    text = table(["collective", "count", "MiB each", "axes", "in loop", "arrays"], rows)
    faults = [f"  all-reduced instead of scattered: {', '.join(its['weight_all_reduces'])}"]
    faults += [f"  copied whole: {', '.join(its['weight_copies'])}"]
    present = [its["weight_all_reduces"], its["weight_copies"]]
    notes = [fault for fault, found in zip(faults, present, strict=True) if found]
    return text + ("\n" + "\n".join(notes) if notes else "\nno gradient is all-reduced, no weight is copied")


def _roofline_text(its: dict[str, Any]) -> str:
    rows = [
        [t["name"], _ms(t["matrix_seconds"]), _ms(t["memory_seconds"]), _ms(t["seconds"])]
        for t in sorted(its["terms"], key=lambda t: -t["seconds"])
    ]
    for e in its["exchanges"]:
        shown = "hidden" if e["hidden"] else _ms(e["seconds"])
        rows.append([f"{e['name']}, {e['bytes'] / 1e9:.2f} GB", "", "", shown])
    rows.append(["sum", _ms(its["matrix_seconds"]), _ms(its["memory_seconds"]), _ms(its["seconds"])])
    return table(["roofline, ms a step", "matrix", "HBM", "bound"], rows)


def _bound_text(plan: Plan) -> str:
    its = plan["roofline"]
    source = "the compiled program's" if its["compiled"] else "estimated"
    wider = "; counted in bfloat16, and this model computes in float32" if plan["model"]["dtype"] == "float32" else ""
    return (
        f"bound, not a prediction (collectives {source}): at most {100 * its['mfu']:.1f} % MFU, "
        f"{its['tokens_per_second']:,.0f} tokens/s a chip, at least {its['seconds']:.3f} s a step" + wider
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def render_sweep(plans: list[Plan]) -> str:
    """The candidates of a sweep, best first, as a table, and the best one's settings."""
    rows = []
    for plan in plans:
        its = plan.get("compiled")
        fits = "not compiled" if its is None else ("yes" if its["fits"] else "no")
        memory = [_gib(its["memory"]["temp"]), _gib(its["total_bytes"])] if its and its["memory"] else ["", ""]
        mesh = plan["mesh"]
        name = f"data {'x'.join(map(str, mesh['data']))}, expert {mesh['expert']}"
        settings = [str(value) for value in plan["settings"].values()]
        bound = plan["roofline"]
        rows.append([name, *settings, fits, *memory, f"{100 * bound['mfu']:.1f}", f"{bound['tokens_per_second']:,.0f}"])
    header = ["mesh", *plans[0]["settings"], "fits", "temp GiB", "total GiB", "MFU % at most", "tokens/s/chip at most"]
    best = plans[0]
    options = [f"--mesh.data {','.join(map(str, best['mesh']['data']))}", f"--mesh.expert {best['mesh']['expert']}"]
    options += [f"--training.{name} {value}" for name, value in best["settings"].items()]
    verdict = (
        "best that fits" if best.get("compiled") and best["compiled"]["fits"] else "nothing that was compiled fits"
    )
    return f"{table(header, rows)}\n\n{verdict}: {' '.join(options)}"
