"""What is said of a family from outside that doesn't keep the contract, each time a small mistake in a whole one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dreamer_jax.blocks.parameters import is_box
from dreamer_jax.cli.main import main
from dreamer_jax.config.models import VARIABLE
from dreamer_jax.errors import UserError
from dreamer_jax.families import Flags, Knob, build
from dreamer_jax.families.checking import check
from tests.families.cases import TINY_MODELS
from tests.families.toy import Toy, ToyConfig


@pytest.mark.parametrize("family", [*TINY_MODELS, "toy"])
def test_every_family_keeps_the_contract(family):
    check(Toy(ToyConfig()) if family == "toy" else build(TINY_MODELS[family]))


class Tuple(Toy):
    def step(self, *arguments, **tape):
        return tuple(super().step(*arguments, **tape))


class Longer(Toy):
    def step(self, *arguments, **tape):
        stepped = super().step(*arguments, **tape)
        return stepped._replace(state={**stepped.state, "more": stepped.state["x"]})


class Rounded(Toy):
    def step(self, *arguments, **tape):
        stepped = super().step(*arguments, **tape)
        return stepped._replace(state={**stepped.state, "x": stepped.state["x"].astype(jnp.bfloat16)})


class Forgetful(Toy):
    def step(self, *arguments, **tape):
        stepped = super().step(*arguments, **tape)
        return stepped._replace(memory=stepped.memory._replace(sequence={"core": stepped.memory.sequence["core"]}))


class Flat(Toy):
    def start(self, entered, context, scale: Any = 1.0):
        state = super().start(entered, context, scale)
        return {**state, "left": state["left"].reshape(-1)}


class Bare(Toy):
    def enter(self, params, batch, memory, context) -> Any:
        return super().enter(params, batch, memory, context)[0]


class Swapped(Toy):
    def head(self, params):
        return params["head"].T


class Wide(Toy):
    def readout(self, params, state, memory, context):
        hidden, memory = super().readout(params, state, memory, context)
        return jnp.concatenate([hidden, hidden], axis=-1), memory


class Unweighted(Toy):
    def weights(self, params) -> Any:
        return params["layer"]


class Stateless(Toy):
    def init(self, key) -> Any:
        return super().init(key)[0]


class PerToken(Toy):
    def loss(self, params, passed, batch):
        loss, sums = super().loss(params, passed, batch)
        return loss, {**sums, "each": batch["loss_mask"].astype(jnp.float32)}


class Halting(Toy):
    @property
    def flags(self):
        return Flags(recurrent=False, injects_inputs=True, weighs_depths=True, halts=True)


class HaltingAsOne(Halting):
    def finished(self, params, state, before, depth):
        return jnp.all(state["left"] < 0.1)


class Misspelt(Toy):
    def knobs(self):
        return (Knob("gate_sise", "params", "gate"),)


class Unmatched(Toy):
    def knobs(self):
        return (Knob("gate_size", "flops", "gate"),)


class Elsewhere(Toy):
    def knobs(self):
        return (Knob("gate_size", "params", "gates"),)


class Slotless(Toy):
    def slots(self, rows, capacity, depth):
        return None


class Typed(Toy):
    def knobs(self):
        return (Knob("dtype", "params", "gate"),)


class Method(Toy):
    def flags(self) -> Any:
        return Flags()


class Fractional(Toy):
    @property
    def depth(self) -> Any:
        return 3.0


class Single(Toy):
    def knobs(self) -> Any:
        return Knob("gate_size", "params", "gate")


class Uncounted(Toy):
    def blocks(self) -> Any:
        return None


class Half(Toy):
    def init(self, key):
        params, state = super().init(key)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), state


class Unnamed(Toy):
    def init(self, key):
        params, state = super().init(key)
        return jax.tree.map(lambda box: box.replace(axes=("embed",)), params, is_leaf=is_box), state


class Skipping(Toy):
    def loss(self, params, passed, batch):
        loss, sums = super().loss(params, passed, batch)
        return loss, {**sums, "skipped": loss}


FORM = "it must keep its form"
MISTAKES = {
    Tuple: "Tuple.step: returns a tuple, not a Stepped",
    Longer: rf"Longer.step: the state goes in as .* and comes out as .*'more'.*{FORM}",
    Rounded: rf"Rounded.step: the state \['x'\] goes in as \[2, 3, 32\] float32 and comes out as .* bfloat16; {FORM}",
    Forgetful: rf"Forgetful.step: the memory goes in as .*prelude.* and comes out as .*{FORM}",
    Flat: r"Flat.start: \['left'\] is \[6\] float32; it must begin with \[B, P\] = \[2, 3\]",
    Bare: r"Bare.enter: returns a \w+, not \(entered, memory\)",
    Swapped: r"Swapped.head: it is \[32, 259\] float32, not \[259, 32\]",
    Wide: r"Wide.readout: its first part is \[2, 3, 64\] float32, not \[2, 3, 32\]",
    Unweighted: "Unweighted.weights: returns a dict, not a Weights",
    Stateless: r"Stateless.init: returns a dict, not \(params, state\)",
    PerToken: r"PerToken.loss: each is \[2, 3\] float32, not \[\]",
    Halting: "Halting.flags: say halts=True, and `finished` isn't there to say when",
    HaltingAsOne: r"HaltingAsOne.finished: it is \[\] bool, not \[2, 1\]",
    Misspelt: "Misspelt.knobs: turns 'gate_sise', which isn't among the settings family, depth, .*gate_size",
    Unmatched: "Unmatched.knobs: 'gate_size' moves 'flops'; what can be matched: flops_per_token, params",
    Slotless: "Slotless.slots: returns None, where a pass has a ",
    Typed: "Typed.knobs: turns 'dtype', which is 'float32'; what is turned is a whole number",
    Skipping: "Skipping.loss: logs skipped, which the run logs itself; give it another name",
    Method: "Method.flags: returns a method, not a Flags; it lacks @property",
    Fractional: "Fractional.depth: returns a float, not a whole number",
    Single: "Single.knobs: returns a Knob, not a tuple or a list of them",
    Uncounted: "Uncounted.blocks: returns a NoneType, not a tuple or a list of them",
    Unnamed: r"Unnamed.init: the parameter \['.*'\] is \[.*, .*\] float32 with axes \('embed',\); each axis has a name",
    Half: r"Half.init: the parameter \['.*'\] is \[.*\] bfloat16; parameters are float32",
    Elsewhere: "Elsewhere.knobs: 'gate_size' is about 'gates', which isn't among its parts .*'gate'",
}


@pytest.mark.parametrize("family", MISTAKES, ids=lambda family: family.__name__)
def test_mistakes_are_named(family):
    with pytest.raises(UserError, match=f"^family toy: {MISTAKES[family]}"):
        check(family(ToyConfig()))


STEP = """\
    def step(self, *arguments, **tape):
        return super().step(*arguments, **tape).state
"""
LOG = """\
    def log(self, model_state, counts):
        return {"time/mine": 1.0, "tokens": 2.0, "mine": 3.0}
"""


@pytest.mark.slow_but("def step")
@pytest.mark.parametrize(
    ("method", "message", "begins"),
    [
        (STEP, "family toy: Broken.step: returns a dict, not a Stepped", False),
        (LOG, "family toy: Broken.log: logs time/mine, tokens, which the run logs itself", True),
    ],
)
def test_commands_say_so_as_soon_as_it_is_known(tmp_path, monkeypatch, capsys, method, message, begins):
    """Before they begin; what `log` returns, at the first step that is logged."""
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "broken.py").write_text(
        "from tests.families.toy import Toy, ToyConfig\n\n\n"
        f"class Broken(Toy):\n{method}\n\nCONFIG, CORE = ToyConfig, Broken\n"
    )
    (tmp_path / "toy.yaml").write_text("model: {family: toy}\ntraining: {batch_size: 8}\n")
    words = ["--family-module", str(tmp_path / "broken.py"), "--run.dir", str(tmp_path / "run")]
    assert main(["train", str(tmp_path / "toy.yaml"), *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err
    assert (tmp_path / "run").exists() == begins
