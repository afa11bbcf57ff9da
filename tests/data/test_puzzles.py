"""Every label is checked another way, nothing on the surface gives it away, and no instance is on both sides."""

import ast
import functools
from collections import Counter, deque

import numpy as np
import pytest

from dreamer_jax.config.puzzle import PuzzleConfig
from dreamer_jax.config.sections import Config, DataConfig, EvaluationConfig, RunConfig, TrainingConfig
from dreamer_jax.data import open_data
from dreamer_jax.data.puzzles import PuzzleSource, boolean, family, graph
from dreamer_jax.errors import ConfigError

N = 10_000
NEAR = 0.03
"""How far from one half a heuristic that knows nothing may be: four standard deviations of 5,000 instances."""


@functools.cache
def cell(task: str, depth: int, count: int, **settings):
    """(batch of held-out instances of one depth, their labels, their texts)."""
    config = PuzzleConfig(**{"task": task, "easiest": depth, "difficulty": depth, **settings})
    length = {"graph": config.nodes, "boolean": 6 * depth + 3, "family": 7 * (config.facts + 1)}[task]
    source = PuzzleSource(config, length)
    batch = source.cell(depth, range(count), count)
    assert (batch["loss_mask"].sum(1) == 1).all()
    return batch, batch["targets"].sum(1), [source.tokenizer.decode(row) for row in batch["tokens"]]


