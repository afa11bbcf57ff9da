"""`model.family`: which settings there are, where families come from, and what is said of mistakes."""

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dreamer_jax.config import Config, difference, load_config, models, to_yaml
from dreamer_jax.config.keys import key_types, nearest_key, values_of
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "config" / "toy_family.py"
SOURCE = TOY.read_text()


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch):
    """Sets the module of `--family-module`; none to begin with."""
    monkeypatch.setenv(models.VARIABLE, "")
    return lambda name: monkeypatch.setenv(models.VARIABLE, str(name))


@pytest.fixture
def toy(module) -> type:
    """The dataclass of the family `toy`, which is there by `--family-module`."""
    module(TOY)
    return models.find("toy").config


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package with a module, and an entry point of this name for it."""

    def install(module: str, source: str, name: str) -> None:
        site = tmp_path / f"site_{module}"
        folder = site / f"{module}-1.0.dist-info"
        folder.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[dreamer_jax.families]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(site)

    return install


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return str(raised.value).replace(f"{path.parent}/", "")


# Where families come from.


def test_a_file_without_a_family_is_of_the_first_one(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "model: {depth: 3}\n"))
    assert type(loaded.config.model) is DreamerConfig and loaded.config.model.family == "dreamer"
    assert loaded.origins["model.family"] == "default"
    assert to_yaml(loaded).startswith("model:\n  family: dreamer  # default\n")


def test_a_built_in_family_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "zoetrope" not in models.known()
    write(tmp_path, SOURCE.replace('"toy"', '"zoetrope"'), "zoetrope.py")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert "zoetrope" in models.known()
    found = models.find("zoetrope")
    assert (found.key, found.origin) == ("zoetrope", "built in")
    assert found.core == "dreamer_jax.families.zoetrope"
    assert load_config(write(tmp_path, "model: {family: zoetrope, laps: 7}\n")).config.model.laps == 7
    del sys.modules[found.config.__module__]


def test_every_built_in_family_is_complete() -> None:
    for family in models.at_hand():
        assert family.config.__dataclass_params__.frozen and models.key_of(family.config) == family.key
        assert next(iter(key_types(family.config))) == "model.family"
        assert importlib.util.find_spec(family.core) is not None


def test_a_family_from_a_file(tmp_path: Path, module) -> None:
    path = write(tmp_path, SOURCE, "my-toy.py")
    module(path)
    found = models.find("toy")
    assert models.known() == tuple(sorted({*models.known(), "dreamer", "toy"}))
    assert (found.core, found.origin) == ("dreamer_family_my_toy", f"--family-module {path}")
    assert importlib.import_module(found.core).CONFIG is found.config


def test_a_family_from_a_module(module) -> None:
    module("tests.config.toy_family")
    found = models.find("toy")
    assert found.core == "tests.config.toy_family"
    assert found.config is importlib.import_module("tests.config.toy_family").CONFIG


def test_two_files_of_one_name(tmp_path: Path, module) -> None:
    (tmp_path / "other").mkdir()
    for folder, laps in (("", 4), ("other", 9)):
        path = write(tmp_path / folder, SOURCE.replace("laps: int = 4", f"laps: int = {laps}"), "twin.py")
        module(path)
        assert models.find("toy").config().laps == laps


def test_a_family_that_fails_is_given_back(tmp_path: Path) -> None:
    """So that the next model of the process can be loaded, and the file once it is mended."""
    broken = write(tmp_path, "CONFIG = 3\n", "mended.py")
    before = models.known()
    for given in (str(broken), "no_such_module_at_all"):
        with pytest.raises(ConfigError, match="--family-module"):
            models.give_working(given)
        assert models.known() == before
    broken.write_text(SOURCE)
    models.give_working(str(broken))
    assert "toy" in models.known()


def test_a_file_whose_path_divides_the_list(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    path = write(tmp_path / "a:b", SOURCE, "toy.py")
    with pytest.raises(ConfigError, match="its path has a ':'; move or link it to one without"):
        models.give(str(path))


def test_several_files(tmp_path: Path) -> None:
    """They are known together; a file takes the place of another of its name, but not in one breath."""
    (tmp_path / "other").mkdir()
    first, second = write(tmp_path, SOURCE), write(tmp_path, SOURCE.replace('"toy"', '"top"'), "top.py")
    third = write(tmp_path / "other", SOURCE.replace('"toy"', '"ball"'), "top.py")
    first = first.rename(tmp_path / "toy.py")
    models.give(str(first), str(second))
    models.give(str(first))
    assert {"toy", "top"} <= set(models.known())
    assert pickle.loads(pickle.dumps(models.find("top").config())) == models.find("top").config()
    models.give(str(third))
    assert {"toy", "ball"} <= set(models.known()) and "top" not in models.known()
    with pytest.raises(ConfigError, match="have one name"):
        models.give(str(second), str(third))


def test_an_entry_point_is_imported_when_it_is_asked_for(tmp_path: Path, install) -> None:
    install("toys_installed", SOURCE, "toy")
    load_config(write(tmp_path, ""))
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, ""), ["--model.laps", "3"])
    assert "toy" in models.known() and "toys_installed" not in sys.modules
    assert load_config(write(tmp_path, ""), ["--model.family", "toy", "--model.laps", "3"]).config.model.laps == 3
    found = models.find("toy")
    assert found.core == "toys_installed"
    assert found.origin == "entry point 'toy = toys_installed' of package toys_installed"


def test_an_entry_point_has_the_name_of_its_family(install) -> None:
    install("toys_misnamed", SOURCE, "game")
    with pytest.raises(
        ConfigError, match=r"entry point 'game = toys_misnamed' .*: CONFIG is of family 'toy'; the entry"
    ):
        models.find("game")


def test_one_key_for_two_families(tmp_path: Path, module, install) -> None:
    path = write(tmp_path, SOURCE.replace('"toy"', '"dreamer"'), "clash.py")
    module(path)
    problem = (
        f"model.family: family 'dreamer' is there twice: built in and --family-module {path}; rename or remove one"
    )
    with pytest.raises(ConfigError) as raised:
        models.find("dreamer")
    assert str(raised.value) == problem
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, "\nmodel: {family: dreamer}\n"))
    assert str(raised.value) == f"{tmp_path}/a.yaml:2: {problem}"
    module(TOY)
    install("toys_twice", SOURCE, "toy")
    with pytest.raises(
        ConfigError, match=r"'toy' is there twice: --family-module .* and entry point 'toy = toys_twice'"
    ):
        models.find("toy")
    assert models.find("dreamer").config is DreamerConfig


BROKEN = {
    "no CONFIG": (SOURCE.replace("CONFIG = ToyConfig", ""), "has no CONFIG; a family's module defines CONFIG"),
    "no CORE": (SOURCE.replace("CORE = Toy", ""), "has no CORE; a family's module defines CONFIG"),
    "not frozen": (
        SOURCE.replace("frozen=True", "frozen=False"),
        "CONFIG must be a frozen dataclass with a field `fam",
    ),
    "no dataclass": (SOURCE.replace("CONFIG = ToyConfig", "CONFIG = Toy"), "CONFIG must be a frozen dataclass"),
    "an instance": (SOURCE.replace("CONFIG = ToyConfig", "CONFIG = ToyConfig()"), "CONFIG must be a frozen dataclass"),
    "no family": (SOURCE.replace("family: Lit", "sort: Lit"), "CONFIG must be a frozen dataclass with a field `family"),
    "no default": (
        SOURCE.replace('family: Literal["toy"] = "toy"', "family: str = None"),
        "CONFIG must be a frozen dataclass",
    ),
    "no size": (
        SOURCE.replace("    hidden_size: int", "    width: int"),
        "CONFIG has no hidden_size; every family has hidden_size, vocab_size, dtype, implementation",
    ),
    "an import": (
        SOURCE.replace("\nfrom dataclasses", "\nimport no_such_package\nfrom dataclasses"),
        "can't be imported: No module named 'no_such_package'",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_broken_modules(tmp_path: Path, module, mistake: str) -> None:
    source, expected = BROKEN[mistake]
    path = write(tmp_path, source, f"broken_{mistake.replace(' ', '_')}.py")
    module(path)
    message = message_of(write(tmp_path, ""))
    assert message.startswith(f"--family-module {path.name}: {expected}")
    assert not message.endswith(".py")  # which would advise to name a file


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("no_such.py", "no such file; name a .py file, or a module such as package.module"),
        ("folder/toy", "no such file; name a .py file"),
        (
            "no_such_package.toy",
            "can't be imported: No module named 'no_such_package'; name an installed module, or a fi",
        ),
        ("json.toy", "can't be imported: No module named 'json.toy'; name an installed module, or a file that ends in"),
    ],
)
def test_modules_that_are_not_there(tmp_path: Path, module, given: str, expected: str) -> None:
    module(given)
    assert message_of(write(tmp_path, "")).startswith(f"--family-module {given}: {expected}")


def test_a_defect_of_a_module_keeps_its_traceback(tmp_path: Path, module) -> None:
    module(write(tmp_path, "1 / 0\n", "defect.py"))
    with pytest.raises(ZeroDivisionError):
        models.known()


# Which settings there are.


def test_the_settings_are_those_of_the_family(tmp_path: Path, toy: type) -> None:
    loaded = load_config(write(tmp_path, "model:\n  laps: 3\n  family: toy\n"), ["--model.hidden_size", "16"])
    assert loaded.config.model == toy(laps=3, hidden_size=16)
    assert set(loaded.origins) == set(key_types(toy)) == set(values_of(loaded.config))
    assert "model.num_experts" not in loaded.origins
    assert loaded.origins["model.family"] == f"{tmp_path}/a.yaml:3"


def test_the_family_by_precedence(tmp_path: Path, toy: type) -> None:
    write(tmp_path, "model: {family: toy}\n", "toy.yaml")
    write(tmp_path, "model: {family: dreamer}\n", "dreamer.yaml")
    cases = [
        ("base: toy.yaml\n", [], toy, "toy.yaml:1"),
        ("base: dreamer.yaml\nmodel: {family: toy, laps: 2}\n", [], toy, "a.yaml:2"),
        ("base: toy.yaml\nmodel: {family: dreamer, depth: 2}\n", [], DreamerConfig, "a.yaml:2"),
        ("model: {family: toy}\n", ["--model.depth", "2", "--model.family=dreamer"], DreamerConfig, "command line"),
        ("base: dreamer.yaml\n", ["--model.family", "toy", "--model.laps", "2"], toy, "command line"),
        ("base: toy.yaml\nmodel: {laps: 2}\n", [], toy, "toy.yaml:1"),
    ]
    for text, words, expected, origin in cases:
        loaded = load_config(write(tmp_path, text), words)
        assert type(loaded.config.model) is expected
        assert loaded.origins["model.family"].replace(f"{tmp_path}/", "") == origin
        assert loaded.config.model.family == models.key_of(expected)


def test_a_family_that_is_not_known(tmp_path: Path, module) -> None:
    path = write(tmp_path, "\nmodel:\n  family: draemer\n  depth: 2\n")
    outside = (
        "one from outside of the package needs --family-module FILE_OR_MODULE, "
        "or in Python load(..., family_module=FILE_OR_MODULE))"
    )
    assert message_of(path).startswith(
        "a.yaml:3: model.family: unknown family 'draemer'; did you mean 'dreamer'? (known: "
    )
    assert message_of(path).endswith(outside)
    message = message_of(path, "--model.family", "toy")
    assert message.startswith("command line: model.family: unknown family 'toy' (known: ") and message.endswith(outside)
    module(TOY)
    known = ", ".join(models.known())
    assert "dreamer" in known and "toy" in known
    assert f"(known: {known}; " in message_of(path)
    assert load_config(path, ["--model.family=dreamer"]).config.model == DreamerConfig(depth=2)


def test_a_key_of_another_family(tmp_path: Path, toy: type) -> None:
    problem = "'{}' is a setting of {}, and model.family is {}; remove it, or change model.family"
    both = "families dreamer, dreamer_classifier"
    path = write(tmp_path, "model:\n  family: toy\n  da_heads: 4\n")
    assert message_of(path) == "a.yaml:3: " + problem.format("model.da_heads", both, "toy")
    write(tmp_path, "model:\n  da_heads: 4\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nmodel:\n  family: toy\n")
    assert message_of(path) == "base.yaml:2: " + problem.format("model.da_heads", both, "toy")
    path = write(tmp_path, "model: {laps: 4}\n")
    assert message_of(path) == "a.yaml:1: " + problem.format("model.laps", "family toy", "dreamer")
    path = write(tmp_path, "")
    said = message_of(path, "--model.laps", "4")
    assert said == "command line: " + problem.format("--model.laps", "family toy", "dreamer")


def test_mistakes_in_the_settings_of_a_family(tmp_path: Path, toy: type) -> None:
    head = "model:\n  family: toy\n"
    assert message_of(write(tmp_path, head + "  lap: 4\n")) == (
        "a.yaml:3: unknown key 'model.lap'; did you mean 'model.laps'?"
    )
    assert message_of(write(tmp_path, head + "  laps: x\n")) == "a.yaml:3: model.laps: expected an integer, got 'x'"
    assert message_of(write(tmp_path, head + "  laps: 0\n")).startswith("a.yaml:3: model.laps: 0 is too small")
    assert message_of(write(tmp_path, head + "laps: 4\n")) == (
        "a.yaml:3: unknown key 'laps'; did you mean 'model.laps'?"
    )
    assert message_of(write(tmp_path, "model.laps: 4\n" + head)).startswith("a.yaml:1: unknown key 'model.laps'; write")
    assert nearest_key("model.lap", DreamerConfig) != "model.laps" == nearest_key("model.lap", toy)


def test_what_a_file_replaces_is_checked_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, "model:\n  depth: x\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nmodel: {depth: 2}\n")
    assert message_of(path) == "base.yaml:2: model.depth: expected an integer, got 'x'"
    assert message_of(write(tmp_path, "model: {depth: y}\n"), "--model.depth", "2").startswith("a.yaml:1: model.depth")


# Written, compared, and what other sections ask.


def test_round_trip(tmp_path: Path, toy: type) -> None:
    config = dataclasses.replace(Config(), model=toy(laps=9, dtype="bfloat16"))
    text = to_yaml(config)
    assert text.startswith("model:\n  family: toy\n  laps: 9\n")
    assert load_config(write(tmp_path, text)).config == config


def test_a_section_within_the_model(tmp_path: Path, module) -> None:
    """Of a family's own: written, read back, and its mistakes found; another family's key of that name isn't meant."""
    nested = SOURCE.replace(
        "@dataclass(frozen=True)\n",
        "@dataclass(frozen=True)\nclass GateConfig:\n    size: int = 2\n\n\n" + ("@dataclass(frozen=True)\n"),
        1,
    ).replace('"toy"\n    """Which', '"toy"\n    gate: GateConfig = GateConfig()\n    """Which', 1)
    module(write(tmp_path, nested, "nested.py"))
    block = load_config(write(tmp_path, "model:\n  family: toy\n  gate:\n    size: 5\n"))
    assert block.config.model.gate.size == 5 and block.origins["model.gate.size"].endswith("a.yaml:4")  # type: ignore[attr-defined]
    flow = write(tmp_path, "model: {family: toy, gate: {size: 5}}\n")
    assert load_config(flow, ["--model.gate.size", "7"]).config.model.gate.size == 7  # type: ignore[attr-defined]
    assert load_config(write(tmp_path, to_yaml(block), "written.yaml")).config == block.config
    assert "a.yaml:1: unknown key 'model.gate.sise'; did you mean 'model.gate.size'?" in message_of(
        write(tmp_path, "model: {family: toy, gate: {sise: 5}}\n")
    )
    assert "model.gate: expected keys and values, got '5'" in message_of(
        write(tmp_path, "model: {family: toy, gate: 5}\n")
    )


