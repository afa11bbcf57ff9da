"""`dreamer chat RUN`: lines are put into the run's prompt and answered, one after the other."""

from __future__ import annotations

import contextlib
import io
import sys

from dreamer_jax.cli.arguments import Parser, say
from dreamer_jax.cli.inference_options import RUN, add_options, open_model, prompt_template, sampling_of
from dreamer_jax.cli.sampler_options import parse
from dreamer_jax.data.jsonl import Broken
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Answer lines until they end; returns the exit code."""
    options, sampler = parse(_parser(), arguments)
    if sampler is None:
        return 0
    if sys.stdin is None:
        raise UserError("chat: there is no input to read lines from; give it a terminal, a pipe or a file")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that isn't text is said, and the next one is read
    sampling = sampling_of(options)
    model, config = open_model(options, sampler)
    from dreamer_jax.data.jsonl import Template
    from dreamer_jax.inference.text import refuse_failed

    template = Template(prompt_template(config), "data.prompt")
    if len(template.fields) > 1:
        raise UserError(
            f"chat: the run's prompt {config.data.prompt!r} takes several fields; use `dreamer generate --file`"
        )
    interactive = sys.stdin.isatty()
    if interactive:
        say("A line is answered when you press Enter; Ctrl-C stops an answer, an empty line or Ctrl-D ends.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys in input())
    history = ""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            break
        if not line.strip():
            if interactive:
                break
            continue
        try:
            prompt = template.fill({template.fields[0]: line}) if template.fields else line
            prompt.encode()
        except (Broken, UnicodeEncodeError):
            say("that line isn't text in UTF-8; it is left out")
            continue
        shown, texts = "", []
        try:
            for texts in model.stream([history + prompt], options.max_tokens, sampling, options.stop):
                print(texts[0].text[len(shown) :], end="", flush=True)
                shown = texts[0].text
        except KeyboardInterrupt:
            if not interactive:
                raise
        print("" if interactive else "\n", flush=True)  # in a pipe an empty line ends an answer, which may have several
        try:
            refuse_failed(texts)
        except UserError as error:
            say(str(error))
        if options.history:
            history += f"{prompt}{shown}\n"
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer chat",
        description="Answer lines from the terminal or a pipe. Each is put into the run's data.prompt, if that has a "
        "field, and answered by itself; --history puts what was said before in front of it. To a pipe, answers are "
        "followed by an empty line.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--history", action="store_true", help="keep the conversation so far in the prompt")
    parser.set_defaults(batch_size=1)
    add_options(parser)
    return parser
