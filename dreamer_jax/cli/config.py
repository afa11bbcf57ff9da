"""`dreamer config list|show|check`: the configurations there are, a resolved one, whether a run could start with it."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from dreamer_jax.cli.arguments import read_config, split_words
from dreamer_jax.config import Config, to_yaml
from dreamer_jax.configs import ALL, Kind, files, find, kind_of, name_of
from dreamer_jax.configs import summary as summary_of
from dreamer_jax.errors import ConfigError, UserError

USAGE = """\
usage: dreamer config list
       dreamer config show CONFIG [--section.key value ...]
       dreamer config check CONFIG [--section.key value ...]

list   names what comes with the package; a name stands wherever a command takes a file of its kind
show   prints every value and where it came from, as YAML that can be used as a file; a mixture or a study as it is
check  says whether the values fit together and the files they name exist
`dreamer config show --help` lists every setting."""

HEADINGS: dict[Kind, str] = {
    "configuration": "Configurations: dreamer train NAME, and wherever a command takes a CONFIG",
    "mixture": "Mixtures of training data: dreamer data prepare NAME",
    "study": "Studies: dreamer study NAME",
    "frontier model": "Models for comparison: dreamer frontier TASK --model NAME",
}


def run(arguments: list[str]) -> int:
    """List, show or check configurations; returns the exit code."""
    actions = {"list": _list, "show": _show, "check": _check}
    if arguments and arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        alike = difflib.get_close_matches(given, list(actions), n=1)
        fix = f"; did you mean 'config {alike[0]}'?" if alike else f"\n{USAGE}"
        problem = f"unknown action '{given}'" if given else "list, show or check?"
        raise UserError(f"config: {problem}{fix}")
    actions[arguments[0]](arguments[1:])
    return 0


def _list(words: list[str]) -> None:
    """A line for each file of the package: its name and what it is."""
    if words and words[0] not in ("--help", "-h"):
        raise UserError(f"config list: unexpected '{words[0]}'; usage: dreamer config list")
    if words:
        print(USAGE)
        return
    width = max(len(name_of(path)) for path in files())
    groups = []
    for kind in ALL:
        lines = [f"  {name_of(path):<{width}}  {summary_of(path)}" for path, its in files().items() if its == kind]
        groups.append("\n".join([HEADINGS[kind], *lines]))
    print("\n\n".join(groups))


def _show(words: list[str]) -> None:
    named, overrides, help_asked = split_words(words)
    if len(named) == 1 and not help_asked:
        path = find(named[0], *ALL)
        kind = _kind(path)
        if kind in ("mixture", "study"):
            if overrides:
                raise UserError(f"config show: {named[0]} is a {kind} and is shown as it is; leave {overrides[0]} out")
            print(path.read_text(encoding="utf-8"), end="")
            return
        words = [str(path), *overrides]
    if loaded := read_config("config show", words):
        print(to_yaml(loaded), end="")


MARKS: dict[str, Kind] = {"members": "study", "sources": "mixture"}
"""What a file of somebody's own has that no configuration has."""


def _kind(path: Path) -> Kind:
    """What a file is for, by its place in the package, or by what is in it."""
    if path.resolve() in files():
        return kind_of(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # who reads it as a configuration says what is wrong
        return "configuration"
    own: list[Kind] = [kind for mark, kind in MARKS.items() if isinstance(found, dict) and mark in found]
    return own[0] if own else "configuration"


def _check(words: list[str]) -> None:
    named, _, help_asked = split_words(words)
    if len(named) == 1 and not help_asked:
        kind = _kind(find(named[0], *ALL))
        if kind in ("mixture", "study"):
            way = f"dreamer study {named[0]} --plan" if kind == "study" else f"dreamer data prepare {named[0]}"
            raise UserError(f"config check: {named[0]} is a {kind}; `{way}` checks it")
    loaded = read_config("config check", words)
    if loaded is None:
        return
    config = loaded.config
    from dreamer_jax.training.checks import check_settings  # after the other checks: importing jax takes a second

    check_settings(config)
    named = {"data.path": config.data.path, "data.heldout_path": config.data.heldout_path}
    if config.data.source in ("task", "puzzle"):
        named = {}
    if config.data.source == "prepared":  # a directory, complete when it has its index
        named = {key: f"{path}/index.json" if path else "" for key, path in named.items()}
    if config.data.tokenizer != "bytes":
        named["data.tokenizer"] = config.data.tokenizer
    for key, path in named.items():
        if path and not Path(path).is_file():
            raise ConfigError(f"{loaded.origins[key]}: {key}: no such file '{path}'", key)
    if config.data.source == "prepared" and config.data.mixture:
        try:
            find(config.data.mixture, "mixture")
        except ConfigError as error:
            raise ConfigError(f"{loaded.origins['data.mixture']}: data.mixture: {error}", "data.mixture") from None
    _check_data(config)
    print("ok")
    print(summary(config))


def _check_data(config: Config) -> None:
    """What `dreamer train` would refuse of built-in data, of the tokenizer, and of the names of benchmarks."""
    from dreamer_jax.data import open_data
    from dreamer_jax.data.pipeline import require_vocabulary
    from dreamer_jax.data.tokenizers import load_tokenizer
    from dreamer_jax.evaluation.runner import choose_tasks

    if config.data.source in ("task", "puzzle"):
        open_data(config)
    else:
        require_vocabulary(config, load_tokenizer(config.data.tokenizer), f"tokenizer {config.data.tokenizer}")
    if config.evaluation.tasks:
        choose_tasks(config.evaluation.tasks, "evaluation.tasks")


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
