"""`dreamer depth RUN`: everything that can be said of a trained model at other depths than the trained one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dreamer_jax.analysis.passes import answers, counted, look, number, summarise_pass
from dreamer_jax.analysis.report import page
from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.analysis.spectrum import ITERATIONS, radii
from dreamer_jax.data.records import Batch
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family
from dreamer_jax.runs.models import TrainedModel, changed
from dreamer_jax.studies.depth_figures import make_figures
from dreamer_jax.studies.depths import (
    FARTHEST,
    Kept,
    Progress,
    Say,
    check_writable,
    checked,
    heldout,
    open_run,
    takes,
)
from dreamer_jax.studies.difficulty import accuracy, generated, hardest

FOLDER = "depth"
"""Of a run, with the page and its figures."""
MOST = 32
"""Depths that are asked for without being named, at most; and depths of a pass whose spectral radius is measured."""
CELLS = 12
"""Depths at which every difficulty is asked, of those that aren't named, at most."""
ROWS, INSTANCES, JACOBIAN_ROWS = 16, 64, 4
"""Held-out rows that agreement and single passes are looked at over; instances of each difficulty; and of those rows,
the first ones, that the spectral radius is measured on."""

Report = dict[str, Any]


def report(
    run: Path,
    depths: Sequence[int] | None,
    say: Say,
    rows: int = ROWS,
    instances: int = INSTANCES,
    seed: int = 0,
) -> tuple[Path, Report]:
    """Measure a run's newest checkpoint, write `FILE` and the page into the run.

    What the file has of the same checkpoint and the same settings isn't computed again. One device does it.

    Args:
        run: a run directory.
        depths: the trained one is measured beside them; by default all up to `FARTHEST` times that, or `MOST` of them.
        say: gets lines of progress.
        rows: held-out rows that are looked at for agreement, and within passes.
        instances: of each difficulty.
        seed: of the vectors that power iteration starts with.

    Returns:
        The page, and the report:
        `run`, `model`, `step`, `trained` (the depth).
        `depths`: depth -> `loss`, `perplexity`, `exact_match` where answers are known, `agreement` with the trained
        depth.
        `difficulty`: of generated tasks: `trained_to`, `instances`, `accuracy`: difficulty -> depth -> share.
        `passes`: of the trained depth and of the deepest, see `summarise_pass`; and `spectral_radius`: `depths` (from
        1), `mean`, `least`, `greatest` over rows.
        `sample`: `rows`, `tokens`, `targets` of agreement and passes, `jacobian_rows` and `iterations`.

    Raises:
        UserError: there is no run, the model can't be run at one of the depths, or nothing is held out.
    """
    model, kept = open_run(run)
    check_writable(run)
    family = model.family
    asked = checked(family, all_depths(family) if depths is None else [*depths, family.depth])
    found = heldout(run, model, asked, kept, say)
    sample = sample_of(model, rows)
    agreed = agreement(model, sample, asked, kept.part("agreement", {"rows": rows}), say)
    kept.write()
    settings = {"rows": rows, "seed": seed, "iterations": ITERATIONS}
    passes = look_into(model, sample, sorted({family.depth, asked[-1]}), seed, kept, settings, say)
    result = {
        "run": run.name,
        "model": family.headline(),
        "step": model.step,
        "trained": family.depth,
        "depths": {str(depth): {**found[depth], "agreement": agreed[depth]} for depth in asked},
        "passes": passes,
        "sample": {
            "rows": len(sample["tokens"]),
            "tokens": int(np.sum(sample["segment_ids"] > 0)),
            "targets": int(np.sum(sample["loss_mask"])),
            "jacobian_rows": len(sample["tokens"][:JACOBIAN_ROWS]),
            "iterations": ITERATIONS,
        },
    }
    if generated(model.config):
        few = asked if depths is not None else thinned(family, asked, CELLS)
        right = accuracy(model, few, instances, kept, say)
        by_difficulty = {str(d): {str(depth): its for depth, its in row.items()} for d, row in right.items()}
        result["difficulty"] = {"trained_to": hardest(model.config), "instances": instances, "accuracy": by_difficulty}
    say("drawing")
    return write(run / FOLDER, result), result


def all_depths(family: Family) -> list[int]:
    """All up to `FARTHEST` times the trained depth that the model takes, or `MOST` of them."""
    return thinned(family, [depth for depth in range(1, FARTHEST * family.depth + 1) if takes(family, depth)], MOST)


def thinned(family: Family, depths: Sequence[int], most: int) -> list[int]:
    """Depths in order, if they are at most so many; otherwise an even choice, in which the trained depth, twice as many
    and the farthest are."""
    if len(depths) <= most:
        return list(depths)
    wanted = {family.depth, 2 * family.depth} & set(depths)
    return sorted(wanted | {depths[i] for i in even(len(depths), most - len(wanted))})


