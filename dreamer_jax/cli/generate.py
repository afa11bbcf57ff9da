"""`dreamer generate RUN --prompt TEXT | --file prompts.jsonl`: a trained model continues texts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, say
from dreamer_jax.cli.inference_options import RUN, add_options, open_model, sampling_of
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Generate and print; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size}: must be 1 or more")
    if options.file is not None:
        return _answer_file(Path(options.file), options)
    if options.prompt is None:
        raise UserError("generate: nothing to continue; give --prompt TEXT or --file prompts.jsonl")
    sampling = sampling_of(options)
    model, _ = open_model(options)
    shown = ""
    for texts in model.stream([options.prompt], options.max_tokens, sampling, options.stop):
        print(texts[0].text[len(shown) :], end="", flush=True)
        shown = texts[0].text
    print()
    return 0


def _answer_file(path: Path, options: argparse.Namespace) -> int:
    """Continue the prompts of a file, batch by batch in its order."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    sampling = sampling_of(options)
    model, config = open_model(options)
    records = _records(path, config.data.prompt)
    for first in range(0, len(records), options.batch_size):
        part = records[first : first + options.batch_size]
        prompts = [prompt for _, prompt in part]
        texts = model.generate(prompts, options.max_tokens, sampling, options.stop, first)
        for (record, prompt), text in zip(part, texts, strict=True):
            answer = {"prompt": prompt, "generated": text.text, "finish": text.finish, "tokens": len(text.tokens)}
            if model.exits_early:
                answer["mean_depth"] = round(text.mean_depth, 3)
            print(json.dumps(record | answer, ensure_ascii=False), flush=True)
        say(f"{first + len(part)}/{len(records)}")
    return 0


def _records(path: Path, template: str) -> list[tuple[dict[str, object], str]]:
    """Each record of the file and its prompt: its own field `prompt`, or the run's template filled with its fields."""
    from dreamer_jax.data.jsonl import Broken, Template, parse_object

    records, filler = [], Template(template, "data.prompt")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = parse_object(line)
            prompt = record["prompt"] if "prompt" in record else filler.fill(record)
        except Broken as error:
            raise UserError(
                f"{path}: line {number}: {error}; a record has a field prompt, or those of data.prompt {template!r}"
            ) from None
        if not isinstance(prompt, str):
            raise UserError(f"{path}: line {number}: prompt is not a text")
        records.append((record, prompt))
    if not records:
        raise UserError(f"{path} holds no record")
    return records


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dreamer generate",
        description="Continue texts with a trained model. One --prompt is printed while it grows; --file gives JSON, "
        "a line for each record: its own fields, then prompt, generated, finish and tokens.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="the text to continue, exactly")
    what.add_argument(
        "--file", metavar="JSONL", help="records with a field prompt, or with the fields of the run's data.prompt"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="records at once (16)")
    add_options(parser)
    return parser