@pytest.mark.parametrize("kind", ["int | None", "tuple[str, ...]", "dict[str, int]"])
def test_types_that_no_file_can_hold(tmp_path: Path, module, kind: str) -> None:
    """Refused before a run is made that couldn't be read again."""
    module(write(tmp_path, SOURCE.replace("laps: int = 4", f"laps: {kind} = None"), "kind.py"))
    message = message_of(write(tmp_path, "model: {family: toy}\n"))
    assert message.startswith(f"model.laps: family toy gives it the type {kind}") and "take str" in message


def test_the_family_comes_first_wherever_its_field_is() -> None:
    @dataclasses.dataclass(frozen=True)
    class Late:
        laps: int = 1
        family: str = "late"

    assert list(key_types(Late))[:3] == ["model.family", "model.laps", "data.source"]


def test_a_configuration_made_in_python_needs_no_register(toy: type, module) -> None:
    module("")
    config = Config(model=toy(laps=2))
    assert values_of(config)["model.laps"] == 2 and "  laps: 2\n" in to_yaml(config)


def test_difference_of_two_families(toy: type) -> None:
    small = DreamerConfig(hidden_size=8, dtype="float32", num_experts=4)
    a = Config(model=small)
    b = dataclasses.replace(a, model=toy(), run=dataclasses.replace(a.run, seed=3))
    lines = difference(a, b)
    assert lines[0] == "model.family: dreamer -> toy"
    assert "model.num_experts: 4 -> (not in toy)" in lines and "model.laps: (not in dreamer) -> 4" in lines
    assert not [line for line in lines if line.startswith(("model.hidden_size", "model.dtype"))]
    assert lines[-1] == "run.seed: 0 -> 3"
    assert difference(b, a)[0] == "model.family: toy -> dreamer"


