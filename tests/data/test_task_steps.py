"""The steps of tasks' problems, each result worked out another way; and where they stand in batches."""

import ast
import functools
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.recurrence import STEPPED_TASKS
from dreamer_jax.config.sections import Config
from dreamer_jax.data import generate, open_data
from dreamer_jax.data.task_steps import STEPS, Step, steps_of
from dreamer_jax.errors import ConfigError
from tests.data.test_tasks import arithmetic_value, boolean_tree, boolean_value, hop_back, matrix_of, nesting


def problems_of(task: str, difficulty: int):
    rng = Random(f"{task} {difficulty}")
    for _ in range(100):
        record = generate(task, difficulty, rng)
        yield record, steps_of(task, record.prompt)


@pytest.mark.parametrize("difficulty", [1, 2, 5])
@pytest.mark.parametrize("task", STEPPED_TASKS)
def test_the_last_step_is_the_answer(task, difficulty):
    for (prompt, completion), steps in problems_of(task, difficulty):
        assert steps[-1] == Step(len(prompt) - 1, difficulty, completion)
        assert {step.number for step in steps} == set(range(1, difficulty + 1))


def test_the_examples_of_the_documentation():
    """Those of docs/data.md whose steps can be worked out."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)` \|", page, re.MULTILINE)
    examples = {task: (prompt.replace("\\|", "|"), answer) for task, prompt, answer in rows if task in STEPPED_TASKS}
    assert set(examples) == set(STEPPED_TASKS)
    for task, (prompt, answer) in examples.items():
        assert steps_of(task, prompt)[-1].result == answer, prompt


def expression_ending(prompt: str, place: int) -> str:
    """The brackets that close at a place, with the ! before them."""
    start, level = place, 1
    while level:
        start -= 1
        level += (prompt[start] == ")") - (prompt[start] == "(")
    while start and prompt[start - 1] == "!":
        start -= 1
    return prompt[start : place + 1]


def test_boolean_steps():
    """Every pair of brackets is worked out where it closes, in the step of its nesting."""
    for (prompt, _), steps in problems_of("boolean", 4):
        assert [step.place for step in steps[:-1]] == [i for i, c in enumerate(prompt) if c == ")"]
        for place, number, result in steps[:-1]:
            text = expression_ending(prompt, place)
            assert result == "FT"[boolean_value(boolean_tree(text))] and number == nesting(text)


def test_arithmetic_steps():
    for (prompt, _), steps in problems_of("arithmetic", 4):
        for place, number, result in steps[:-1]:
            text = prompt[: place + 1].lstrip("(")
            text = "(" * number + text
            assert result == str(arithmetic_value(ast.parse(text, mode="eval").body) % 7)


def test_induction_steps():
    for (prompt, _), steps in problems_of("induction", 4):
        text = prompt.partition(">")[0]
        assert [step.result for step in steps] == [hop_back(text, n) for n in (1, 2, 3, 4)]


def test_problems_steps():
    """By a hand-written text, and each sentence of the drawn ones is true of what the steps say."""
    text = (
        "Ida has 3 fewer than Leo. Leo has 2 times as many as Ann. Ann has 4. Mia has as many as Ida and Leo together. "
    )
    text += "Bo has 1. Cy has 5 more than Bo. Count modulo 7. Mia?"
    assert [step.result for step in steps_of("problems", text)] == ["1", "5", "6"]


def test_permutations_steps():
    """Each result is asked for at the letter that completes it, and is the product of all letters so far."""
    for (prompt, _), steps in problems_of("permutations", 4):
        for place, number, result in steps[:-1]:
            assert place == number
            product = functools.reduce(np.matmul, map(matrix_of, prompt[: place + 1]))
            np.testing.assert_array_equal(product, matrix_of(result))


def config_of(**settings) -> Config:
    settings = {
        "data.source": "task",
        "data.task": "arithmetic",
        "data.difficulty": 3,
        "data.loss": "answer",
        "data.sequence_length": 48,
        "data.heldout_records": 4,
        "training.batch_size": 2,
        "model.vocab_size": 259,
        "recurrence.draw": "uniform",
        "recurrence.steps": 1.0,
        **settings,
    }
    return build({key: Setting(value, "here") for key, value in settings.items()}).config


def test_batches_ask_for_steps_where_the_model_has_seen_enough():
    """Token by token: at the bracket of operation n from step n on, at = the answer from the last on."""
    data = open_data(config_of())
    batch = data.batch_at(3)
    targets = batch["step_targets"]
    assert targets.shape == (2, 48, 3) and targets.dtype == np.int32
    np.testing.assert_array_equal(targets, data.batch_at(3)["step_targets"])
    for row in range(2):
        for segment in np.unique(batch["segment_ids"][row])[1:]:
            places = np.flatnonzero(batch["segment_ids"][row] == segment)
            text = data.tokenizer.decode(batch["tokens"][row, places].tolist())
            asked = targets[row, places][-len(text) :]  # bos is no text
            prompt = text[: text.index("=") + 1]
            expected = np.full_like(asked, -1)
            for place, number, result in steps_of("arithmetic", prompt):
                expected[place, number - 1 :] = data.tokenizer.encode(result)[0]
            np.testing.assert_array_equal(asked, expected)
    assert "step_targets" not in next(iter(data.heldout_batches()))
    plain = open_data(config_of(**{"recurrence.steps": 0.0}))
    assert "step_targets" not in plain.batch_at(3) and plain.fingerprint != data.fingerprint
    np.testing.assert_array_equal(plain.batch_at(3)["tokens"], batch["tokens"])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data.task": "addition"}, "and data.task is addition"),
        ({"data.source": "jsonl", "data.path": "x.jsonl"}, "and data.source is jsonl"),
        ({"data.tokenizer": "t.json"}, "and data.tokenizer is t.json"),
        ({"recurrence.draw": "model"}, "recurrence.steps"),
    ],
)
def test_steps_that_nobody_knows_are_refused(settings, line):
    with pytest.raises(ConfigError, match=line):
        config_of(**settings)


def test_the_configuration_knows_which_tasks_have_steps():
    assert set(STEPPED_TASKS) == set(STEPS)
