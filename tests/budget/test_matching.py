"""Section 3.8: the descent ends at Table 3 from anywhere, and says so where it can't end anywhere."""

import dataclasses
import shutil
import time
from pathlib import Path

import pytest

from dreamer_jax.budget import matching, members
from dreamer_jax.cli.main import main
from dreamer_jax.config import load_config
from dreamer_jax.configs import FOLDER
from dreamer_jax.errors import UserError
from dreamer_jax.families import Family, build

MODELS = FOLDER / "models"
TABLE_3 = {"dr_16": (517, 504), "dr_32": (1039, 504), "dr_da_16": (537, 480), "dr_da_32": (1097, 472)}


def shipped(name: str, **changes) -> Family:
    return build(dataclasses.replace(load_config(MODELS / f"{name}.yaml").config.model, **changes))


def ends_at(found: matching.Match) -> tuple[int, int]:
    return found.family.config.num_experts, found.family.config.expert_size


@pytest.mark.parametrize("name", TABLE_3)
@pytest.mark.parametrize("start", [(8, 8), (77, 13), (40000, 9999)])
def test_table_3_whatever_the_file_says(name: str, start: tuple[int, int]) -> None:
    model = shipped(name, num_experts=start[0], expert_size=start[1])
    baseline = shipped("la_" + name[-2:])
    began = time.process_time()
    found = matching.match(model, matching.target_of(baseline, model, context=1024), 1024)
    assert time.process_time() - began < 2
    assert ends_at(found) == TABLE_3[name]
    assert abs(found.gaps_percent["params"]) < 0.05
    assert abs(found.gaps_percent["flops_per_token"]) < 0.3
    assert abs(found.gaps_percent["memory_bytes"]) < 0.1


def test_the_descent_itself_does_not_depend_on_its_start() -> None:
    target = matching.target_of(shipped("la_16"), shipped("dr_da_16"), context=1024)
    for experts, size in ((8, 8), (100, 5000), (10_000, 64)):
        start = dataclasses.replace(target, starts={"num_experts": experts, "expert_size": size})
        assert ends_at(matching.match(shipped("dr_da_16"), start, 1024)) == TABLE_3["dr_da_16"]


def test_nothing_near_the_result_is_closer() -> None:
    target = matching.target_of(shipped("la_tiny"), shipped("dr_da_tiny"), context=1024)
    found = matching.match(shipped("dr_da_tiny"), target, 1024)

    def gap(quantity: str, **changes: int) -> float:
        cost = matching.cost(matching.changed(found.family, changes), 1024)
        return abs(matching.gaps(cost, target)[quantity])

    experts, size = ends_at(found)
    for other in (size - 8, size + 8):
        assert gap("flops_per_token", expert_size=other) > gap("flops_per_token")
    for other in (experts - 1, experts + 1):
        assert gap("params", num_experts=other) > gap("params")


@pytest.mark.parametrize("name", ["dr_tiny", "dr_da_tiny", "dr_small", "dr_da_small", *TABLE_3])
def test_the_shipped_models_are_matched(name: str) -> None:
    baseline = shipped("la_" + name.rpartition("_")[2])
    found = matching.match(shipped(name), matching.target_of(baseline, shipped(name), context=1024), 1024)
    assert found.family == shipped(name)


def test_a_layered_model_can_be_matched_to_a_recurrent_one() -> None:
    target = matching.target_of(shipped("dr_16"), shipped("la_16"), context=1024)
    found = matching.match(shipped("la_16"), target, 1024)
    assert ends_at(found) == (32, 512)


@pytest.mark.parametrize("baseline", ["huginn/tiny", "moeut/tiny", "universal/tiny"])
def test_a_model_of_experts_can_be_matched_to_one_of_another_family(baseline: str) -> None:
    """Whatever the file says of its experts."""
    sizes = {"hidden_size": 32, "sa_heads": 2, "sa_kv_heads": 1, "sa_head_size": 8, "router_size": 8}
    goal, found = build(load_config(baseline).config.model), set()
    for experts in (4, 77):
        model = shipped("dr_tiny", **sizes, num_experts=experts, expert_size=experts, vocab_size=goal.config.vocab_size)
        its = matching.match(model, matching.target_of(goal, model, context=64), 64)
        assert abs(its.gaps_percent["flops_per_token"]) < 1 and abs(its.gaps_percent["params"]) < 3
        found.add(ends_at(its))
    assert len(found) == 1


def test_hold_moves_one_quantity_only() -> None:
    start = shipped("dr_16", num_experts=100, expert_size=104)
    target = matching.target_of(shipped("la_16"), start, context=1024)
    flops = matching.match(start, target, 1024, hold="flops")
    assert flops.family.config.num_experts == 100
    assert abs(flops.gaps_percent["flops_per_token"]) < 0.3
    params = matching.match(start, target, 1024, hold="params")
    assert params.family.config.expert_size == 104
    assert abs(params.gaps_percent["params"]) < 0.05


