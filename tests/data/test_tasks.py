"""Every answer is checked another way, and nothing on the surface gives it away."""

import ast
import functools
import itertools
import operator
import re
from collections import Counter, defaultdict, deque
from random import Random

import numpy as np
import pytest

from dreamer_jax.data import TASKS, generate
from dreamer_jax.data.tasks import MODULUS, draw, is_heldout

DIFFICULTIES = {
    "boolean": (1, 2, 3, 4, 6),
    "arithmetic": (1, 2, 4, 8),
    "reachability": (1, 2, 4, 11),
    "induction": (1, 2, 6),
    "addition": (1, 2, 8),
    "problems": (1, 2, 8),
    "permutations": (1, 2, 8),
}
CASES = [(task, difficulty) for task, difficulties in DIFFICULTIES.items() for difficulty in difficulties]
GUESSING = {
    "boolean": 1 / 2,
    "arithmetic": 1 / 7,
    "reachability": 1 / 2,
    "induction": 1 / 8,
    "addition": 1 / 10,  # of the last digit
    "problems": 1 / 7,
    "permutations": 1 / 24,
}


def instances(task: str, difficulty: int, n: int = 400):
    rng = Random(f"{task} {difficulty}")
    return [generate(task, difficulty, rng) for _ in range(n)]


def boolean_tree(prompt: str) -> ast.expr:
    text = prompt.removesuffix("=")
    for sign, word in (("T", "True"), ("F", "False"), ("&", " and "), ("|", " or "), ("!", " not ")):
        text = text.replace(sign, word)
    return ast.parse(text.strip(), mode="eval").body


def boolean_value(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return not boolean_value(node.operand)
    assert isinstance(node, ast.BoolOp)
    return (all if isinstance(node.op, ast.And) else any)(boolean_value(operand) for operand in node.values)


def arithmetic_value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        return node.value
    assert isinstance(node, ast.BinOp)
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod}
    return operations[type(node.op)](arithmetic_value(node.left), arithmetic_value(node.right))


def nesting(prompt: str) -> int:
    depth = deepest = 0
    for character in prompt:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def distances(edges: list[str], start: str) -> dict[str, int]:
    found, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for edge in edges:
            if edge[0] == node and edge[1] not in found:
                found[edge[1]] = found[node] + 1
                queue.append(edge[1])
    return found


def parse_graph(prompt: str) -> tuple[list[str], str, str]:
    *edges, query = prompt.split(" ")
    match = re.fullmatch(r"(\w)>(\w)\?", query)
    assert match and all(re.fullmatch(r"\w\w", edge) for edge in edges)
    return edges, match[1], match[2]


@pytest.mark.parametrize("difficulty", DIFFICULTIES["boolean"])
def test_boolean_answers(difficulty: int) -> None:
    for prompt, completion in instances("boolean", difficulty):
        assert completion == "FT"[boolean_value(boolean_tree(prompt))]
        assert nesting(prompt) == difficulty


