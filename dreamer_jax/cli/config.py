"""`dreamer config show|check CONFIG`: the resolved configuration, or whether a run could start with it."""

from __future__ import annotations

import difflib
from pathlib import Path

from dreamer_jax.cli.arguments import read_config
from dreamer_jax.config import Config, LoadedConfig, to_yaml
from dreamer_jax.errors import ConfigError, UserError

USAGE = """\
usage: dreamer config show CONFIG [--section.key value ...]
       dreamer config check CONFIG [--section.key value ...]

show   prints every value and where it came from, as YAML that can be used as a file
check  says whether the values fit together and the files they name exist
`dreamer config show --help` lists every setting."""


def run(arguments: list[str]) -> int:
    """Show or check a configuration; returns the exit code."""
    actions = {"show": _show, "check": _check}
    if arguments and arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        alike = difflib.get_close_matches(given, list(actions), n=1)
        fix = f"; did you mean 'config {alike[0]}'?" if alike else f"\n{USAGE}"
        problem = f"unknown action '{given}'" if given else "show or check?"
        raise UserError(f"config: {problem}{fix}")
    loaded = read_config(f"config {arguments[0]}", arguments[1:])
    if loaded is not None:
        actions[arguments[0]](loaded)
    return 0


def _show(loaded: LoadedConfig) -> None:
    print(to_yaml(loaded), end="")


def _check(loaded: LoadedConfig) -> None:
    config = loaded.config
    named = {"data.path": config.data.path, "data.heldout_path": config.data.heldout_path}
    if config.data.source in ("task", "puzzle"):
        named = {}
    if config.data.source == "prepared":  # a directory, complete when it has its index
        named = {key: f"{path}/index.json" if path else "" for key, path in named.items()}
        named["data.mixture"] = config.data.mixture
    if config.data.tokenizer != "bytes":
        named["data.tokenizer"] = config.data.tokenizer
    for key, path in named.items():
        if path and not Path(path).is_file():
            raise ConfigError(f"{loaded.origins[key]}: {key}: no such file '{path}'", key)
    print("ok")
    print(summary(config))


def summary(config: Config) -> str:
    """A few lines on what would run."""
    model, data, training = config.model, config.data, config.training
    tokens = training.batch_size * data.sequence_length
    generated = {
        "task": f"built-in task {data.task}, difficulty 1 to {data.difficulty}, tokenizer {data.tokenizer}",
        "puzzle": f"puzzle {data.puzzle.task}, depth {data.puzzle.easiest} to {data.puzzle.difficulty}",
    }
    sizes = f"{model.family}, hidden size {model.hidden_size}, vocabulary {model.vocab_size}"
    lines = {
        "model": f"{getattr(model, 'summary', sizes)}, {model.dtype}",
        "data": generated.get(data.source, f"{data.path}, tokenizer {data.tokenizer}"),
        "training": f"{training.steps} steps of {training.batch_size} x {data.sequence_length} = {tokens} tokens, "
        f"learning rate {training.learning_rate:g}",
        "devices": f"{config.mesh.size}",
        "run": f"{config.run.dir}, seed {config.run.seed}",
    }
    return "\n".join(f"  {name:<9}{text}" for name, text in lines.items())
