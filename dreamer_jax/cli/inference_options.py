"""What `dreamer generate` and `dreamer chat` have in common: their options, and the model those ask for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dreamer_jax.cli.arguments import Parser, positive
from dreamer_jax.cli.sampler_options import add_sampler
from dreamer_jax.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dreamer_jax.config import Config
    from dreamer_jax.inference import LanguageModel, Sampler, Sampling


RUN = "a run directory, one checkpoint in it (RUN/checkpoints/500), or an exported folder"
CACHE = "which keys of tokens at other depths are seen: model.cache (as trained)"
INT8 = "keep the experts' matrices as whole numbers of eight bits: on CPUs, NVIDIA GPUs, and TPUs from v5 on"
KNOWLEDGE = "other texts to attend to than trained with, made by dreamer embed: for models with model.pa_source texts"


def add_options(parser: Parser) -> None:
    """The options of sampling, of the model, and of the devices."""
    add = parser.add_argument
    add("--max-tokens", type=positive, default=256, metavar="N", help="most tokens of a text (256)")
    add_sampling(parser)
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be given several times")
    add("--depth", type=int, metavar="L", help="depths to apply; a recurrent model takes any (as trained)")
    add("--average", type=int, default=1, metavar="N", help="take the mean of the last N checkpoints' weights (1)")
    add("--dtype", choices=["float32", "bfloat16"], help="compute precision (as trained)")
    add("--int8", action="store_true", help=INT8)
    add("--cache", metavar="RULE", help=CACHE)
    add("--knowledge", metavar="FILE.safetensors", help=KNOWLEDGE)
    add("--tokenizer", metavar="FILE", help="where the run's tokenizer is now, if it was moved")
    add_sampler(parser)
    add_mesh(parser)


def add_sampling(parser: Parser) -> None:
    """The options of how tokens are chosen."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    add("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that reach this probability (1)")
    add("--min-p", type=float, default=0.0, metavar="P", help="only those this fraction as likely as the likeliest (0)")
    add("--seed", type=int, default=0, help="of the draws (0)")


def add_mesh(parser: Parser, every: bool = False) -> None:
    """The options of the devices: of one, unless it is of every one that there is."""
    add, rows = parser.add_argument, "devices that share the rows"
    said = f"{rows}, beside those along --mesh.expert (all that there are)" if every else f"{rows} of a batch (1)"
    add("--mesh.data", dest="mesh_data", type=positive, default=None if every else 1, metavar="N", help=said)
    experts = "devices that share the experts (1)"
    add("--mesh.expert", dest="mesh_expert", type=positive, default=1, metavar="N", help=experts)


def mesh_of(data: int | None, expert: int) -> Mesh | None:
    """The devices that those options ask for; None for one.

    Args:
        data: None for as many as there are.
        expert: along the axis of the experts.

    Raises:
        UserError: there aren't so many.
    """
    import jax

    from dreamer_jax.config.sections import MeshConfig
    from dreamer_jax.parallel import make_mesh

    count = jax.device_count()
    if data is None:
        data, rest = divmod(count, expert)
        if rest:
            raise UserError(f"--mesh.expert {expert}: jax sees {count} devices; give --mesh.data, too, to take fewer")
    wanted = data * expert
    if wanted > count:
        raise UserError(f"--mesh.data {data} x --mesh.expert {expert} is {wanted} devices; jax sees {count}")
    return None if wanted == 1 else make_mesh(MeshConfig(data=(data,), expert=expert), jax.devices()[:wanted])


def sampling_of(options: argparse.Namespace) -> Sampling:
    """The sampling that the options ask for."""
    from dreamer_jax.inference import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)


def prompt_template(config: Config) -> str:
    """What a run's prompts were made with: of built-in tasks the question is the prompt."""
    return "{question}" if config.data.source == "task" else config.data.prompt


def open_model(options: argparse.Namespace, sampler: Sampler) -> tuple[LanguageModel, Config]:
    """The model of `options.run` that generates with a sampler, and its run's configuration.

    Raises:
        UserError: no model, another tokenizer, an impossible depth, a sampler that the model can't be used with, or too
            few devices.
    """
    from dreamer_jax.model import load

    mesh = mesh_of(options.mesh_data, options.mesh_expert)
    names = ("average", "dtype", "int8", "cache", "knowledge", "tokenizer")
    model = load(options.run, **{name: getattr(options, name) for name in names}, mesh=mesh)
    return model.texts(options.depth, sampler, options.batch_size), model.config
