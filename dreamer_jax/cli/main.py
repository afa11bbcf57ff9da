"""The entry point: finds the command, imports only that one, and turns errors into exit codes.

Exit codes: 0 success, 2 something a person can mend (one message on stderr, no traceback), 130 interrupted,
141 the reader of a pipe went away. Anything else is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from dreamer_jax import __version__, program_cache, stack_frames
from dreamer_jax.cli import interrupts
from dreamer_jax.errors import INTERRUPTED_EXIT_CODE, UserError, how_to_install

COMMANDS = {
    "train": ("dreamer_jax.cli.train", "train a model, or go on with a run"),
    "checkpoint": ("dreamer_jax.cli.checkpoint", "list, verify or prune the checkpoints of a run"),
    "data": ("dreamer_jax.cli.data", "prepare training data, show them, train a tokenizer"),
    "config": ("dreamer_jax.cli.config", "list the configurations there are, show a resolved one, or check one"),
    "bench": ("dreamer_jax.cli.bench", "measure speed, e.g. `dreamer bench train`"),
    "budget": ("dreamer_jax.cli.budget", "parameters, FLOPs per token and memory of a model"),
    "plan": ("dreamer_jax.cli.plan", "a TPU slice from a laptop: does a train step fit, and how fast could it be"),
    "match": ("dreamer_jax.cli.match", "give a model the cost of another, or make a matched family"),
    "eval": ("dreamer_jax.cli.eval", "benchmarks: GSM8K, MATH, MMLU, MathQA, perplexity of any text"),
    "compare": ("dreamer_jax.cli.compare", "cost and held-out results of runs, side by side"),
    "generate": ("dreamer_jax.cli.generate", "a trained model continues texts"),
    "chat": ("dreamer_jax.cli.chat", "a trained model answers line by line"),
    "serve": ("dreamer_jax.cli.serve", "a trained model behind OpenAI's API, with a page to chat"),
    "embed": ("dreamer_jax.cli.embed", "embeddings of texts, for models that attend to texts"),
    "analyze": ("dreamer_jax.cli.analyze", "what depth attention and the experts do: statistics, figures, a report"),
    "export": ("dreamer_jax.cli.export", "a trained model as a folder for PyTorch, verified"),
    "import": ("dreamer_jax.cli.import_", "an exported folder, perhaps fine-tuned, as a run"),
    "convert": ("dreamer_jax.cli.convert", "a pretrained Llama, Qwen3 or OLMo 2 as a model of recurrent depth"),
    "frontier": ("dreamer_jax.cli.frontier", "accuracy by task depth and thinking steps, beside a paper's"),
    "study": ("dreamer_jax.cli.study", "models of one cost trained alike on several tasks, with seeds, and compared"),
    "depth": ("dreamer_jax.cli.depth", "a trained model at other depths: loss, accuracy, what its steps do; a report"),
    "completion": ("dreamer_jax.cli.completion", "let bash, zsh or fish complete commands, names and options"),
    "info": ("dreamer_jax.cli.info", "versions, devices, and which extras are installed"),
}
"""Command -> (module with `run(arguments) -> exit code`, summary)."""

OPTION = "--family-module"
"""The option of every command; see dreamer_jax/config/models."""
HEAVY = [["train"], ["frontier"], ["study"], ["depth"], ["bench"], ["eval"], ["generate"], ["chat"], ["serve"]]
"""Commands that compute for long."""
COMPILING = [*(words for words in HEAVY if words != ["study"]), ["analyze"], ["embed"], ["export"], ["import"]]
"""Commands whose compiled programs are worth keeping; those of `plan` are for machines that aren't there, and runs of a
study are processes that have fewer cores."""
OF_THE_DISK = {
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or name another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "see whose it is, or name another place"),
    **dict.fromkeys((errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), "name another place"),
}
"""What a person can do about errors of files that no command has foreseen."""
MEMORY = (
    "glibc.malloc.hugetlb=1",
    f"glibc.malloc.mmap_threshold={4 << 20}",
    f"glibc.malloc.trim_threshold={1 << 40}",
)
"""What glibc is told: large allocations are huge pages, each a mapping of its own from 4 MiB on, and smaller ones stay
with the process when they are freed.

