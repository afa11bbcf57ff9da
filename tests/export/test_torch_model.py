"""The PyTorch model against the JAX model: logits, gradients, caches, generation, balancing, in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dreamer_jax.blocks.routing import balance
from dreamer_jax.families import build
from tests.export.cases import WHY_SKIPPED, torch_model, torch_weights
from tests.families.cases import (
    POSITIONS,
    REAL,
    SEGMENT_IDS,
    apply,
    cross_entropy,
    jitted_forward,
    random_tokens,
    random_weights,
    relative_error,
    small_config,
)
from tests.families.numpy_reference import forward

torch = pytest.importorskip("torch", reason=WHY_SKIPPED)

from dreamer_jax.export import modeling_dreamer  # noqa: E402

TOLERANCE = 2e-5
TOKENS, TARGETS = (random_tokens(small_config(), seed=seed) for seed in (0, 1))


def logits_of(dreamer, tokens: np.ndarray, *arguments, **options) -> np.ndarray:
    inputs = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
    with torch.no_grad():
        return dreamer(torch.tensor(tokens), *inputs, **options).numpy()


@pytest.mark.slow_but("DR+DA-parallel_attention", "LA")
@pytest.mark.parametrize(
    ("variant", "mixing"),
    [
        ("LA", "parallel_attention"),
        ("LA+DA", "sequential"),
        ("DR", "parallel"),
        ("DR+DA", "sequential"),
        ("DR+DA", "parallel_attention"),
        ("DR+DA", "parallel"),
    ],
)
def test_logits_of_packed_rows_at_trained_and_other_depths(variant: str, mixing: str) -> None:
    config = small_config(variant, mixing)
    params, bias = random_weights(config)
    tokens = random_tokens(config)
    for keep_shared in (False, True)[: 1 + config.recurrent]:
        dreamer = torch_model(config, keep_shared)
        for depth in (3, 2):
            expected = jitted_forward(config)(params, bias, tokens, SEGMENT_IDS, POSITIONS, jnp.int32(depth)).logits
            actual = logits_of(dreamer, tokens, SEGMENT_IDS, depth=depth)
            assert relative_error(actual[REAL], np.asarray(expected)[REAL]) < TOLERANCE
            again = logits_of(dreamer, tokens, SEGMENT_IDS, POSITIONS, depth=depth)
            np.testing.assert_array_equal(again[REAL], actual[REAL])


@pytest.mark.parametrize("part", ["attention_experts", "shared_expert", "residual_norm", "router_depth_code"])
def test_without_a_part_of_section_3_7(part: str) -> None:
    """Against NumPy, with the shared experts apart and folded, where there are any; and greedily continued."""
    config = small_config(**{part: False})
    params, bias = random_weights(config)
    expected = forward(config, params, bias, TOKENS, SEGMENT_IDS, POSITIONS)
    for keep_shared in (False, True)[: 1 + config.shared_experts]:
        dreamer = torch_model(config, keep_shared)
        found = logits_of(dreamer, TOKENS, SEGMENT_IDS)
        assert relative_error(found[REAL], expected.logits[REAL]) < TOLERANCE
        prompt = torch.tensor(TOKENS[:1, :4])
        written = dreamer.generate(prompt, 3)
        for length in (4, 5, 6):  # the caches give what a pass over the whole row gives
            assert written[0, length] == dreamer(written[:, :length])[0, -1].argmax()


@pytest.mark.slow_but("settings10", "settings15", "settings3")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"depth_counters": "up", "depth_scaling": "ntk"},
        pytest.param({"depth_scaling": "interpolated"}, marks=pytest.mark.slow),
        {"depth_counters": "none"},
        pytest.param({"depth_counters": "learned"}, marks=pytest.mark.slow),
        {"depth_counters": "learned", "depth_scaling": "interpolated", "variant": "DR"},
        {"da_window": 3, "da_dilation": 2},
        {"da_every": 2, "da_window": 2, "sa_every": 2},
        {"residual_scale": "depth", "injection": "diagonal"},
        {"da_form": "gated_delta", "da_heads": 2},
        {"pa_slots": 5, "pa_heads": 2, "pa_head_size": 8, "pa_every": 2},
        pytest.param({"da_form": "gated_recurrent", "depth_counters": "learned"}, marks=pytest.mark.slow),
        pytest.param({"decoding_size": 10}, marks=pytest.mark.slow),
        {"decoding_size": 10, "residual_norm": False},
        pytest.param({"dimensions_per_token": 2, "pa_slots": 5, "pa_head_size": 8}, marks=pytest.mark.slow),
        {"dimensions_per_token": 1, "expert_subset": "sliding", "depth_counters": "learned"},
        pytest.param({"expert_subset": "hierarchical", "num_experts": 11, "depth": 5}, marks=pytest.mark.slow),
    ],
)
def test_deeper_than_trained(settings: dict[str, Any]) -> None:
    config = small_config(**settings)
    params, bias = random_weights(config)
    tokens = random_tokens(config, shape=(2, 5))
    expected = jax.jit(lambda params: apply(config, params, bias, tokens, depth=7).logits)(params)
    assert relative_error(logits_of(torch_model(config), tokens, depth=7), expected) < TOLERANCE


@pytest.mark.parametrize("variant", ["LA", "DR+DA"])
def test_texts(variant: str) -> None:
    """Their embeddings are a buffer, whose number of rows may change; greedily continued."""
    config = small_config(variant, pa_slots=4, pa_heads=2, pa_head_size=8, pa_source="texts", pa_embedding_size=6)
    params, bias = random_weights(config)
    texts = np.random.default_rng(2).normal(size=(9, 6)).astype(np.float32)
    dreamer = torch_model(config, texts=texts[:4])
    assert "knowledge" in dict(dreamer.named_buffers()) and "knowledge" not in dict(dreamer.named_parameters())
    for its in (texts[:4], texts):
        dreamer.knowledge = torch.tensor(its)
        expected = forward(config, params, bias, TOKENS, SEGMENT_IDS, POSITIONS, texts=its).logits
        assert relative_error(logits_of(dreamer, TOKENS, SEGMENT_IDS)[REAL], expected[REAL]) < TOLERANCE
    written = dreamer.generate(torch.tensor(TOKENS[:1, :4]), 3)
    for length in (4, 5, 6):
        assert written[0, length] == dreamer(written[:, :length])[0, -1].argmax()
    dreamer.gradient_checkpointing = True
    found = torch_gradients(dreamer)
    assert all(found[f"layers.0.parameter_attention.{name}"].abs().max() > 0 for name in ("keys", "values"))


def test_depths_that_keep_nothing_have_no_place_in_the_cache() -> None:
    """The caches give what a pass over the whole row gives."""
    dreamer, cache = torch_model(small_config(sa_every=2, da_every=2, depth=5)), modeling_dreamer.Cache()
    written = dreamer.generate(torch.tensor(TOKENS[:1, :4]), 3)
    for length in (4, 5, 6):
        assert written[0, length] == dreamer(written[:, :length])[0, -1].argmax()
    dreamer(written, cache=cache)
    assert len(cache.rows) == 3


@pytest.mark.parametrize("variant", ["LA", "DR"])
def test_depths_that_cannot_be_are_refused(variant: str) -> None:
    dreamer = torch_model(small_config(variant))
    with pytest.raises(ValueError, match="can't run at"):
        logits_of(dreamer, np.zeros((1, 2), np.int32), depth=0 if variant == "DR" else 4)


@pytest.mark.slow_but("300")
@pytest.mark.parametrize("length", [1, 300])
def test_one_token_and_a_long_row(length: int) -> None:
    config = small_config(sa_heads=3, sa_kv_heads=3, da_heads=2, da_kv_heads=1)
    params, bias = random_weights(config)
    tokens = random_tokens(config, shape=(1, length))
    ones, positions = np.ones_like(tokens), np.arange(length, dtype=np.int32)[None]
    expected = jitted_forward(config)(params, bias, tokens, ones, positions, jnp.int32(3)).logits
    assert relative_error(logits_of(torch_model(config), tokens), expected) < TOLERANCE


@functools.cache
def jax_gradients(config):
    """(gradients as `params`, counts) of the cross-entropy below."""
    params, bias = random_weights(config)

    @jax.jit
    def gradient(params, bias):
        def loss(params):
            out = apply(config, params, bias, TOKENS, SEGMENT_IDS, POSITIONS)
            return cross_entropy(out.logits, TARGETS, jnp.asarray(REAL)), out.counts

        return jax.grad(loss, has_aux=True)(params)

    return gradient(params, bias)


def torch_gradients(dreamer) -> dict:
    """Tensor name -> gradient of the same loss."""
    dreamer.train().zero_grad()
    logits = dreamer(torch.tensor(TOKENS), torch.tensor(SEGMENT_IDS))
    torch.nn.functional.cross_entropy(logits[torch.tensor(REAL)], torch.tensor(TARGETS[REAL]).long()).backward()
    return {name: p.grad.clone() for name, p in dreamer.named_parameters()}


def by_tensor(params, bias, config, keep_shared: bool) -> dict[str, np.ndarray]:
    return torch_weights(params, jax.tree.map(np.asarray, bias), config, keep_shared)


@pytest.mark.slow_but("settings1")
@pytest.mark.parametrize(
    ("variant", "keep_shared", "settings"),
    [("LA", False, {"dimensions_per_token": 1}), ("DR+DA", True, {}), ("DR+DA", True, {"dimensions_per_token": 2})],
)
def test_gradients_counts_and_balancing(variant: str, keep_shared: bool, settings: dict[str, Any]) -> None:
    config = small_config(variant, num_experts=8, **settings)
    params, bias = random_weights(config)
    expected, counts = jax_gradients(config)
    expected = by_tensor(expected, bias, config, keep_shared)
    dreamer = torch_model(config, keep_shared)
    found = torch_gradients(dreamer)
    for name, gradient in found.items():
        assert relative_error(gradient.numpy(), expected[name]) < 1e-4, name

    # Checkpointing computes every layer twice: the same gradients, nothing counted twice.
    dreamer = torch_model(config, keep_shared)
    dreamer.gradient_checkpointing = True
    for name, gradient in torch_gradients(dreamer).items():
        torch.testing.assert_close(gradient, found[name], rtol=1e-5, atol=1e-7)
    dreamer.update_balancing()
    state = build(config).update({"balancing": bias}, counts, jnp.int32(0))
    moved = by_tensor(params, state["balancing"], config, keep_shared)
    before = by_tensor(params, bias, config, keep_shared)
    for name, buffer in dreamer.named_buffers():
        np.testing.assert_allclose(buffer.numpy(), moved[name], atol=1e-7, err_msg=name)
        assert not np.array_equal(buffer.numpy(), before[name])
    dreamer.update_balancing()  # counts nothing since
    np.testing.assert_allclose(buffer.numpy(), moved[name], atol=1e-7)


@pytest.mark.parametrize("rule", ["sign_mean", "tanh", "proportional"])
def test_other_rules_of_balancing(rule) -> None:
    config = small_config("DR", num_experts=8, balancing=rule)
    router = torch_model(config, keep_shared=False).layers[0].expert_attention.router
    router.used = torch.tensor([9, 4, 0, 0, 1, 2, 0, 100])
    counts = jnp.asarray(router.used.numpy())[None]
    expected = balance(jnp.asarray(router.bias.numpy()), counts, config.expert_bias_rate, rule)
    router.update_balancing()
    np.testing.assert_allclose(router.bias.numpy(), expected, atol=1e-7)


@pytest.mark.parametrize("rule", ["sign_median", "tanh"])
def test_balancing_where_depths_have_subsets(rule) -> None:
    """Of a pass in training, deeper than trained."""
    config = small_config("DR", expert_subset="sliding", num_experts=8, balancing=rule)
    params, bias = random_weights(config)
    counts = jax.jit(lambda params, bias: apply(config, params, bias, TOKENS, depth=5).counts)(params, bias)
    expected = build(config).update({"balancing": bias}, counts, jnp.int32(0))["balancing"]["expert_attention"]
    dreamer = torch_model(config).train()
    dreamer(torch.tensor(TOKENS), depth=5)
    dreamer.update_balancing()
    moved = dreamer.layers[0].expert_attention.router.bias.numpy()
    np.testing.assert_allclose(moved, expected, atol=1e-7)
    assert not np.allclose(moved, bias["expert_attention"], atol=1e-5)


def test_a_folded_score_sees_the_shared_expert_and_a_kept_one_does_not() -> None:
    config = small_config(num_experts=8)
    expected = by_tensor(jax_gradients(config)[0], random_weights(config)[1], config, False)
    name = "layers.0.sequence_attention.projections.router.query"
    assert relative_error(torch_gradients(torch_model(config))[name].numpy(), expected[name]) > 1e-2


@pytest.mark.parametrize("variant", ["LA+DA", "DR+DA"])
def test_caches_give_the_logits_of_the_whole_row(variant: str) -> None:
    dreamer = torch_model(small_config(variant))
    tokens = torch.tensor(random_tokens(small_config(variant), shape=(2, 11)))
    with torch.no_grad():
        whole = dreamer(tokens)
        for cuts in ([1] * 11, [5, 4, 1, 1], [3, 8]):
            cache, parts = modeling_dreamer.Cache(), []
            for part in tokens.split(cuts, 1):
                parts.append(dreamer(part, cache=cache))
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
            assert cache.get_seq_length() == 11
            assert cache.rows[0][0].shape[2] < 80  # nothing but the sequence's keys grows
        torch.testing.assert_close(dreamer(tokens, last=2), whole[:, -2:])


def test_a_cache_at_another_depth() -> None:
    """Routers know how many depths are left; more depths than the cache was filled with are refused."""
    dreamer, tokens = torch_model(small_config()), torch.tensor(random_tokens(small_config(), shape=(1, 6)))
    written = []
    for used in (False, True):  # a cache that has kept nothing of another depth, and one that has
        cache = modeling_dreamer.Cache()
        with torch.no_grad():
            dreamer(tokens[:, :5], cache=cache)
            if not used:
                cache.router_keys.clear()
            written.append(dreamer(tokens[:, 5:], depth=2, cache=cache))
    assert torch.equal(*written)
    with torch.no_grad(), pytest.raises(ValueError, match="fewer depths; keep depth as it was"):
        dreamer(tokens[:, :5], depth=2, cache=(cache := modeling_dreamer.Cache()))
        dreamer(tokens[:, 5:], cache=cache)


def test_a_cache_keeps_the_gradient() -> None:
    dreamer = torch_model(small_config("DR"))
    tokens = torch.tensor(random_tokens(small_config("DR"), shape=(1, 6)))
    dreamer(tokens)[:, -1].sum().backward()
    whole = dreamer.embedding.weight.grad.clone()
    dreamer.zero_grad()
    cache = modeling_dreamer.Cache()
    dreamer(tokens[:, :4], cache=cache)
    dreamer(tokens[:, 4:], cache=cache)[:, -1].sum().backward()
    torch.testing.assert_close(dreamer.embedding.weight.grad, whole, rtol=1e-4, atol=1e-5)


def test_generation_is_the_repeated_forward_pass_also_with_padding() -> None:
    dreamer = torch_model(small_config())
    long, short = (torch.tensor(random_tokens(small_config(), seed=seed, shape=(1, n))) for seed, n in ((0, 7), (1, 4)))

    def slowly(tokens):
        for _ in range(6):
            with torch.no_grad():
                tokens = torch.cat([tokens, dreamer(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    assert torch.equal(dreamer.generate(long, 6), slowly(long))
    padded = torch.cat([long, torch.nn.functional.pad(short, (3, 0))])
    mask = torch.ones_like(padded)
    mask[1, :3] = 0
    both = dreamer.generate(padded, 6, segment_ids=mask)
    assert torch.equal(both[:1], slowly(long)) and torch.equal(both[1:, 3:], slowly(short))
    other = dreamer.generate(long, 6, depth=2)
    assert not torch.equal(other, slowly(long))


def test_generation_stops_and_samples() -> None:
    dreamer = torch_model(small_config())
    tokens = torch.tensor(random_tokens(small_config(), shape=(2, 3)))
    free = dreamer.generate(tokens, 8)
    eos = int(free[0, 4])
    stopped = dreamer.generate(tokens, 8, eos=eos)
    assert (stopped[0, 4:] == eos).all() and torch.equal(stopped[0, :5], free[0, :5])
    only = dreamer.generate(tokens, 8, temperature=1.0, top_k=1)
    assert torch.equal(only, free)
    draws = [
        dreamer.generate(tokens, 8, temperature=2.0, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_the_three_ways_through_experts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "expert_size": 24, "sa_head_size": 8, "da_head_size": 8}  # rows of 16 bytes and more
    config = small_config(**sizes)
    dreamer, tokens = torch_model(config, keep_shared=True), random_tokens(config)
    calls = []
    grouped_mm = torch.nn.functional.grouped_mm
    results = []
    for gathered, grouped in ((1 << 40, True), (0, True), (0, False)):
        monkeypatch.setattr(modeling_dreamer, "GATHERED_BYTES", gathered)
        if grouped:
            counted = lambda *a, **k: calls.append(a) or grouped_mm(*a, **k)  # noqa: E731
            monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
        else:
            monkeypatch.delattr(torch.nn.functional, "grouped_mm")  # before torch 2.10
        before = len(calls)
        results.append((logits_of(dreamer, tokens, SEGMENT_IDS), gradients_of(dreamer, tokens)))
        assert (len(calls) > before) == (grouped and not gathered)
    for logits, gradients in results[1:]:
        assert relative_error(results[0][0], logits) < TOLERANCE
        for name, gradient in gradients.items():
            assert relative_error(results[0][1][name], gradient) < 1e-4, name


def gradients_of(dreamer: Any, tokens: Any) -> dict[str, Any]:
    """Parameter name -> gradient of a loss that no symmetry makes zero."""
    dreamer.zero_grad()
    logits = dreamer(torch.tensor(tokens))
    (logits.log_softmax(-1)[..., 0] * torch.linspace(1, 2, logits.shape[1])).sum().backward()
    return {name: p.grad.numpy() for name, p in dreamer.named_parameters() if p.grad is not None}


def test_bfloat16_greedy_tokens_and_float32_routing() -> None:
    config = small_config(hidden_size=32)
    params, bias = random_weights(config)
    # Clear favourites, as a trained model has: what depths add is small, and the head answers with the next token.
    quiet = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (0.2 if path[-1].key in ("out", "out_shared", "down") else 1), params
    )
    params = {**quiet, "head": np.roll(params["embedding"], 1, axis=0)}
    tokens = random_tokens(config, shape=(4, 50))
    dreamer = torch_model(config, keep_shared=True, weights=(params, bias))
    dreamer.compute_dtype = torch.bfloat16
    bfloat16 = small_config(hidden_size=32, dtype="bfloat16")
    ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(50, dtype=np.int32), tokens.shape)
    expected = np.asarray(jitted_forward(bfloat16)(params, bias, tokens, ones, positions, jnp.int32(3)).logits)
    actual = logits_of(dreamer, tokens)
    assert actual.dtype == np.float32
    assert (actual.argmax(-1) == expected.argmax(-1)).mean() >= 0.99
    # Logits are sums in float32, not rounded to the 8 bits of bfloat16.
    assert (actual.astype(jnp.bfloat16).astype(np.float32) != actual).mean() > 0.9
