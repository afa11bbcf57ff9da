"""`dreamer embed RUN TEXTS.jsonl --out FILE.safetensors`: embeddings of texts, for models that attend to texts."""

from __future__ import annotations

import codecs
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, positive, say
from dreamer_jax.cli.generate import prompt_file
from dreamer_jax.errors import UserError


def run(arguments: list[str]) -> int:
    """Embed and write; returns the exit code."""
    options = _parser().parse_args(arguments)
    source, out = prompt_file(options.texts), Path(options.out)
    from dreamer_jax.runs import knowledge

    if out.suffix != knowledge.SUFFIX:
        raise UserError(f"--out {out}: must end in {knowledge.SUFFIX}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    beside = knowledge.texts_beside(out)
    if beside.exists() and beside.samefile(source):
        raise UserError(f"--out {out}: the texts go beside it, to {beside}, which is what is read; choose another name")
    for path, what in ((out, ""), (beside, ", where the texts would go")):
        if path.exists():
            raise UserError(f"--out {out}: {path} exists{what}; choose another name, or remove it first")
    texts = read_texts(source, options.field)
    from dreamer_jax.model import load

    model = load(options.run, average=options.average, dtype=options.dtype, tokenizer=options.tokenizer)
    embeddings = model.embed(texts, options.depth, options.batch_size)
    knowledge.write(out, embeddings, texts)
    count, size = embeddings.shape
    say(f"{count:,} texts, embeddings of {size}; the texts are in {beside}")
    settings = f"--model.pa_source texts --model.pa_slots {count} --model.pa_embedding_size {size}"
    say(f"a model is trained with them by {settings} --data.knowledge {out}")
    print(f"done: {out}")
    return 0


def read_texts(path: Path, field: str) -> list[str]:
    """A field of every record of a file.

    Raises:
        UserError: there is no record, a line is broken, or a text is empty.
    """
    from dreamer_jax.data.jsonl import Broken, parse_object

    texts = []
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = parse_object(line).get(field)
        except Broken as error:
            raise UserError(f"{path}: line {number}: {error}") from None
        if not isinstance(text, str) or not text:
            raise UserError(f"{path}: line {number}: field {field!r} must hold a text; --field names another one")
        texts.append(text)
    if not texts:
        raise UserError(f"{path} holds no record")
    return texts


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer embed",
        description="Embeddings of texts by a trained model, for models that attend to texts (model.pa_source texts): "
        "the mean of its last states over the tokens of a text, with a mean square of 1.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run directory, one checkpoint in it (RUN/checkpoints/500), or an exported folder")
    add("texts", metavar="TEXTS.jsonl", help="a record for each text")
    add("--out", required=True, metavar="FILE.safetensors", help="the embeddings; the texts go beside them, as .jsonl")
    add("--field", default="text", metavar="NAME", help="of a record, which holds its text (text)")
    add("--depth", type=positive, metavar="L", help="depths to apply; a recurrent model takes any (as trained)")
    add("--average", type=positive, default=1, metavar="N", help="take the mean of the last N checkpoints' weights (1)")
    add("--dtype", choices=["float32", "bfloat16"], help="compute precision (as trained)")
    add("--tokenizer", metavar="FILE", help="where the run's tokenizer is now, if it was moved")
    add("--batch-size", type=positive, default=16, metavar="B", help="texts at once (16)")
    return parser
