"""`dreamer generate RUN --prompt TEXT | --file prompts.jsonl`: a trained model continues texts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dreamer_jax.cli.arguments import Parser, figure_file, say
from dreamer_jax.cli.inference_options import RUN, add_options, open_model, prompt_template, sampling_of
from dreamer_jax.cli.sampler_options import parse
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from dreamer_jax.inference import Sampler


def run(arguments: list[str]) -> int:
    """Generate and print; returns the exit code."""
    options, sampler = parse(_parser(), arguments)
    if sampler is None:
        return 0
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size}: must be 1 or more")
    if options.trace is not None and options.prompt is None:
        raise UserError("--trace draws the text behind one prompt; give it with --prompt TEXT")
    if options.file is not None:
        return _answer_file(prompt_file(options.file), options, sampler)
    if options.prompt is None:
        raise UserError("generate: nothing to continue; give --prompt TEXT or --file prompts.jsonl")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:  # Python keeps such bytes as halves of characters
        raise UserError("--prompt: isn't text in UTF-8; give a terminal or a script in that encoding") from None
    if options.trace is not None:
        return _trace(figure_file("--trace", options.trace), options, sampler)
    from dreamer_jax.inference.text import refuse_failed

    sampling = sampling_of(options)
    model, _ = open_model(options, sampler)
    shown, texts = "", []
    for texts in model.stream([options.prompt], options.max_tokens, sampling, options.stop):
        print(texts[0].text[len(shown) :], end="", flush=True)
        shown = texts[0].text
    print()
    refuse_failed(texts)
    return 0


def _trace(path: Path, options: argparse.Namespace, sampler: Sampler) -> int:
    """Continue one prompt and draw how the sampler went about it."""
    from dreamer_jax.analysis.trace_figure import figure_of
    from dreamer_jax.inference.text import refuse_failed

    model, _ = open_model(options, sampler)
    text, trace = model.trace(options.prompt, options.max_tokens, sampling_of(options), options.stop)
    print(text.text)
    figure = figure_of(trace, model.tokenizer, sampler.label)
    path.write_bytes(figure.render(path.suffix[1:]))
    say(f"figure {path}")
    refuse_failed([text])
    return 0


def _answer_file(path: Path, options: argparse.Namespace, sampler: Sampler) -> int:
    """Continue the prompts of a file, batch by batch in its order."""
    from dreamer_jax.inference.text import refuse_failed

    sampling = sampling_of(options)
    model, config = open_model(options, sampler)
    records, done = read_prompts(path, prompt_template(config)), []
    for first in range(0, len(records), options.batch_size):
        part = records[first : first + options.batch_size]
        prompts = [prompt for _, prompt in part]
        numbers = range(first, first + len(part))
        texts = model.generate(prompts, options.max_tokens, sampling, options.stop, numbers)
        for (record, prompt), text in zip(part, texts, strict=True):
            answer = {"prompt": prompt, "generated": text.text, "finish": text.finish, "tokens": len(text.tokens)}
            if model.exits_early:
                answer |= {"mean_depth": round(text.mean_depth, 3), "steps": text.steps}
            if model.drafts:
                answer |= {"steps": text.steps, "drafted": text.drafted, "accepted": text.accepted}
            print(json.dumps(record | answer, ensure_ascii=False), flush=True)
        done += texts
        say(f"{first + len(part)}/{len(records)}")
    refuse_failed(done)
    return 0


def prompt_file(path: str) -> Path:
    """A file of prompts.

    Raises:
        UserError: there is none.
    """
    if Path(path).is_dir() or not Path(path).exists():  # a pipe is one, too
        raise UserError(
            f"{path}: is a folder; name a file" if Path(path).is_dir() else f"{path}: there is no such file"
        )
    return Path(path)


def read_prompts(path: Path, template: str) -> list[tuple[dict[str, object], str]]:
    """Each record of a file and its prompt: its own field `prompt`, or the run's template filled with its fields.

    Raises:
        UserError: there is no record, or a line is broken.
    """
    from dreamer_jax.data.jsonl import Broken, Template, parse_object

    records, filler = [], Template(template, "data.prompt")
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = parse_object(line)
            if "prompt" not in record and not filler.fields:
                raise Broken("no prompt", "it has no field prompt")  # the template would make the same of every record
            prompt = record["prompt"] if "prompt" in record else filler.fill(record)
            json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # as it will be printed
        except UnicodeEncodeError:
            raise UserError(f"{path}: line {number}: holds half of a surrogate pair, which is no text") from None
        except Broken as error:
            raise UserError(
                f"{path}: line {number}: {error}; a record has a field prompt, or those of data.prompt {template!r}"
            ) from None
        except ValueError:
            raise UserError(f"{path}: line {number}: holds a number that JSON has not, or too large a one") from None
        if not isinstance(prompt, str):
            raise UserError(f"{path}: line {number}: prompt is not a text")
        records.append((record, prompt))
    if not records:
        raise UserError(f"{path} holds no record")
    return records


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer generate",
        description="Continue texts with a trained model. One --prompt is printed while it grows; --file gives JSON, "
        "a line for each record: its own fields, then prompt, generated, finish, tokens and what the sampler counted.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="the text to continue, exactly")
    what.add_argument(
        "--file", metavar="JSONL", help="records with a field prompt, or with the fields of the run's data.prompt"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="records at once (16)")
    parser.add_argument(
        "--trace", metavar="FILE.svg", help="also draw what the sampler did with each position at each depth step"
    )
    add_options(parser)
    return parser
