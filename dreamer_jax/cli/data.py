"""`dreamer data prepare|show|train-tokenizer|build`."""

from __future__ import annotations

import difflib
from pathlib import Path

from dreamer_jax.errors import ConfigError, UserError, how_to_install

USAGE = """\
usage: dreamer data prepare MIXTURE --out DIR [--workers N]
       dreamer data show CONFIG|DIR [--documents N] [--section.key value ...]
       dreamer data train-tokenizer MIXTURE --size N --out FILE.json
       dreamer data build NAME --out DIR [--from PATH]

prepare          clean, strip, decontaminate, deduplicate and tokenize the sources of a mixture into DIR;
                 started again after a kill, it goes on where it stopped
show             a few documents as the model sees them, fill rate and lengths: of a configuration, or of a
                 directory made by prepare (settings such as --data.sequence_length 512 apply to both)
train-tokenizer  train a small byte-level BPE on the sources of a mixture
build            make TFDS data (ArrayRecord) of one of the paper's sets under DIR, from the hub or from files that
                 were downloaded before; a wrong NAME lists them
MIXTURE is a YAML file or a name, such as gsm8k_math, that `dreamer config list` shows"""


def run(arguments: list[str]) -> int:
    """Run one of the data commands; returns the exit code."""
    actions = {"prepare": _prepare, "show": _show, "train-tokenizer": _train_tokenizer, "build": _build}
    if not arguments or arguments[0] in ("--help", "-h") or {"--help", "-h"} & set(arguments[1:]):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] not in actions:
        alike = difflib.get_close_matches(arguments[0], list(actions), n=1)
        fix = f"; did you mean 'data {alike[0]}'?" if alike else f"\n{USAGE}"
        raise UserError(f"data: unknown action '{arguments[0]}'{fix}")
    actions[arguments[0]](arguments[1:])
    return 0


def _prepare(words: list[str]) -> None:
    from dreamer_jax.data.preparation import default_workers, prepare
    from dreamer_jax.data.reporting import table

    mixture, options = _words("prepare", words, ("--out", "--workers"))
    if "--out" not in options:
        raise UserError("data prepare: name the directory to fill: --out DIR")
    workers = _number(options["--workers"], "--workers") if "--workers" in options else default_workers()
    report = prepare(mixture, options["--out"], workers, say=lambda line: print(line, flush=True))
    print(table(report).partition("\nExamples")[0])
    print(f"examples of what each rule did: {Path(options['--out']) / 'report.txt'}")


def _show(words: list[str]) -> None:
    from dreamer_jax.config.loading import build, load_config, read_overrides
    from dreamer_jax.data import open_data
    from dreamer_jax.data.prepared import read_index
    from dreamer_jax.data.showing import show
    from dreamer_jax.data.tokenizers import load_tokenizer

    documents = 3
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--documents":
            after = at + (1 if equals else 2)
            documents = _number(value if equals else "".join(words[at + 1 : after]), "--documents")
            words = words[:at] + words[after:]
            break
    if not words or words[0].startswith("-"):
        raise UserError(f"data show: name a configuration or a directory\n{USAGE}")
    path, overrides = words[0], words[1:]
    if Path(path).is_dir() and not (Path(path) / "config.yaml").is_file():
        index = read_index(Path(path), "data show")
        given = read_overrides(overrides)
        tokenizer = given["data.tokenizer"].value if "data.tokenizer" in given else index["tokenizer"]["name"]
        implied = {"source": "prepared", "path": path, "tokenizer": tokenizer}
        words = [f"--data.{key}={value}" for key, value in implied.items() if f"data.{key}" not in given]
        words += [f"--model.vocab_size={load_tokenizer(tokenizer).vocab_size}"]
        if "data.heldout_records" not in given:
            words += ["--data.heldout_records=0"]
        if "data.sequence_length" not in given:
            words += ["--data.sequence_length=4096"]
        config = build(read_overrides(words) | given).config
    else:
        saved = Path(path) / "config.yaml"
        config = load_config(saved if saved.is_file() else path, overrides).config
    for line in show(open_data(config), documents):
        print(line)


def _train_tokenizer(words: list[str]) -> None:
    from dreamer_jax.data.json_tokenizer import train_tokenizer
    from dreamer_jax.data.mixture import at_its_line, load_mixture

    mixture, options = _words("train-tokenizer", words, ("--size", "--out"))
    for option in ("--size", "--out"):
        if option not in options:
            raise UserError(f"data train-tokenizer: {option} is missing\n{USAGE}")
    out = Path(options["--out"])
    if out.suffix != ".json":
        raise UserError(f"--out {out}: must end in .json, by which data.tokenizer knows its kind")
    if out.exists():  # what was prepared or trained with it goes by its fingerprint
        raise UserError(f"--out {out}: exists; choose another name, or remove it first")
    loaded, size = load_mixture(mixture), _number(options["--size"], "--size")
    try:
        tokenizer = train_tokenizer(loaded, size, out, print)
    except ConfigError as error:
        raise at_its_line(mixture, error) from None
    print(f"{out}: {tokenizer.vocab_size} ids, fingerprint {tokenizer.fingerprint[:12]}")


def _build(words: list[str]) -> None:
    name, options = _words("build", words, ("--out", "--from"))
    if "--out" not in options:
        raise UserError("data build: name TFDS's folder: --out DIR")
    try:
        from dreamer_jax.data.builders import build
    except ImportError:
        raise UserError(f"data build needs tensorflow-datasets; {how_to_install('data')}") from None
    print(f"{build(name, options['--out'], options.get('--from', ''))}: give it as the path of a source of format tfds")


def _words(action: str, words: list[str], known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The one file that the words name, and the options."""
    files, options, remaining = [], {}, list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            files.append(word)
            continue
        if name not in known:
            alike = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"data {action}: unknown option '{name}'" + (f"; did you mean '{alike[0]}'?" if alike else "")
            )
        if name in options:
            raise UserError(f"data {action}: {name} is given twice")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise UserError(f"data {action}: {name} needs a value")
            value = remaining.pop(0)
        options[name] = value
    if len(files) != 1:
        raise UserError(f"data {action}: name one thing, not {len(files)}\n{USAGE}")
    return files[0], options


def _number(written: str, option: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise UserError(f"{option}: expected a number above zero, got '{written}'")
    return int(written)
