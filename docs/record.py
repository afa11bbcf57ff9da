"""Puts what a study found where docs/results.md takes it from: `python docs/record.py runs/studies/depth16`.

docs/results/NAME.json gets its study.json in few digits. What is recorded there of other tasks and members stays, so
that a study can be recorded in parts; with --more-seeds other seeds of a member too, after `dreamer study --seeds`.
The tables of docs/results.md are written anew, and its figures of the study.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.studies import comparison, frontier_tables
from dreamer_jax.studies.study import FILE
from dreamer_jax.studies.study_figure import draw
from dreamer_jax.studies.study_file import read_study

DOCS = Path(__file__).parent
PAGE = DOCS / "results.md"
BLOCK = re.compile(r"(?<=<!-- from )(\S+)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
"""The tables of a recorded result on the page."""


def shortened(found: Any) -> Any:
    """With six digits of every number with decimals."""
    if isinstance(found, dict):
        return {name: shortened(value) for name, value in found.items()}
    if isinstance(found, list):
        return [shortened(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def merged(
    recorded: dict[str, Any], new: dict[str, Any], tasks: list[str], members: list[str], more_seeds: bool = False
) -> dict[str, Any]:
    """A recorded result with the complete members of a new one, tasks and members in the order of the study's file.

    Args:
        recorded, new: results.
        tasks, members: names of the file.
        more_seeds: whether a member keeps its recorded seeds beside the new ones.

    Raises:
        UserError: the new one is of another study, or of other tokens, as `--quick` makes it; or a member whose seeds
            are to be kept had another size.
    """
    found = dict(recorded.get("tasks", {}))
    for name, task in new["tasks"].items():
        unknown = [member for member in task["members"] if member not in members]
        if name not in tasks or unknown:
            raise UserError(f"the study has no {name if name not in tasks else ', '.join(unknown)}; give its name")
        complete = {member: its for member, its in task["members"].items() if its["seeds"]}
        if complete:
            known = found.get(name, task)["tokens"]
            if task["tokens"] != known:
                raise UserError(f"{name}: {task['tokens']:,} tokens, and what is recorded has {known:,}")
            if more_seeds:
                known = found.get(name, {}).get("members", {})
                complete = {member: _with_seeds(known.get(member), its, member) for member, its in complete.items()}
            both = {**found.get(name, {}).get("members", {}), **complete}
            found[name] = {**task, "members": {member: both[member] for member in sorted(both, key=members.index)}}
    return {**new, **recorded, "tasks": {name: found[name] for name in sorted(found, key=tasks.index)}}


def _with_seeds(recorded: dict[str, Any] | None, new: dict[str, Any], member: str) -> dict[str, Any]:
    """A new member with the seeds of the recorded one, if both have the same costs; of settings nothing is recorded."""
    if recorded is None:
        return new
    if any(new[key] != recorded.get(key) for key in new.keys() - {"seeds", "swept"}):
        raise UserError(f"{member}: what is recorded is another model, so its seeds can't be kept")
    seeds = {**recorded["seeds"], **new["seeds"]}
    for seed in seeds.keys() - recorded["seeds"].keys():  # perhaps of another machine: speed is of those before
        seeds[seed] = {key: its for key, its in seeds[seed].items() if key != "tokens_per_second"}
    return {**recorded, **new, "seeds": {seed: seeds[seed] for seed in sorted(seeds, key=int)}}


def page_of(page: str) -> str:
    """The page with its tables written anew."""

    def tables(block: re.Match[str]) -> str:
        result = json.loads((DOCS / block[1]).read_text(encoding="utf-8"))
        made = frontier_tables if "models" in result else comparison
        return block[1] + block[2] + made.markdown(result).strip()

    return BLOCK.sub(tables, page)


def record(folder: Path, name: str, more_seeds: bool = False) -> Path:
    """Record the study of a folder under the name of its file; returns the JSON file."""
    study = read_study(name)
    path = DOCS / "results" / f"{name}.json"
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    new = shortened(json.loads((folder / FILE).read_text(encoding="utf-8"))) | {"study": f"{name}.yaml"}
    order = [task.name for task in study.tasks], [member.name for member in study.members]
    result = merged(recorded, new | {"baseline": study.baseline}, *order, more_seeds)
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    page = page_of(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory() as drawn:
        for figure in draw(result, Path(drawn)):
            task = figure.stem.removeprefix("study_")
            for shown in (f"{name}_{task}", name) if figure.suffix == ".png" and task in new["tasks"] else ():
                if f"figures/{shown}.png" in page:
                    shutil.copy(figure, DOCS / "figures" / f"{shown}.png")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the study")
    parser.add_argument("name", nargs="?", help="of the study, by default the folder's")
    parser.add_argument("--more-seeds", action="store_true", help="members keep the seeds that are recorded of them")
    options = parser.parse_args()
    try:
        print(record(options.folder, options.name or options.folder.name, options.more_seeds))
    except (UserError, OSError) as error:
        parser.exit(1, f"record: {error}\n")
