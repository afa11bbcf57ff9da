"""A checkpoint in, a folder with its statistics, figures and report out."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from dreamer_jax.analysis.collection import ROWS, collect, sample_sequences
from dreamer_jax.analysis.figures import make_figures
from dreamer_jax.analysis.report import write_report
from dreamer_jax.analysis.run_data import data_of
from dreamer_jax.analysis.summary import Summary, summarise
from dreamer_jax.analysis.trajectories import trajectories
from dreamer_jax.config.recurrence import RecurrenceConfig
from dreamer_jax.config.sections import Config, MeshConfig
from dreamer_jax.errors import UserError
from dreamer_jax.families import build
from dreamer_jax.parallel import make_mesh
from dreamer_jax.runs.folders import path_of, run_and_step, write_atomically
from dreamer_jax.runs.knowledge import read_texts
from dreamer_jax.runs.models import load_run, locate_run


def analyze(
    run: str | Path,
    out: str | Path | None = None,
    data: str = "",
    sequences: int = 1000,
    seed: int = 0,
    compare: str | Path | None = None,
) -> tuple[epath.Path, Summary]:
    """Analyse a checkpoint and write analysis.json, figures/*.png, figures/*.svg and report.html.

    Args:
        run: run directory, or one checkpoint in it; also on a bucket.
        out: the folder to write; by default `analysis` in the run directory, or `analysis-N` for its checkpoint N.
            May lie on a bucket, too.
        data: a JSONL file with the run's fields, or a directory of prepared data; by default the run's held-out data.
        sequences: documents to look at, chosen at random; all if there are fewer.
        seed: of that choice.
        compare: an LA run, seen over the same data, for Fig. 6.

    Returns:
        The folder, and the summary that analysis.json holds.

    Raises:
        UserError: no run or checkpoint, no data, no folder can be at `out`, or `compare` is not an LA model.
    """
    folder = _folder(run) if out is None else _place(out)
    _check_place(folder)
    if compare is not None and not build(locate_run(run).config.model).flags.recurrent:
        raise UserError("--compare puts an LA run beside a recurrent one, and this run is LA itself")
    summary, config = examine(run, data, sequences, seed)
    layered: Summary | None = None
    if compare is not None:
        if "experts" not in summary:
            raise UserError(
                "--compare is about the use of Dreamer's experts, and this model has none: it is "
                f"{build(config.model).headline()}"
            )
        layered, _ = examine(compare, data, sequences, seed, only_layered=True)
        summary["compared_with"] = layered["run"]
        summary["against_layered"] = _against(summary, layered, "used")
        summary["against_layered_90_percent"] = _against(summary, layered, "used_for_90_percent")
    figures = make_figures(summary, layered)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.save(folder / "figures")
    _write(folder / "report.html", write_report(summary, figures))
    _write(folder / "analysis.json", json.dumps(summary) + "\n")  # last: it is there when all is
    return folder, summary


def _folder(run: str | Path) -> epath.Path:
    """Where the analysis of a run goes, and that of one of its checkpoints, beside it."""
    directory, step = run_and_step(run)
    return _place(directory) / ("analysis" if step is None else f"analysis-{step}")


def examine(
    run: str | Path, data: str, sequences: int, seed: int, only_layered: bool = False
) -> tuple[Summary, Config]:
    """(summary, configuration) of a checkpoint over some sequences; see `analyze`."""
    model = load_run(run)
    config = model.config
    family = build(config.model)
    if only_layered and (family.flags.recurrent or config.model.family != "dreamer"):
        raise UserError(f"{run}: --compare needs an LA run, and this is {family.headline()}")
    opened = data_of(model, _with_data(config, data))
    mesh = make_mesh(MeshConfig(data=(jax.device_count(),)))
    seen, first = 0, None

    def batches():
        nonlocal seen, first
        for batch in sample_sequences(opened.heldout_batches, sequences, ROWS * mesh.size, seed):
            seen += _documents(batch)
            first = first or batch
            yield batch

    sums = collect(config.model, model.params, model.model_state, batches(), mesh)
    described = {
        "run": path_of(run_and_step(run)[0]).name,
        "step": model.step,
        "sequences": seen,
        "too_long": opened.heldout_too_long,
        "data": Path(data).name if data else "its held-out data",
    }
    summary = described | summarise(config.model, sums, jax.device_get(model.model_state))
    if "slots" in summary and config.data.knowledge:
        _name_texts(summary["slots"], read_texts(config.data.knowledge, summary["slots"]["count"]))
    if family.flags.injects_inputs and family.flags.generates and first:
        summary["trajectories"] = trajectories(family, model.params, model.model_state, first, opened.tokenizer)
    return summary, config


def _name_texts(slots: dict[str, Any], texts: list[str] | None) -> None:
    """Beside the number of a slot its text, where it is known."""
    if texts is None:
        return
    for depth in slots["most"]:
        for its in depth:
            its["text"] = texts[its["slot"]]


def _place(folder: str | Path) -> epath.Path:
    """A folder as it was named, or on a bucket, which takes whole files as a disk does."""
    return path_of(folder) if "://" in os.fspath(folder) else epath.Path(folder)


def _check_place(folder: epath.Path) -> None:
    """What can't be written shows before all the work, and nothing is made for what is refused meanwhile."""
    if "://" in os.fspath(folder):
        return
    there = next(path for path in (folder / "figures", folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--out {folder}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{folder} can't be written: {there} is closed to you; name another folder with --out")


def _write(path: epath.Path, text: str) -> None:
    if "://" in os.fspath(path):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(Path(path), text)


def _against(summary: Summary, layered: Summary, measure: str) -> list[float]:
    """[L]: the portion of all experts in use at each depth, over that of LA's average layer."""
    own, other = (np.array(of["experts"][measure]) / of["experts"]["experts"] for of in (summary, layered))
    return (own / other.mean()).tolist()


def _documents(batch: Any) -> int:
    """Documents of a batch in which some have been left out: what starts and isn't padding."""
    return int(np.sum((batch["positions"] == 0) & (batch["segment_ids"] > 0)))


def _with_data(config: Config, path: str) -> Config:
    """The configuration reading another file or directory, all of it."""
    if not path:
        return config
    if not Path(path).exists():
        raise UserError(f"{path}: there is no such file or directory")
    changes: dict[str, Any] = {"path": path, "heldout_path": path}
    changes["source"] = "prepared" if Path(path).is_dir() else "jsonl"
    unknown = RecurrenceConfig()  # nobody knows the results of steps there
    recurrence = dataclasses.replace(config.recurrence, steps=unknown.steps, depths_per_step=unknown.depths_per_step)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes), recurrence=recurrence)