def test_what_no_setting_moves_is_named_and_what_there_is() -> None:
    """A dense model has one knob, for FLOPs; the page of families from outside teaches the same."""
    model = shipped("huginn/tiny")
    with pytest.raises(UserError, match="searched for its parameters; it has mlp_size for its FLOPs/token"):
        matching.match(model, matching.target_of(model, model, context=64), 64, hold="params")
    page = Path(__file__).parents[2] / "docs" / "add_family.md"
    assert 'Knob("mlp_size", "flops_per_token", "mlp")' in page.read_text(encoding="utf-8")


def test_a_finer_granularity_comes_closer() -> None:
    target = matching.target_of(shipped("la_16"), shipped("dr_da_16"), context=1024)
    gaps = {}
    for granularity in (1, 8, 64):
        found = matching.match(shipped("dr_da_16"), target, 1024, granularity)
        assert found.family.config.expert_size % granularity == 0
        gaps[granularity] = abs(found.gaps_percent["flops_per_token"])
    assert gaps[1] < gaps[8] < gaps[64]


def test_the_context_is_that_of_both() -> None:
    gaps = []
    for context in (1024, 65536):
        target = matching.target_of(shipped("la_16"), shipped("dr_16"), context=context)
        found = matching.match(shipped("dr_16"), target, context)
        assert ends_at(found) == TABLE_3["dr_16"]  # DR has no overhead that grows with the context
        gaps.append(found.gaps_percent["flops_per_token"] * (target.flops_per_token or 0))
    assert gaps[0] == pytest.approx(gaps[1])


def test_a_target_out_of_reach_names_the_part_and_the_excess() -> None:
    model, starts = shipped("dr_16"), {"num_experts": 8, "expert_size": 8}
    with pytest.raises(UserError, match=r"the parameters .* 369\.8\d+ M, 269\.8\d+ M more .* largest is embedding"):
        matching.match(model, matching.Target(100_000_000, 1e9, starts), 1024)
    with pytest.raises(UserError, match=r"the FLOPs per token .* largest is SA with 268\.\d+ M.*sa_heads"):
        matching.match(model, matching.Target(1_000_000_000, 2e8, starts), 1024)


def test_a_family_is_written_as_configurations_that_load_back(tmp_path: Path) -> None:
    base, own = MODELS / "la_16.yaml", tmp_path / "own" / "la_16.yaml"
    own.parent.mkdir()
    for name in ("la_16", "paper"):
        shutil.copy(MODELS / f"{name}.yaml", own.parent)
    baseline = shipped("la_16").config
    found = members.build(baseline, baseline, [8, 32], ["LA", "DR", "DR+DA"], 1024, 8)
    assert [member.name for member in found] == ["la_8", "dr_8", "dr_da_8", "la_32", "dr_32", "dr_da_32"]
    for member in found:
        for its in (base, own):  # a file refers to another of the same user, and stands alone without the package's
            out = tmp_path / "some" / f"{member.name}.yaml"
            members.write(member.match.family.config, its, out, "A member.")
            assert load_config(out).config.model == member.match.family.config
            assert load_config(out).config.data == load_config(base).config.data
            assert ("base: ../own/la_16.yaml" in out.read_text()) is (its == own) and str(base) not in out.read_text()
        assert abs(member.match.gaps_percent["params"]) < 0.15
    by_name = {member.name: member.match for member in found}
    assert ends_at(by_name["la_32"]) == (32, 512)
    assert by_name["la_32"].gaps_percent["params"] == 0
    assert ends_at(by_name["dr_da_32"]) == TABLE_3["dr_da_32"]


def test_a_file_is_never_written_over_what_it_is_made_of() -> None:
    before = (MODELS / "paper.yaml").read_text()
    with pytest.raises(UserError, match="made of this file"):
        members.write(shipped("dr_16").config, MODELS / "la_16.yaml", MODELS / "paper.yaml", "Never.")
    assert (MODELS / "paper.yaml").read_text() == before


def test_only_files_of_its_own_are_replaced(tmp_path: Path) -> None:
    out, mine = tmp_path / "mine.yaml", "# mine, like one of `dreamer match`\nmodel: {depth: 3}\n"
    out.write_text(mine)
    with pytest.raises(UserError, match="isn't a file of `dreamer match`"):
        members.write(shipped("dr_16").config, MODELS / "la_16.yaml", out, "DR matched to la_16.yaml: 0.")
    assert out.read_text() == mine
    out.unlink()
    for comment in ("DR matched to la_16.yaml: 0.", "LA at depth 16, the baseline of its family."):
        members.write(shipped("dr_16").config, MODELS / "la_16.yaml", out, comment)
        assert out.read_text().startswith(f"# Written by `dreamer match`: {comment}\n")


def test_a_number_beyond_all_models_is_refused_in_a_line(capsys) -> None:
    assert main(["match", "dr_tiny", "--flops", "1e308"]) == 2
    assert "'1e308' is more than any model has" in capsys.readouterr().err


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown variant 'DA'; use some of LA,LA\+DA,DR,DR\+DA"):
        members.build(shipped("la_tiny").config, shipped("la_tiny").config, [4], ["DA"], 1024, 8)
