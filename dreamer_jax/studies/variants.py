"""The models of a frontier study: the paper's, its ablations, and other families at the same number of parameters."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from dreamer_jax.budget import analytic
from dreamer_jax.budget.matching import changed
from dreamer_jax.config import Config, LoadedConfig, load_config
from dreamer_jax.config.files import read_file
from dreamer_jax.config.keys import FAMILY, key_types, values_of
from dreamer_jax.config.loading import Setting, build, read_overrides, settings_of
from dreamer_jax.config.models import find
from dreamer_jax.configs import find as find_file
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family
from dreamer_jax.families import build as build_family
from dreamer_jax.studies.cells import puzzle_family

BASE = "depth_recurrent"
"""The name of the paper's model in a study."""
SHARED = ("vocab_size", "positions", "readout", "classes")
"""Settings that another family takes over from the paper's model, because the task decides them."""
LARGEST = 1 << 16
"""Of a knob."""
TOLD = {"depth_counters": ("up", "learned", "none"), "depth_scaling": ("none",), "residual_scale": ("none",)}
"""Settings by which a step may know how deep its pass will be, and the values with which it doesn't."""

LEAKY = {
    "data.puzzle.negatives": "leaky",
    "training.steps": "1200",
    "training.learning_rate": "2e-3",
    "model.dropout": "0",
}
"""Of Table 1: what the loss at every step does to far paths shows late, when the near ones have long been right;
dropout works against it, and with the higher rate the loss at the last step reaches far without dropout."""

ABLATIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "graph": {
        "leaky": LEAKY,
        "leaky_every_step": {**LEAKY, "model.loss_at": "every"},
        "no_gate": {"model.gate": "false"},
        "no_depth_embedding": {"model.depth_embedding_std": "0"},
    },
    "boolean": {
        "every_step": {"model.loss_at": "every"},
        "no_gate": {"model.gate": "false"},
        "no_layer_scale": {"model.layer_scale": "0"},
        "no_depth_embedding": {"model.depth_embedding_std": "0"},
    },
}
"""Task -> name -> settings. The model for graphs has no LayerScale to take away (Table 2)."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model of a study, of which there is a run for every seed.

    Attributes:
        name: of its folder.
        loaded: the configuration of its runs but for `run`.
    """

    name: str
    loaded: LoadedConfig

    def with_run(self, folder: Path, seed: int) -> LoadedConfig:
        """The configuration of the run of a seed."""
        run = dataclasses.replace(self.loaded.config.run, dir=str(folder), seed=seed)
        return LoadedConfig(dataclasses.replace(self.loaded.config, run=run), self.loaded.origins)


def variants_of(
    task: str, preset: str, ablation: bool, models: Sequence[str], overrides: Sequence[str]
) -> list[Variant]:
    """The models of a study, the paper's first.

    Args:
        task: graph, boolean or family.
        preset: paper or laptop.
        ablation: whether its ablations belong to it.
        models: other families, see `other_family`.
        overrides: `--section.key value` words for all of them but other families, for which those of `model` count.

    Raises:
        UserError: two models have one name, or as of `other_family`.
    """
    path, words = f"configs/frontier/{task}_{preset}.yaml", _by_key(overrides)
    of_model = {key: its for key, its in words.items() if models and key.startswith("model.")}
    common = {key: its for key, its in words.items() if key not in of_model}
    base = load_config(path, _joined(common))
    found = [Variant(BASE, base)]
    if ablation:
        for name, settings in ABLATIONS["graph" if task == "graph" else "boolean"].items():
            changes = {key: [f"--{key}", value] for key, value in settings.items()}
            found.append(Variant(name, load_config(path, _joined({**common, **changes}))))
    for model in dict.fromkeys(models):
        name = Path(model).stem
        if any(variant.name == name for variant in found):
            raise UserError(f"--model {model}: the study has a model {name} already, whose folder it would share")
        found.append(Variant(name, other_family(model, base, _joined(of_model))))
    return found


def _by_key(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Key -> the words that set it."""
    found: dict[str, list[str]] = {}
    for word in overrides:
        if word.startswith("--"):
            last = word[2:].partition("=")[0]
            found[last] = []
        found[last].append(word)
    return found


def _joined(words: Mapping[str, list[str]]) -> list[str]:
    return [word for its in words.values() for word in its]


def other_family(model: str, base: LoadedConfig, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The configuration of a run whose model is another, with as many parameters as the paper's nearest.

    Args:
        model: a YAML file with a section model, or the name of one of the package's frontier models.
        base: the configuration with the paper's model.
        overrides: `--model.key value` words.

    Raises:
        UserError: there is no such file, the model can't be made so small, or its steps know how deep the pass is.
    """
    path = find_file(model, "frontier model")
    own = {key: setting for key, setting in settings_of(read_file(path)).items() if key.startswith("model.")}
    family = own[FAMILY].value if FAMILY in own else base.config.model.family
    own |= read_overrides(["--" + FAMILY, family, *overrides])
    theirs = values_of(base.config)
    taken = {key: Setting(theirs[key], base.origins[key]) for key in theirs if not key.startswith("model.")}
    keys = key_types(find(family).config)
    for name in SHARED:
        key = f"model.{name}"
        if key in keys and key in theirs:
            taken[key] = Setting(theirs[key], base.origins[key])
    loaded = build({**taken, **own})
    _check_steps(model, loaded.config)
    puzzle_family(build_family(loaded.config.model))
    matched = match_parameters(build_family(loaded.config.model), parameters(base.config))
    return LoadedConfig(dataclasses.replace(loaded.config, model=matched.config), loaded.origins)


def _check_steps(model: str, config: Config) -> None:
    """Answers after t steps are read within one pass of many, which then has to be as a pass of t steps would be."""
    for name, values in TOLD.items():
        value = getattr(config.model, name, values[0])
        if value not in values:
            raise UserError(
                f"{model}: model.{name} is {value}, so that a step depends on how many follow it; answers are read "
                f"after each step of one long pass, where they would be others than in a short one. Set it to "
                f"{values[0]}, in the file or with --model.{name} {values[0]}"
            )


def parameters(config: Config) -> int:
    """Of the model of a configuration."""
    return _count(build_family(config.model))


def _count(family: Family) -> int:
    return int(analytic.total(analytic.parameters(family)))


def match_parameters(family: Family, target: int) -> Family:
    """The model with the value of its knob that brings it closest to a number of parameters.

    Raises:
        UserError: it has no knob, or the smallest is larger by more than a twentieth.
    """
    knobs = [knob for knob in family.knobs() if knob.moves == "params"] or list(family.knobs())
    if not knobs:
        raise UserError(f"models of the family {family.config.family} have no setting that could match the parameters")
    knob = knobs[0]

    def count(value: int) -> int:
        return _count(changed(family, {knob.key: value}))

    least = count(knob.smallest)
    if least > 1.05 * target:
        raise UserError(
            f"the smallest model of the family {family.config.family}, with model.{knob.key} {knob.smallest}, has "
            f"{least:,} parameters and should have {target:,}; use a smaller --model.hidden_size or smaller heads"
        )
    values = range(knob.smallest, LARGEST)
    above = min(bisect.bisect_left(values, target, key=count), len(values) - 1)
    nearest = min(values[max(above - 1, 0)], values[above], key=lambda value: abs(count(value) - target))
    return changed(family, {knob.key: nearest})