def test_devices_that_divide_experts(tmp_path: Path, toy: type, module) -> None:
    text = "model: {family: toy}\nmesh: {expert: 2}\n"
    assert message_of(write(tmp_path, text)) == (
        "a.yaml:2: mesh.expert: 2 devices have nothing to divide: models of family toy have no experts that could be; "
        "leave it at 1"
    )
    load_config(write(tmp_path, "model: {family: toy}\nmesh: {expert: 1}\n"))
    method = "    @property\n    def experts(self) -> int:\n        return self.laps\n\n    def __post_init__"
    module(write(tmp_path, SOURCE.replace("    def __post_init__", method), "toy_of_experts.py"))
    load_config(write(tmp_path, text))
    assert message_of(write(tmp_path, text), "--mesh.expert", "8") == (
        "command line: mesh.expert: 8 devices can't divide the 4 experts of family toy"
    )


# Other processes.


def child(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_child_processes_find_it_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {family: toy, laps: 5}\n")
    program = f"from dreamer_jax.config import load_config; print(load_config({str(path)!r}).config.model.laps)"
    assert child(program, DREAMER_FAMILY_MODULE=str(TOY)) == "5\n"
    assert child(program, DREAMER_FAMILY_MODULE="tests.config.toy_family") == "5\n"
    with pytest.raises(AssertionError, match="unknown family 'toy'"):
        child(program)


def test_a_spawned_process_can_unpickle_a_configuration(toy: type) -> None:
    pickled = pickle.dumps(Config(model=toy(laps=6)))
    assert child(f"import pickle; print(pickle.loads({pickled!r}).model.laps)", DREAMER_FAMILY_MODULE=str(TOY)) == "6\n"
