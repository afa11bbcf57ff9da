"""`to_yaml` loads back to an equal configuration, and `difference` says what differs."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dreamer_jax.config import Config, LoadedConfig, difference, load_config, to_yaml
from dreamer_jax.config.keys import key_types, values_of
from dreamer_jax.config.loading import Setting, build
from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.errors import ConfigError

KEYS = key_types(DreamerConfig)


def value_strategy(annotation: Any) -> st.SearchStrategy:
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.sampled_from([1, 2, 4, 8, 64, 128, 4096]) | st.integers(0, 10**9)
    if annotation is float:
        return st.floats(0, 1, allow_nan=False) | st.floats(0, 1e12, allow_nan=False)
    if annotation == tuple[int, ...]:
        return st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3).map(tuple)
    return st.text()


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration: a random set of keys has random values, and those that clash are left at the default."""
    settings: dict[str, Setting] = {}
    config = Config()
    for key in draw(st.lists(st.sampled_from(list(KEYS)), unique=True)):
        setting = Setting(draw(value_strategy(KEYS[key])), "a test")
        try:
            config = build({**settings, key: setting}).config
            settings[key] = setting
        except ConfigError:
            pass
    return config


def reload(text: str) -> LoadedConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        return load_config(path)


def with_prompt(text: str) -> Config:
    return Config(data=dataclasses.replace(Config().data, prompt=text))


@given(configs())
@example(with_prompt("null"))
@example(with_prompt("~ # no comment\n\t\r\x85\u2028 'both\" \\ {x}: - "))
@example(with_prompt("1e-3"))
@example(with_prompt("long " * 100))
def test_round_trip(config: Config) -> None:
    assert reload(to_yaml(config)).config == config


def flat(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found = {}
    for name, value in sections.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@given(configs())
def test_any_yaml_reader_sees_the_same_values(config: Config) -> None:
    plain = yaml.safe_load(to_yaml(config))
    found = flat(plain)
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    assert found == values_of(config)


@given(st.text())
def test_no_origin_breaks_the_file(origin: str) -> None:
    assume(all(c.isprintable() or c.isspace() for c in origin))
    assert reload(to_yaml(Config(), {"model.depth": origin, "run.seed": "b"})).config == Config()


def test_origins_are_trailing_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  depth: 3\n")
    lines = to_yaml(load_config(path, ["--run.seed", "5"])).splitlines()
    assert f"  depth: 3  # {path}:2" in lines
    assert "  seed: 5  # command line" in lines
    assert "  hidden_size: 128  # default" in lines
    assert "  depth: 3" in to_yaml(load_config(path).config).splitlines()


def test_difference_names_every_changed_key() -> None:
    a = Config()
    b = dataclasses.replace(
        a,
        model=dataclasses.replace(a.model, depth=16),
        training=dataclasses.replace(a.training, learning_rate=1e-5),
        data=dataclasses.replace(a.data, prompt="Q: {question}"),
    )
    assert difference(a, a) == []
    assert difference(a, b) == [
        "model.depth: 8 -> 16",
        'data.prompt: "{question}\\n" -> "Q: {question}"',
        "training.learning_rate: 0.0004 -> 1.0e-05",
    ]