def learnt(features: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy, on the second half, of the best linear rule on the first half."""
    half = len(labels) // 2
    features = np.concatenate([features.astype(float), np.ones((len(labels), 1))], axis=1)
    rule = np.linalg.lstsq(features[:half], 2.0 * labels[:half] - 1, rcond=None)[0]
    return float(np.mean((features[half:] @ rule > 0) == labels[half:]))


def edges_of(batch) -> np.ndarray:
    """[B, n, n]: row i, column j: an edge i -> j; a node sees its predecessors and itself."""
    visible = batch["visible"]
    assert visible[:, np.arange(16), np.arange(16)].all()
    return visible.transpose(0, 2, 1) & ~np.eye(16, dtype=bool)


@pytest.mark.slow_but("leaky")
@pytest.mark.parametrize("negatives", ["swap", "leaky"])
def test_graphs_against_a_search(negatives: str) -> None:
    for depth in range(1, 14):
        batch, labels, _ = cell("graph", depth, N // 13 + 2, negatives=negatives)
        rows, edges = np.arange(len(labels)), edges_of(batch)
        source, target = batch["read"].T
        assert (batch["tokens"][rows, source] == 1).all() and (batch["tokens"][rows, target] == 2).all()
        assert (batch["tokens"] > 0).sum() == 2 * len(rows)
        reached = np.eye(16, dtype=bool)[source]
        distance = np.full(len(rows), -1)
        for hops in range(1, 16):
            reached = reached | np.any(reached[:, :, None] & edges, axis=1)
            distance[(distance < 0) & reached[rows, target]] = hops
        assert (distance == np.where(labels, depth, -1)).all()


def statistics(batch) -> np.ndarray:
    """What one look at a graph tells: degrees of both ends and of all nodes."""
    rows, edges = np.arange(len(batch["tokens"])), edges_of(batch)
    inward, outward = edges.sum(1), edges.sum(2)
    ends = [degree[rows, end] for degree in (inward, outward) for end in batch["read"].T]
    return np.stack([*ends, edges.sum((1, 2)), inward.max(1), outward.max(1), (inward**2).sum(1)], axis=1)


@pytest.mark.slow_but("5")
@pytest.mark.parametrize("depth", [1, 5, 12])
def test_no_look_at_degrees_tells_a_graph(depth: int) -> None:
    batch, labels, _ = cell("graph", depth, N)
    features = statistics(batch)
    assert abs(learnt(features, labels) - 0.5) < NEAR
    means = features[labels == 1].mean(0) - features[labels == 0].mean(0)
    assert (np.abs(means) < 5 * features.std(0) / np.sqrt(N / 4) + 1e-9).all()


def test_leaky_negatives_lack_an_edge_of_the_path() -> None:
    """Any edge of it, each as often, and nothing else. What the numbers of edges tell of it is little far away."""
    hops, rows = 5, np.arange(3000)
    uniform = np.random.default_rng(0).random((3000, graph.numbers_needed(16)))
    drawn = [graph.draw(uniform, np.full(3000, hops), np.full(3000, label), 16, True) for label in (0, 1)]
    without, whole = (graphs.edges for graphs in drawn)
    assert not (without & ~whole).any() and (whole.sum((1, 2)) - without.sum((1, 2)) == 1).all()
    place, reached = np.zeros(3000, int), np.eye(16, dtype=bool)[drawn[1].ends[:, 0]]
    start = np.argmax((whole & ~without).any(2), axis=1)
    for _ in range(hops):  # until the edge's start is reached
        place += ~reached[rows, start]
        reached = reached | np.any(reached[:, :, None] & whole, axis=1)
    assert np.abs(np.bincount(place, minlength=hops) / 3000 - 1 / hops).max() < NEAR and place.max() == hops - 1
    for depth, low, high in ((1, 0.75, 0.83), (12, 0.5 + NEAR, 0.62)):
        batch, labels, _ = cell("graph", depth, N // 2, negatives="leaky")
        assert low < learnt(statistics(batch), labels) < high


def value(text: str) -> bool:
    for sign, word in (("T", "True"), ("F", "False"), ("&", " and "), ("|", " or "), ("!", " not ")):
        text = text.replace(sign, word)
    return eval(compile(ast.parse(text.strip(), mode="eval"), "expression", "eval"))


def test_expressions_against_an_evaluator() -> None:
    for depth in range(1, 15):
        _, labels, texts = cell("boolean", depth, N // 14 + 2)
        for text, label in zip(texts, labels, strict=True):
            start, *characters = text.split()
            nesting = np.cumsum([(c == "(") - (c == ")") for c in characters])
            assert start == "[CLS]" and nesting.max() == depth and nesting[-1] == 0
            assert value("".join(characters)) == label


def outermost(text: str) -> bool:
    """The value as if what is inside were true: by the outermost operator, its leaf and the signs before both."""
    _, *words = text.split()
    flipped = words[0] == "!"
    words = words[flipped:][1:-1]
    if words[0] in "TF" or words[:2] in (["!", "T"], ["!", "F"]):
        leaf, rest = (words[0], words[1:]) if words[0] in "TF" else ("FT"[words[1] == "F"], words[2:])
        operator, inside_flipped = rest[0], rest[1] == "!"
    else:
        leaf, rest = words[-1], words[:-1]
        if rest[-1] == "!":
            leaf, rest = "FT"[leaf == "F"], rest[:-1]
        operator, inside_flipped = rest[-1], rest[0] == "!"
    inside = not inside_flipped
    return ((inside and leaf == "T") if operator == "&" else (inside or leaf == "T")) != flipped


@pytest.mark.slow_but("8")
@pytest.mark.parametrize("depth", [3, 8, 14])
def test_what_a_glance_tells_of_an_expression(depth: int) -> None:
    _, labels, texts = cell("boolean", depth, N // 2)
    share = np.mean([outermost(text) == label for text, label in zip(texts, labels, strict=True)])
    assert abs(share - (0.5 + boolean.DECIDING / 2)) < NEAR and share <= 0.60
    counts = np.array([[text.count(sign) for sign in "!&|TF"] for text in texts])
    assert abs(learnt(counts, labels) - 0.5) < 1.5 * NEAR  # of 2,500
    parity = np.mean(counts[:, [0, 1, 3]].sum(1) % 2 == labels)
    assert abs(parity - (0.5 + (1 - boolean.DECIDING) ** depth / 2)) < NEAR


def parse(text: str) -> tuple[list[tuple[str, str, str]], tuple[str, str, str]]:
    """(facts, question), each (first, relation, second)."""
    words = text.split()
    sentences = [words[i : i + 7] for i in range(0, len(words), 7)]
    for first, *middle, second, end in sentences:
        assert middle[0:2] == ["is", "the"] and middle[3] == "of" and first != second
        assert end == ("?" if [first, *middle, second, end] == sentences[-1] else ".")
    triples = [(sentence[0], sentence[3], sentence[5]) for sentence in sentences]
    return triples[:-1], triples[-1]


def generations(facts, start: str) -> dict[str, tuple[int, int]]:
    """Of everybody whom the facts join with a person: (generations up, links away)."""
    above = {"parent": -1, "child": 1, "sibling": 0}
    found, queue = {start: (0, 0)}, deque([start])
    while queue:
        person = queue.popleft()
        up, links = found[person]
        for first, relation, second in facts:
            for a, b, step in ((first, second, above[relation]), (second, first, -above[relation])):
                if a == person:
                    if b not in found:
                        found[b] = (up + step, links + 1)
                        queue.append(b)
                    assert found[b][0] == up + step, "the facts contradict each other"
    return found


SHORT = {"names": 8, "facts": 4, "voices": "parent"}
MEANING = {
    "great-grandchild": 3,
    "grandchild": 2,
    "child": 1,
    "sibling": 0,
    "parent": -1,
    "grandparent": -2,
    "great-grandparent": -3,
}


def test_families_against_their_trees() -> None:
    siblings = 0
    for depth in range(2, 10):
        batch, labels, texts = cell("family", depth, N // 8)
        for text, label, read, row in zip(texts, labels, batch["read"], batch["tokens"], strict=True):
            facts, (first, relation, second) = parse(text)
            assert [family.TOKENS[row[place]] for place in read] == [first, second] and min(read) >= 84
            assert len(facts) == 12
            up, links = generations(facts, first)[second]
            assert links == depth
            assert (up == MEANING[relation]) == label and (up - MEANING[relation]) % 2 == 0
            siblings += any(fact[1] == "sibling" for fact in facts)
    assert 0.06 < siblings / N < 0.11  # a tenth, from depth 3


def test_families_told_from_the_parent() -> None:
    """With few names, and from a single link on: labels against the trees, and no fact said from the child."""
    for depth in range(1, 5):
        _, labels, texts = cell("family", depth, N // 20, **SHORT)
        for text, label in zip(texts, labels, strict=True):
            facts, (first, relation, second) = parse(text)
            assert {fact[1] for fact in facts} <= {"parent", "sibling"} and len(facts) == 4
            assert {name for fact in facts for name in (fact[0], fact[2])} <= set(family.NAMES[:8])
            up, links = generations(facts, first)[second]
            assert links == depth and (up == MEANING[relation]) == label


def test_relations_are_what_they_are_called() -> None:
    assert {up: name for name, up in MEANING.items()} == family.RELATIONS
    # Ann is the child of Bob, who is the parent of Cara: one up, one down.
    facts = [("Ann", "child", "Bob"), ("Bob", "parent", "Cara"), ("Dan", "parent", "Bob")]
    assert generations(facts, "Ann") == {"Ann": (0, 0), "Bob": (1, 1), "Cara": (0, 2), "Dan": (2, 2)}


@pytest.mark.slow_but("2-style2")
@pytest.mark.parametrize(("depth", "style"), [(2, {}), (5, {}), (2, SHORT), (4, SHORT)])
def test_no_count_of_words_tells_a_family(depth: int, style: dict) -> None:
    _, labels, texts = cell("family", depth, N // 2, **style)
    relations = list(MEANING)
    features, asked = np.zeros((len(texts), 7 * 6)), Counter()
    for row, text, label in zip(features, texts, labels, strict=True):
        facts, (first, relation, second) = parse(text)
        counts = Counter(fact[1] for fact in facts)
        people = Counter(name for fact in facts for name in (fact[0], fact[2]))
        at = 6 * relations.index(relation)
        row[at : at + 6] = 1, counts["parent"], counts["child"], counts["sibling"], people[first], people[second]
        asked[relation, int(label)] += 1
    for relation in relations:
        true, false = asked[relation, 1], asked[relation, 0]
        assert abs(true - false) <= 5 * np.sqrt(true + false)
    assert abs(learnt(features, labels) - 0.5) < 1.5 * NEAR  # of 2,500


def test_contradictions() -> None:
    _, labels, texts = cell("family", 4, 400, contradiction_rate=1.0)
    inverse = {"parent": "child", "child": "parent"}
    for text in texts:
        facts, _ = parse(text)
        said = {(a, r, b) for a, r, b in facts} | {(b, inverse.get(r, r), a) for a, r, b in facts}
        assert sum((a, inverse.get(r), b) in said for a, r, b in facts) == 2 and len(facts) == 12
    assert labels.sum() == 200


@pytest.mark.parametrize("task", ["graph", "boolean", "family"])
def test_every_cell_is_balanced(task: str) -> None:
    for depth in (2, 3, 5):
        labels = cell(task, depth, 200)[1]
        assert labels.sum() == 100


SETTINGS = {
    "graph": (PuzzleConfig(), 16),
    "boolean": (PuzzleConfig(task="boolean", difficulty=2), 15),
    "family": (PuzzleConfig(task="family", easiest=2, difficulty=3, facts=4), 40),
}


def content(batch) -> list[bytes]:
    """Everything but the label, row by row."""
    return [b"".join(batch[name][i].tobytes() for name in ("tokens", "visible") if name in batch) for i in range(400)]


@pytest.mark.parametrize("task", SETTINGS)
def test_sides_share_nothing(task: str) -> None:
    source = PuzzleSource(*SETTINGS[task])
    training = {row for step in range(5) for row in content(source.training(0, step, range(400)))}
    rest = {*content(source.heldout(range(400), 400)), *content(source.cell(2, range(400), 400))}
    assert not training & rest
    assert len(training) > 500 and len(rest) > 100


@pytest.mark.parametrize("task", SETTINGS)
def test_sides_share_nothing_in_longer_rows(task: str) -> None:
    """The cells of a study have rows as long as its deepest task needs, training has rows of its own."""
    config, length = SETTINGS[task]
    short, long = PuzzleSource(config, length), PuzzleSource(config, length + 12)
    rows = range(400)
    for ours, theirs in (
        (short.cell(2, rows, 400), long.cell(2, rows, 400)),
        (short.training(0, 3, rows), long.training(0, 3, rows)),
    ):
        assert np.array_equal(ours["tokens"], theirs["tokens"][:, :length])


@pytest.mark.parametrize("task", SETTINGS)
def test_rows_are_functions_of_seed_step_and_row(task: str) -> None:
    source = PuzzleSource(*SETTINGS[task])
    whole, part = source.training(1, 7, range(16)), source.training(1, 7, range(5, 9))
    assert {name: array[5:9].tolist() for name, array in whole.items()} == {n: a.tolist() for n, a in part.items()}
    for other in (source.training(2, 7, range(16)), source.training(1, 8, range(16)), source.heldout(range(16), 16)):
        assert np.any(other["tokens"] != whole["tokens"], axis=1).sum() > 8


def test_depths_are_drawn_evenly() -> None:
    source = PuzzleSource(PuzzleConfig(task="boolean", easiest=2, difficulty=4), 27)
    batch = source.training(0, 0, range(3000))
    # Brackets open as often as the depth says, which is the nesting.
    counts = Counter(np.sum(batch["tokens"] == boolean.TOKENS.index("("), axis=1).tolist())
    assert set(counts) == {2, 3, 4} and max(counts.values()) - min(counts.values()) < 150


def config_of(**changes) -> Config:
    return Config(
        data=DataConfig(source="puzzle", sequence_length=changes.pop("length", 18), heldout_records=10, **changes),
        training=TrainingConfig(batch_size=4),
        evaluation=EvaluationConfig(harder=8),
        run=RunConfig(seed=3),
    )


def test_data_of_a_run() -> None:
    data = open_data(config_of())
    assert data.summary == "puzzle graph, depth 1 to 5, 10 instances held out"
    batches = dict(data.training_batches(2, 5, range(4)))
    assert sorted(batches) == [2, 3, 4] and batches[3]["visible"].shape == (4, 18, 18)
    assert (batches[3]["tokens"] == data.batch_at(3)["tokens"]).all()
    for batches in (data.heldout_batches(), data.harder_batches()):
        *_, last = list(batches)
        assert last["answer_mask"].sum(1).tolist() == [1, 1, 0, 0]
        assert (last["segment_ids"].sum(1) == [16, 16, 0, 0]).all()
        assert last["visible"][:, np.arange(18), np.arange(18)].all()  # no row of a softmax is empty
        assert last["positions"][0].tolist() == list(range(18))
    assert data.heldout_records(3) == [] and data.epoch_at(5) == 0
    others = [config_of(puzzle=PuzzleConfig(negatives="leaky")), config_of(length=20)]
    assert len({data.fingerprint, *(open_data(other).fingerprint for other in others)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"puzzle": PuzzleConfig(difficulty=14)},
            "data.puzzle.difficulty: 14, but graph has depths 1 to 13; use at least 17 data.puzzle.nodes",
        ),
        ({"puzzle": PuzzleConfig(nodes=10)}, "evaluation.harder: 8, but graph has depths 1 to 7"),
        (
            {"puzzle": PuzzleConfig(task="family", easiest=4, facts=3)},
            "data.puzzle.easiest: 4, but family has depths 1 to 3; use at least 4 data.puzzle.facts",
        ),
        (
            {"puzzle": PuzzleConfig(task="family", difficulty=2, easiest=2, facts=2, contradiction_rate=0.5)},
            "data.puzzle.contradiction_rate: 0.5, but a chain of 2 leaves no room for a contradiction in 2 sentences",
        ),
        ({"length": 15}, "data.sequence_length: 15 is too short for graph of depth 1 (data.puzzle.easiest); use at "),
        (
            {"length": 40, "puzzle": PuzzleConfig(task="boolean")},
            "data.sequence_length: 40 is too short for boolean of depth 8 (evaluation.harder); use at least 51",
        ),
        (
            {"puzzle": PuzzleConfig(task="family", facts=50)},
            "data.puzzle.facts: 50, but 40 names are enough for 38 sentences",
        ),
        ({"puzzle": PuzzleConfig(task="family", names=41)}, "data.puzzle.names: 41, but there are 40"),
    ],
)
def test_settings_that_cannot_work(changes, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_data(config_of(**changes))
    assert str(error.value).startswith(message)