def even(count: int, most: int) -> list[int]:
    """At most so many of 0 .. count - 1, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def sample_of(model: TrainedModel, rows: int) -> Batch:
    """The first held-out rows that aren't empty: [rows or fewer, S] each.

    Raises:
        UserError: there is none.
    """
    parts: list[Batch] = []
    have = 0
    for batch in data_of(model).heldout_batches():
        full = np.flatnonzero(np.any(batch["loss_mask"], axis=1))[: rows - have]
        parts.append({name: values[full] for name, values in batch.items()})
        have += len(full)
        if have == rows:
            break
    if not have:
        raise UserError("nothing is held out whose targets the loss counts; see data.heldout_records")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def agreement(
    model: TrainedModel, sample: Batch, depths: Sequence[int], known: dict[str, float], say: Say
) -> dict[int, float]:
    """Depth -> the share of the sample's targets at which the likeliest token is that of the trained depth."""
    family = model.family
    missing = [depth for depth in depths if str(depth) not in known]
    if missing:
        slots, mask = max(*missing, family.depth), counted(family, sample)
        progress = Progress(say, "agreement with the trained depth", len(missing))

        def at(depth: int) -> np.ndarray:
            return np.asarray(answers(family, slots, model.params, model.model_state, sample, np.int32(depth)))[mask]

        trained = at(family.depth)
        for depth in missing:
            known[str(depth)] = float(np.mean(at(depth) == trained))
            progress.done(f"depth {depth}: {known[str(depth)]:.3f}")
    return {depth: known[str(depth)] for depth in depths}


def look_into(
    model: TrainedModel,
    sample: Batch,
    depths: Sequence[int],
    seed: int,
    kept: Kept,
    settings: Mapping[str, Any],
    say: Say,
) -> dict[str, Any]:
    """What happens within passes of these depths, see `report`."""
    family, known = model.family, kept.part("passes", settings)
    missing = [depth for depth in depths if str(depth) not in known]
    for depth in missing:
        seen = look(family, max(missing), model.params, model.model_state, sample, np.int32(depth))
        known[str(depth)] = summarise_pass(family, sample, seen, depth)
    if missing:
        places = [(depth, l) for depth in missing for l in even(depth, MOST)]
        progress = Progress(say, "spectral radius", len(places))
        first = {name: values[:JACOBIAN_ROWS] for name, values in sample.items()}
        by_depth: dict[int, list[np.ndarray]] = {depth: [] for depth in missing}
        wide = changed(model, "float32") if hasattr(model.config.model, "dtype") else model
        for depth, l in places:
            numbers = np.int32(depth), np.int32(l), jax.random.key(seed)
            by_depth[depth].append(
                np.asarray(radii(wide.family, max(missing), model.params, model.model_state, first, *numbers))
            )
            progress.done(f"{by_depth[depth][-1].mean():.3f} in step {l + 1} of {depth}")
        for depth, its in by_depth.items():
            measures = {"mean": np.mean, "least": np.min, "greatest": np.max}
            known[str(depth)]["spectral_radius"] = {
                "depths": [l + 1 for l in even(depth, MOST)],
                **{name: [number(of(row)) for row in its] for name, of in measures.items()},
            }
        kept.write()
    return {str(depth): known[str(depth)] for depth in depths}


def write(folder: Path, result: Report) -> Path:
    """The page and the figures' files; returns the page."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    figures = make_figures(result)
    for figure in figures:
        figure.save(folder / "figures")
    sample = result["sample"]
    about = (
        f"{result['run']}, checkpoint {result['step']:,}, trained at depth {result['trained']}. Agreement and single "
        f"passes: {sample['rows']} held-out rows, {sample['targets']:,} targets. Depths are counted from 1."
    )
    text = page(f"{result['model']}, at other depths", about, [("Measure", "Here"), *highlights(result)], figures)
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
    return file


def highlights(result: Report) -> list[tuple[str, str]]:
    """(measure, value): what a reader wants first."""
    depths, trained = result["depths"], str(result["trained"])
    best = min(depths, key=lambda depth: depths[depth]["loss"])
    lines = [("held-out loss is least at depth", f"{best} ({depths[best]['loss']:.4f})")]
    if trained in depths:
        lines.append(("at the trained depth", f"{trained} ({depths[trained]['loss']:.4f})"))
    farthest = max(depths, key=int)
    lines.append(("at the deepest", f"{farthest} ({depths[farthest]['loss']:.4f})"))
    lines.append(("targets answered there as at the trained depth", f"{depths[farthest]['agreement']:.1%}"))
    for depth, its in result["passes"].items():
        half, most = (needed_by(its["needed"], share) for share in (0.5, 0.9))
        lines.append((f"half and 90 % of the targets stand, in a pass of {depth}, from depth", f"{half}, {most}"))
        if "halted" in its:
            # At the last depth a Universal Transformer halts whatever still runs.
            stops = sum(its["halted"][:-2]) / max(1, sum(its["halted"]))
            lines.append((f"targets that halt before the last depth in a pass of {depth}", f"{stops:.1%}"))
        last = its["spectral_radius"]["mean"][-1]
        lines.append(
            (f"spectral radius of its last step, in a pass of {depth}", "-" if last is None else f"{last:.3f}")
        )
    return lines


def needed_by(needed: Sequence[int], share: float) -> int:
    """The depth from which on so many targets stand: the least whose targets, with those of less, come to the share."""
    sums = np.cumsum(needed)
    return 1 + int(np.searchsorted(sums, math.ceil(share * sums[-1])))