@pytest.mark.parametrize("difficulty", DIFFICULTIES["arithmetic"])
def test_arithmetic_answers(difficulty: int) -> None:
    for prompt, completion in instances("arithmetic", difficulty):
        tree = ast.parse(prompt.removesuffix("="), mode="eval")
        operations = [node.op for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
        assert len(operations) == difficulty + 1  # and the modulus
        assert completion == str(arithmetic_value(tree.body))


@pytest.mark.parametrize("difficulty", DIFFICULTIES["reachability"])
def test_reachability_answers(difficulty: int) -> None:
    for prompt, completion in instances("reachability", difficulty):
        edges, start, end = parse_graph(prompt)
        hops = distances(edges, start).get(end)
        assert hops == (difficulty if completion == "yes" else None)
        both_ways = edges + [edge[::-1] for edge in edges]
        assert end in distances(both_ways, start), "undirected search must not give the answer away"


def hop_back(text: str, hops: int) -> str:
    """Position by position, from the definition: no slicing or searching shared with the generator."""
    place = len(text) - 1
    for _ in range(hops):
        same = [j for j in range(place) if text[j] == text[place]]
        place = same[-1] + 1
    return text[place]


@pytest.mark.parametrize("difficulty", DIFFICULTIES["induction"])
def test_induction_answers(difficulty: int) -> None:
    for prompt, completion in instances("induction", difficulty):
        text, _, hops = prompt.removesuffix("=").partition(">")
        assert int(hops) == difficulty and hop_back(text, difficulty) == completion
        assert all(a != b for a, b in itertools.pairwise(text))


def test_fewer_hops_do_not_give_the_induction_away(difficulty: int = 6) -> None:
    """The answer is never that of one hop fewer, once in four times that of two fewer, and of others as by chance."""
    agree = Counter()
    for prompt, completion in instances("induction", difficulty, 3000):
        text = prompt.partition(">")[0]
        agree.update(hops for hops in range(difficulty) if hop_back(text, hops) == completion)
    assert agree[difficulty - 1] == 0 and 0.2 < agree[difficulty - 2] / 3000 < 0.3
    assert all(abs(agree[hops] / 3000 - 1 / 8) < 0.06 for hops in range(difficulty - 2))


@pytest.mark.parametrize("difficulty", DIFFICULTIES["addition"])
def test_addition_answers(difficulty: int) -> None:
    for prompt, completion in instances("addition", difficulty):
        numbers = prompt.removesuffix("=").split("+")
        assert len(numbers) == difficulty + 1 and all(len(number) == 2 for number in numbers)
        assert sum(map(int, numbers)) == int(completion)


def solve(prompt: str) -> tuple[int, int, int]:
    """(the answer of a problem, the most steps between it and a given count, people it doesn't depend on)."""
    *sentences, query = re.split(r"(?<=[.]) ", prompt.strip())
    modulus, asked = int(re.findall(r"\d+", sentences.pop())[0]), query.removesuffix("?")
    rules = {sentence.split(" ", 1)[0]: sentence.split(" has ")[1].removesuffix(".") for sentence in sentences}
    seen: set[str] = set()

    def value(name: str) -> tuple[int, int]:
        seen.add(name)
        words = rules[name].split(" ")
        if len(words) == 1:
            return int(words[0]), 0
        if words[0] == "as":
            (a, deep), (b, deeper) = value(words[3]), value(words[5])
            return (a + b) % modulus, 1 + max(deep, deeper)
        number, (other, deep) = int(words[0]), value(words[-1])
        return {"more": other + number, "fewer": other - number, "times": other * number}[words[1]] % modulus, 1 + deep

    answer, steps = value(asked)
    return answer, steps, len(rules) - len(seen)


@pytest.mark.parametrize("difficulty", DIFFICULTIES["problems"])
def test_problem_answers(difficulty: int) -> None:
    for prompt, completion in instances("problems", difficulty):
        assert solve(prompt) == (int(completion), difficulty, difficulty + 1)


def test_no_glance_solves_a_problem(difficulty: int = 3) -> None:
    """The first and the last number, and the sum of all, are right about as often as a guess."""
    right = Counter()
    for prompt, completion in instances("problems", difficulty, 3000):
        numbers = [int(number) for number in re.findall(r"\d+", prompt)[:-1]]
        guesses = {"first": numbers[0], "last": numbers[-1], "sum": sum(numbers) % 7}
        right.update(name for name, guess in guesses.items() if guess == int(completion))
    assert all(abs(count / 3000 - 1 / 7) < 0.04 for count in right.values()) and len(right) == 3


def matrix_of(letter: str) -> np.ndarray:
    """Column i has its one where i goes: letters are the permutations of 0 to 3, sorted."""
    places = list(itertools.permutations(range(4)))["cdefghijklmnopqrstuvwxyz".index(letter)]
    return np.eye(4)[:, places]


@pytest.mark.parametrize("difficulty", DIFFICULTIES["permutations"])
def test_permutation_answers(difficulty: int) -> None:
    """By matrices."""
    for prompt, completion in instances("permutations", difficulty, 100):
        factors = [matrix_of(letter) for letter in prompt.removesuffix("=")]
        assert len(factors) == difficulty + 1
        product = functools.reduce(np.matmul, factors)
        np.testing.assert_array_equal(product, matrix_of(completion))


def test_every_letter_of_a_product_matters() -> None:
    """Another letter at any place gives another answer, so that no letter hides the ones before."""
    for prompt, completion in instances("permutations", 3, 20):
        word = prompt.removesuffix("=")
        for place, letter in itertools.product(range(4), "cjqz"):
            changed = word[:place] + letter + word[place + 1 :]
            product = functools.reduce(np.matmul, map(matrix_of, changed))
            assert (product == matrix_of(completion)).all() == (changed == word)


@pytest.mark.parametrize(("task", "difficulty"), CASES)
@pytest.mark.parametrize("heldout", [False, True])
def test_answers_are_balanced_on_both_sides_of_the_split(task: str, difficulty: int, heldout: bool) -> None:
    n = 3000
    rng = Random(1)
    counts = Counter(
        draw(task, difficulty, rng, heldout).completion[-1 if task == "addition" else 0 :] for _ in range(n)
    )
    assert len(counts) == round(1 / GUESSING[task])
    for count in counts.values():
        assert abs(count / n - GUESSING[task]) < 4 * (GUESSING[task] / n) ** 0.5


@pytest.mark.parametrize("difficulty", DIFFICULTIES["boolean"])
def test_boolean_operator_does_not_give_the_answer_away(difficulty: int) -> None:
    by_operator = defaultdict(list)
    for prompt, completion in instances("boolean", difficulty, 4000):
        node = boolean_tree(prompt)
        negated = isinstance(node, ast.UnaryOp)
        inner = node.operand if isinstance(node, ast.UnaryOp) else node
        assert isinstance(inner, ast.BoolOp)
        by_operator[negated, type(inner.op)].append(completion == "T")
    assert len(by_operator) == 4
    for answers in by_operator.values():
        assert abs(sum(answers) / len(answers) - 0.5) < 0.08


def test_hard_boolean_expressions_are_not_decided_near_the_top() -> None:
    """The first or last letter, or the share of T, is right less than three times in four."""
    records = instances("boolean", 4, 4000)
    for guess in (
        lambda prompt: re.findall("[TF]", prompt)[0],
        lambda prompt: re.findall("[TF]", prompt)[-1],
        lambda prompt: "T" if prompt.count("T") > prompt.count("F") else "F",
        lambda prompt: "T" if prompt.count("|") > prompt.count("&") else "F",
        lambda prompt: "FT"[prompt.count("!") % 2],
    ):
        right = sum(guess(prompt) == completion for prompt, completion in records) / len(records)
        assert max(right, 1 - right) < 0.72


@pytest.mark.parametrize("difficulty", [1, 4])
def test_reachability_surface_is_the_same_for_both_answers(difficulty: int) -> None:
    """Edges, degrees and the degrees of the nodes asked about; and places in the text, on average."""
    shapes, first_places = defaultdict(set), defaultdict(list)
    for prompt, completion in instances("reachability", difficulty, 3000):
        edges, start, end = parse_graph(prompt)
        out, into = Counter(edge[0] for edge in edges), Counter(edge[1] for edge in edges)
        shapes[completion].add(
            (len(edges), tuple(sorted(out.values())), tuple(sorted(into.values())), out[start], into[end], out[end])
        )
        first_places[completion].append(prompt.index(end) < prompt.index(start))
    assert shapes["yes"] == shapes["no"]
    shares = [sum(places) / len(places) for places in first_places.values()]
    assert abs(shares[0] - shares[1]) < 0.08 or difficulty == 1  # one hop: the edge itself is the answer


@pytest.mark.parametrize("difficulty", [1, 4])
def test_no_operation_of_the_arithmetic_hides_the_ones_before(difficulty: int) -> None:
    for prompt, completion in instances("arithmetic", difficulty, 100):
        for other in range(MODULUS):
            start = prompt.index(prompt.lstrip("(")[0])
            changed = prompt[:start] + str(other) + prompt[start + 1 :]
            value = arithmetic_value(ast.parse(changed.removesuffix("="), mode="eval").body)
            assert (str(value) == completion) == (str(other) == prompt[start])


@pytest.mark.parametrize(("task", "difficulty"), CASES)
def test_longest_bounds_the_length(task: str, difficulty: int) -> None:
    lengths = [len(prompt) + len(completion) for prompt, completion in instances(task, difficulty, 3000)]
    assert TASKS[task].longest(difficulty) * 0.7 < max(lengths) <= TASKS[task].longest(difficulty)
    assert all(ord(c) < 128 for prompt, completion in instances(task, difficulty, 20) for c in prompt + completion)


def test_boolean_of_difficulty_four_is_short() -> None:
    lengths = [len(prompt) for prompt, _ in instances("boolean", 4)]
    assert sum(lengths) / len(lengths) < 40


@pytest.mark.parametrize(("task", "difficulty"), CASES)
def test_split_by_prompt(task: str, difficulty: int) -> None:
    rng = Random(2)
    train = {draw(task, difficulty, rng, heldout=False).prompt for _ in range(2000)}
    heldout = {draw(task, difficulty, rng, heldout=True).prompt for _ in range(500)}
    assert not train & heldout
    assert not any(map(is_heldout, train)) and all(map(is_heldout, heldout))


@pytest.mark.parametrize("task", ["boolean", "arithmetic", "permutations"])
def test_every_answer_of_difficulty_one_is_on_both_sides_of_the_split(task: str) -> None:
    """Drawing from a side without the answer would never end; the number of prompts pins the salt of the split."""
    sides = defaultdict(set)
    for stratum in range(TASKS[task].strata):
        rng = Random(3)
        for _ in range(3000):
            prompt = TASKS[task].write(1, stratum, rng).prompt
            sides[stratum, is_heldout(prompt)].add(prompt)
    assert len(sides) == 2 * TASKS[task].strata
    assert min(map(len, sides.values())) >= {"permutations": 1}.get(task, 2)
    assert sum(map(len, sides.values())) == {"boolean": 64, "arithmetic": 119, "permutations": 576}[task]


def test_instances_depend_on_the_generator_alone() -> None:
    """Exact instances: a change here changes what old runs were trained on, so tasks.VERSION has to rise with it."""
    assert {task: generate(task, 3, Random("pinned")) for task in TASKS} == PINNED


PINNED = {
    "boolean": ("!((!(F&F)|F)&T)=", "F"),
    "arithmetic": ("(((1*3)*2)+3)%7=", "2"),
    "reachability": ("fr ft gi dq qf is sw st g>w?", "yes"),
    "induction": ("dcbhbabgfbfbdcfhedahafbaefcbgfhfghgadcfc>3=", "f"),
    "addition": ("24+34+85+42=", "185"),
    "problems": (
        "Sam has 2 fewer than Ida. Finn has as many as Dan and Quin together. Wes has 4 more than Sam. "
        "Ruth has as many as Quin and Finn together. Quin has 4 times as many as Dan. Dan has 6. Gus has 2. "
        "Ida has 2 fewer than Gus. Count modulo 7. Wes?",
        "2",
    ),
    "permutations": ("givq=", "n"),
}