XLA's CPU backend allocates its temporaries anew in every step. With 4 KiB pages a small train step took some 200,000
page faults, a third of its CPU time; with huge ones it takes a few hundred. Keeping the large ones with the process too
saves the kernel from zeroing them, but the compiler leaves the heap full of holes: in a process that had compiled its
step the threads then waited for the heap, and steps took 1.2 to 1.5 times as long as in one that had found it compiled.
"""
NO_MEMORY = "there isn't the memory for what is asked; ask for less: fewer rows, tokens or depths, or a smaller model"
SELDOM = 100_000
"""New objects after which Python looks for cycles among them; with its own 700 a start takes 8 % longer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dreamer` with these words (by default the process's) and return its exit code."""
    words, modules = split_family_module(sys.argv[1:] if arguments is None else arguments)
    try:
        _give_to_children(modules)
        code = _dispatch(words)
        sys.stdout.flush()  # a closed pipe shows here, not at exit
        return code
    except SystemExit:  # an argument parser has printed its --help
        return 0
    except UserError as error:
        print(f"dreamer: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Nobody reads: keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"dreamer: error: {where}{error.strerror}; {OF_THE_DISK[error.errno]}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"dreamer: error: {NO_MEMORY}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # how jax says it
            raise
        print(f"dreamer: error: {NO_MEMORY} ({str(error).splitlines()[0][:200]})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        hint = _missing_package(error)
        if hint is None:
            raise
        print(f"dreamer: error: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dreamer: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def entry() -> int:
    """`main` for the process's own words, in a process that keeps compiled programs and is told `MEMORY`.

    glibc reads the settings only at start, hence the second start. What somebody has set himself comes after, and of
    two settings alike glibc takes the last.
    """
    if os.path.basename(sys.argv[0]) != "__main__.py":
        # As a script this looks for no module in the working directory, where somebody may have a yaml.py; so what it
        # starts by `python -m` shan't either.
        os.environ["PYTHONSAFEPATH"] = "1"
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    words, _ = split_family_module(sys.argv[1:])
    if sys.platform == "linux" and words[:1] in HEAVY and not set(MEMORY) <= set(tunables.split(":")):
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (*MEMORY, tunables)))
        os.execv(sys.executable, [sys.executable, "-m", "dreamer_jax", *sys.argv[1:]])
    interrupts.prepare()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models write any character, and some terminals have few
    if words[:1] in COMPILING:
        gc.set_threshold(SELDOM)
        os.environ.update(program_cache.settings() | stack_frames.settings())
    code = main()
    if code == INTERRUPTED_EXIT_CODE:
        interrupts.end()
    return code


FIRST_STEPS = """\
dreamer train quickstart        a small model in minutes, on any machine
dreamer generate runs/quickstart --prompt "((T&F)|T)="
dreamer analyze runs/quickstart    what its depth attention and experts do
dreamer config list             what else there is to train; any setting is an option
dreamer plan dr_da_32_v5p_4x4x4 --topology v5p:4x4x4    whether it fits that slice of TPUs, and how fast it could be

`dreamer --help` lists all commands."""
"""What `dreamer` alone prints: the five things that people do first."""


def usage() -> str:
    """The text of `dreamer --help`."""
    lines = ["usage: dreamer <command> [...]", "", "Depth-recurrent attention mixtures in JAX.", "", "commands:"]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", f"{OPTION} FILE_OR_MODULE, with any command: a family from outside of the package; several, too."]
    lines += ["`dreamer <command> --help` explains a command; `dreamer --version` prints the version."]
    return "\n".join(lines)


def split_family_module(arguments: Sequence[str]) -> tuple[list[str], list[str | None]]:
    """(the other words, the values of --family-module), None for a value that is missing."""
    words: list[str] = []
    values: list[str | None] = []
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name != OPTION:
            words.append(word)
        elif equals:
            values.append(value or None)
        else:
            values.append(remaining.pop(0) if remaining and not remaining[0].startswith("-") else None)
    return words, values


def _give_to_children(modules: Sequence[str | None]) -> None:
    """Leave the values of --family-module where the register of families looks for it, here and in child processes."""
    if not modules:
        return
    from dreamer_jax.config.models import VARIABLE, give  # not needed for `dreamer --help`

    given = [module for module in modules if module is not None]
    if len(given) < len(modules):
        raise UserError(f"{OPTION} needs a value: toy.py or package.module")
    os.environ[VARIABLE] = ""
    give(*given)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(FIRST_STEPS, file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"dreamer-jax {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        names = ["--help", "--version"] if kind == "option" else list(COMMANDS)
        alike = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        fix = f"did you mean '{alike[0]}'?" if alike else f"one of: {', '.join(names)}"
        raise UserError(f"unknown {kind} '{name}'; {fix}")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's remarks; what fails in it is said by its callers
    return importlib.import_module(COMMANDS[name][0]).run(rest)


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """How to install the package an import lacks, or None when it isn't one of this project's dependencies."""
    from dreamer_jax.cli.extras import extra_of

    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra is None:
        return None
    return f"the package {module} is not installed; {how_to_install(extra)}"
