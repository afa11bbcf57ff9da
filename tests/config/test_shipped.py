"""Every configuration of the package loads by its name, and the paper's models are those of its Table 3."""

from pathlib import Path

import pytest

from dreamer_jax.config import load_config
from dreamer_jax.configs import find, names
from dreamer_jax.data.mixture import load_mixture
from tests.outside import paper_tables

PAPER = {  # variant, depth, E, F
    "la_16": ("LA", 16, 32, 512),
    "la_32": ("LA", 32, 32, 512),
    "dr_16": ("DR", 16, 517, 504),
    "dr_32": ("DR", 32, 1039, 504),
    "dr_da_16": ("DR+DA", 16, 537, 480),
    "dr_da_32": ("DR+DA", 32, 1097, 472),
}


@pytest.mark.parametrize("name", names(["configuration"]))
def test_a_configuration_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(name)
    assert f"{name.rpartition('/')[2]}.yaml" in {Path(its.rpartition(":")[0]).name for its in loaded.origins.values()}


@pytest.mark.parametrize("name", names(["frontier model"]))
def test_a_model_for_comparison_loads(name: str) -> None:
    load_config(find(name, "frontier model"))


@pytest.mark.parametrize("name", names(["mixture"]))
def test_a_mixture_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_mixture(name) == load_mixture(name.rpartition("/")[2])


@pytest.mark.parametrize("name", PAPER)
def test_table_3(name: str) -> None:
    config = load_config(name).config
    model, training = config.model, config.training
    assert (model.variant, model.depth, model.num_experts, model.expert_size) == PAPER[name]
    assert (model.hidden_size, model.vocab_size, model.experts_per_token, model.router_size) == (1024, 128256, 8, 128)
    assert (model.sa_heads, model.sa_kv_heads, model.sa_head_size, model.sa_rope_base) == (16, 8, 128, 10_000)
    assert (model.da_heads, model.da_kv_heads, model.da_head_size, model.depth_rope_base) == (1, 1, 128, 500)
    assert (model.expert_bias_rate, model.attention_bias_rate, model.dtype) == (1e-3, 1e-2, "bfloat16")
    assert training.batch_size * config.data.sequence_length == 2**20 and config.data.sequence_length == 4096
    assert (training.learning_rate, training.warmup_steps, training.weight_decay) == (4e-4, 500, 1e-3)
    assert (training.beta1, training.beta2, training.epsilon, training.clip_norm) == (0.9, 0.999, 1e-8, 0.5)


def test_the_numbers_above_are_the_papers() -> None:
    matched = paper_tables()["dreamer"]["table3_matched"]
    assert matched == {f"{v}/{depth}": {"E": e, "F": f} for v, depth, e, f in PAPER.values()}


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_small_ones_differ_only_in_variant_and_experts(size: str) -> None:
    from dreamer_jax.config import difference

    la, dr, dr_da = (load_config(f"{v}_{size}").config for v in ("la", "dr", "dr_da"))
    allowed = {"model.variant", "model.num_experts", "model.expert_size"}
    assert (la.model.variant, dr.model.variant, dr_da.model.variant) == ("LA", "DR", "DR+DA")
    for other in (dr, dr_da):
        assert {line.partition(":")[0] for line in difference(la, other)} <= allowed
