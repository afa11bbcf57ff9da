"""`dreamer checkpoint list|verify|prune RUN`: what a run has saved, whether it is whole, and less of it."""

from __future__ import annotations

import argparse
import datetime

from dreamer_jax.cli.arguments import Parser, natural, positive
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Do what the words say; the exit code is 1 if `verify` finds damage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    from dreamer_jax.runs.folders import (  # after the checks: importing jax takes a second
        config_of_run,
        folder_of,
        not_a_run,
    )
    from dreamer_jax.runs.step_folders import StepFolders

    folder = folder_of(options.run)
    folders = StepFolders(folder.place)
    configured = (folder.local / "config.yaml").is_file()
    if not configured and (options.action == "prune" or not folders.all()):  # its rules are those of the run
        raise not_a_run(options.run, folder.local)
    if options.action == "list":
        return _list(folders)
    if options.action == "verify":
        return _verify(folder, folders, options.step)
    config = config_of_run(folder.local).checkpoint
    keep_every = config.keep_every if options.keep_every is None else options.keep_every
    with folder.alone("is being trained; prune it afterwards"):
        return _prune(folders, options.keep or config.keep, keep_every)


def _list(folders) -> int:
    from dreamer_jax.runs.integrity import bytes_of, problem_of_save

    steps = folders.all()
    for step in steps:
        if problem := problem_of_save(folders[step]):
            print(f"{step:>10}  {'':>13}  {problem}")
        else:
            saved = datetime.datetime.fromtimestamp(folders[step].stat().mtime).isoformat(" ", "seconds")
            print(f"{step:>10}  {bytes_of(folders[step]) / 1e6:>10,.1f} MB  {saved}")
    for path in folders.unfinished():
        print(f"{path.name}  being saved, or left by a save that was cut short")
    if not steps:
        print(f"{folders.path}: no checkpoints")
    return 0


def _verify(folder, folders, wanted: int | None) -> int:
    from dreamer_jax.runs.integrity import is_complete, problem_of

    steps = folders.all()
    if wanted is not None and wanted not in steps:
        raise UserError(f"{folders.path} has no step {wanted}; it has {', '.join(map(str, steps)) or 'none'}")
    damaged = 0
    for step in steps if wanted is None else [wanted]:
        problem = problem_of(folders[step])
        if problem and not is_complete(folders[step]) and _is_trained(folder):
            problem = "being saved or removed by the training of this run"
        else:
            damaged += problem is not None
        print(f"{step:>10}  {'good' if problem is None else problem}", flush=True)
    if not steps:
        print(f"{folders.path}: no checkpoints")
    return 1 if damaged else 0


def _is_trained(folder) -> bool:
    """Whether a process trains the run now."""
    try:
        with folder.alone():
            return False
    except UserError:
        return True


def _prune(folders, keep: int, keep_every: int) -> int:
    from dreamer_jax.runs.integrity import problem_of

    complete = folders.complete()
    problem = problem_of(folders[complete[-1]]) if complete else None
    if problem is not None:  # an older one may be all that is left of the run
        raise UserError(
            f"nothing was removed: the newest step, {complete[-1]}, is damaged ({problem}); remove its folder first, "
            f"{folders[complete[-1]]}"
        )
    gone = [str(step) for step in folders.prune(keep, keep_every)]
    left = ", ".join(map(str, folders.all())) or "none"
    print(f"removed {', '.join(gone) or 'nothing'}; left: {left}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dreamer checkpoint", description="The checkpoints of a run. See docs/checkpoints.md.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|verify|prune")
    listing = actions.add_parser("list", help="steps, sizes and times")
    verify = actions.add_parser(
        "verify", help="read every file and compare it with the manifest; exit code 1 on damage"
    )
    prune = actions.add_parser("prune", help="remove all but the newest and the regular ones; refused during training")
    for action in (listing, verify, prune):
        action.add_argument("run", metavar="RUN", help="a run directory")
    verify.add_argument("--step", type=int, metavar="N", help="only this one")
    prune.add_argument("--keep", type=positive, metavar="N", help="newest that stay (the run's checkpoint.keep)")
    prune.add_argument(
        "--keep-every", type=natural, metavar="N", help="multiples of this stay too (the run's checkpoint.keep_every)"
    )
    return parser
