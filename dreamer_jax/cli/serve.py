"""`dreamer serve RUN`: a trained model behind OpenAI's API, and a page to chat with it."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamer_jax.cli import interrupts
from dreamer_jax.cli.arguments import Parser, natural, positive, say
from dreamer_jax.cli.inference_options import CACHE, INT8, KNOWLEDGE, RUN, add_mesh, mesh_of, prompt_template
from dreamer_jax.errors import UserError, how_to_install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh

    from dreamer_jax.inference.samplers import Sampler
    from dreamer_jax.model import Model
    from dreamer_jax.serving.contract import ServingEngine

ROWS = "requests that a step computes (16), or the next number above that the devices divide"
EXAMPLE = '{"name": "diffusion-forcing", "wavefront": 16}'
OFFER = f"a sampler beside static, adaptive and lossless: a name, or JSON as {EXAMPLE}; may be given several times"


def run(arguments: list[str]) -> int:
    """Serve until a signal; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.port > 65535:
        raise UserError(f"--port {options.port}: must be at most 65535")
    if options.context == 1:
        raise UserError("--context 1: must be 2 or more; a prompt has a token, and its answer another")
    try:
        from dreamer_jax.serving import process
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"dreamer serve needs the extra serve; {how_to_install('serve')}") from None
    from dreamer_jax.model import load
    from dreamer_jax.serving.keys import read_keys
    from dreamer_jax.serving.prompts import Prompts, chat_template_of
    from dreamer_jax.serving.server import Served, Server

    further, mesh = [offered(word) for word in options.offer], mesh_of(options.mesh_data, options.mesh_expert)
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    taken = process.open_port(options.host, options.port)
    names = ("average", "dtype", "int8", "cache", "knowledge", "tokenizer")
    model = load(options.run, **{name: getattr(options, name) for name in names})
    model.folded(options.depth)  # says so of a model that doesn't generate, before its tokenizer is asked for
    tokenizer = model.tokenizer
    template = prompt_template(model.config)
    prompts = Prompts(tokenizer, model.config.model.vocab_size, template, chat_template_of(tokenizer))
    context = options.context or model.config.data.sequence_length
    loopback = process.is_loopback(taken)
    if not loopback and keys is None:
        say(f"--host {options.host} without --api-key-file: everybody who reaches this machine may ask")
    served = Served(name_of(options.run), prompts, context, keys, loopback, options.log_text)
    _log_to_stderr()
    engine = engine_for(model, options.rows, context, options.queue, options.depth, further, mesh)
    process.serve(Server(engine, served), taken, options.grace, say)
    if not engine.ended:  # it compiles; Python's own end would crash in XLA's threads
        interrupts.end(0)
    return 0


def offered(word: str) -> Sampler:
    """A sampler as `--offer` has it: a name, or JSON as a request's `sampler`.

    Raises:
        UserError: it isn't one.
    """
    from dreamer_jax.inference.samplers.by_name import as_written, sampler_of

    settings: Any = {"name": word}
    if word.startswith("{"):
        try:
            settings = json.loads(word)
        except (ValueError, RecursionError):
            raise UserError(f"--offer {word[:80]}: isn't JSON; as {EXAMPLE}") from None
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"--offer {word}: has no name; as {EXAMPLE}")
    try:
        return sampler_of(name, as_written(settings), "")
    except UserError as error:
        raise UserError(f"--offer {word}: {error}") from None


def engine_for(
    model: Model,
    rows: int,
    context: int,
    queue: int,
    depth: int | None,
    further: Sequence[Sampler] = (),
    mesh: Mesh | None = None,
) -> ServingEngine:
    """The engine that computes what a server is asked.

    Args:
        model: a trained one.
        rows: requests that a step computes.
        context: most tokens of a prompt and its answer.
        queue: answers that wait before requests are refused.
        depth: L; None for the trained one.
        further: samplers beside static, adaptive and lossless; a name alone stands for the first of them that has it.
        mesh: None for one device.
    """
    from dreamer_jax.serving.engine import ServedEngine, samplers_for
    from dreamer_jax.serving.options import Options

    folded = model.folded(depth)
    samplers = [*further, *samplers_for(folded)]
    options = Options(rows=rows, context=context, queue=queue)
    return ServedEngine(folded, samplers, options, say, mesh)


def _log_to_stderr() -> None:
    """A line for each request; other packages' settings of logging change nothing about it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("dreamer_jax.serving")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def name_of(run: str) -> str:
    """What clients call the model: the folder of its run, with the step where one was named."""
    path = Path(run).resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.name


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer serve",
        description="Answer requests as OpenAI's API does, and show a page to chat at the same address. SIGTERM "
        "finishes what was admitted; Ctrl-C, or a second SIGTERM, stops at once. docs/serving.md describes the API.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN)
    add("--port", type=natural, default=8000, metavar="N", help="where it listens; 0 takes any that is free (8000)")
    add("--host", default="127.0.0.1", metavar="HOST", help="0.0.0.0 lets other machines reach it (127.0.0.1)")
    add("--api-key-file", metavar="FILE", help="keys, one a line: whoever asks needs one of them (nobody does)")
    add("--rows", type=positive, default=16, metavar="N", help=ROWS)
    add("--context", type=positive, metavar="N", help="tokens of a prompt and its answer (a row's in training)")
    add("--queue", type=positive, default=64, metavar="N", help="answers that wait (64); then requests get 429")
    add("--offer", action="append", default=[], metavar="SAMPLER", help=OFFER)
    add("--depth", type=positive, metavar="L", help="depths to apply; a recurrent model takes any (as trained)")
    add_mesh(parser, every=True)
    add("--grace", type=_seconds, default=30.0, metavar="SECONDS", help="for what was admitted, after SIGTERM (30)")
    add("--log-text", action="store_true", help="write prompts and answers to the log, which otherwise has none")
    add("--average", type=positive, default=1, metavar="N", help="the mean of the last N checkpoints' weights (1)")
    add("--dtype", choices=["float32", "bfloat16"], help="compute precision (as trained)")
    add("--int8", action="store_true", help=INT8)
    add("--cache", metavar="RULE", help=CACHE)
    add("--knowledge", metavar="FILE.safetensors", help=KNOWLEDGE)
    add("--tokenizer", metavar="FILE", help="where the run's tokenizer is now, if it was moved")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return seconds
