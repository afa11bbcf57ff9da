"""`dreamer eval RUN`: benchmarks by the rules of lm-evaluation-harness, from local files."""

from __future__ import annotations

import json
from pathlib import Path

from dreamer_jax.cli.arguments import Parser, natural, positive
from dreamer_jax.cli.inference_options import CACHE, INT8, KNOWLEDGE, add_mesh, add_sampling, mesh_of, sampling_of
from dreamer_jax.cli.sampler_options import add_sampler, parse
from dreamer_jax.errors import UserError

OF_PPL = {"text": "", "template": "{text}", "prompt": "", "window": None}
"""Options that only the task ppl reads, and their defaults."""


def run(arguments: list[str]) -> int:
    """Evaluate a checkpoint and print its table; returns the exit code."""
    options, sampler = parse(_parser(), arguments)
    if sampler is None:
        return 0
    from dreamer_jax.evaluation.report import table
    from dreamer_jax.evaluation.runner import Settings, choose_tasks, evaluate

    tasks = choose_tasks(options.tasks)  # a wrong name shows before anything is loaded
    idle = [name for name in OF_PPL if getattr(options, name) != OF_PPL[name]]
    if idle and "ppl" not in {task.name for task in tasks}:
        raise UserError(f"eval: --{idle[0]} is for the task ppl; leave it out, or add ppl to --tasks")
    sampling = sampling_of(options)
    from dreamer_jax.evaluation.opening import open_model

    model, place = open_model(
        options.run,
        depth=options.depth,
        dtype=options.dtype,
        int8=options.int8,
        average=options.average,
        tokenizer=options.tokenizer,
        max_length=options.max_length,
        batch_size=options.batch_size,
        sampler=sampler,
        sampling=sampling,
        cache=options.cache,
        knowledge=options.knowledge,
        mesh=mesh_of(options.mesh_data, options.mesh_expert),
    )
    settings = Settings(
        data=options.data,
        shots=options.shots,
        max_tokens=options.max_tokens,
        sampling=sampling,
        text=options.text,
        template=options.template,
        window=options.window,
        prompt=options.prompt,
        space_in_prompt=place.space_in_prompt,
    )
    folder = Path(options.out) if options.out else place.folder
    results = evaluate(
        model,
        tasks,
        settings,
        folder,
        place.source,
        place.row_length,
        limit=options.limit,
        fresh=options.fresh,
        say=lambda line: None if options.json else print(line, flush=True),
    )
    print(json.dumps(results, indent=1) if options.json else f"\n{table(results)}\n\nrecords {folder}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="dreamer eval",
        description="Evaluate a trained model on benchmarks, by the rules of lm-evaluation-harness.",
        epilog="Files, rules and what is written: docs/evaluation.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run directory, or one checkpoint in it (RUN/checkpoints/500)")
    add("--tasks", default="gsm8k,math,mmlu_math,mathqa,ppl", help="of these, with commas between them (all)")
    add("--data", default="data", help="folder of the benchmarks: gsm8k/test.jsonl, math/test.jsonl, ... (data)")
    add("--shots", type=natural, default=0, help="examples before each question (0)")
    add(
        "--limit",
        type=positive,
        help="only so many questions of each task, the first of every subject; can be extended later",
    )
    add("--batch-size", type=positive, default=16, help="rows computed at once (16)")
    add("--max-tokens", type=positive, help="most tokens of an answer (gsm8k 256, math 512)")
    add("--max-length", type=positive, help="most tokens of prompt and answer (2048, or the run's row length if more)")
    add("--text", default=OF_PPL["text"], help="task ppl: a text file, or JSONL (GSM8K's solved test questions)")
    add("--template", default=OF_PPL["template"], help="task ppl: what is read of a JSONL record ({text})")
    add(
        "--prompt",
        default=OF_PPL["prompt"],
        help="task ppl: what of the record stands before that, encoded apart from it (nothing)",
    )
    add("--window", type=positive, help="task ppl: tokens the model sees at once (the run's row length)")
    add("--depth", type=positive, help="depths to apply, instead of the trained number")
    add("--average", type=positive, default=1, metavar="N", help="take the mean of the last N checkpoints' weights (1)")
    add("--dtype", choices=("bfloat16", "float32"), help="compute precision, instead of the run's")
    add("--int8", action="store_true", help=INT8)
    add("--cache", metavar="RULE", help=CACHE)
    add("--knowledge", metavar="FILE.safetensors", help=KNOWLEDGE)
    add("--tokenizer", help="where the run's tokenizer is now, if it was moved")
    add_sampling(parser)
    add_sampler(parser)
    add_mesh(parser)
    add("--out", metavar="DIR", help="folder of records and results (RUN/evaluation/step-N)")
    add("--fresh", action="store_true", help="discard earlier records")
    add("--json", action="store_true", help="print the results as JSON")
    return parser
