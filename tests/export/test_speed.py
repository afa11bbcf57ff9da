"""Speed of the PyTorch model on the CPU against Qwen3-MoE of transformers at the same sizes."""

import dataclasses
import time

import pytest

from dreamer_jax.config.schema import ModelConfig
from tests.export.cases import WHY_SKIPPED

torch = pytest.importorskip("torch", reason=WHY_SKIPPED)
transformers = pytest.importorskip("transformers", reason=WHY_SKIPPED)

from dreamer_jax.export.modeling_dreamer import DreamerConfig, DreamerForCausalLM  # noqa: E402

MODEL = ModelConfig(
    variant="LA",
    depth=8,
    hidden_size=512,
    vocab_size=8192,
    sa_heads=8,
    sa_kv_heads=4,
    sa_head_size=64,
    da_head_size=64,
    num_experts=32,
    experts_per_token=4,
    expert_size=256,
    router_size=64,
)
MATCHED = {"LA": {}, "DR+DA": {"variant": "DR+DA", "num_experts": 270, "expert_size": 240}}
PROMPT, NEW = 128, 16
ROUNDS = 5


def qwen3(model: ModelConfig):
    config = transformers.Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.depth,
        num_attention_heads=model.sa_heads,
        num_key_value_heads=model.sa_kv_heads,
        head_dim=model.sa_head_size,
        num_experts=model.num_experts,
        num_experts_per_tok=model.experts_per_token,
        moe_intermediate_size=model.expert_size,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def dreamer(model: ModelConfig):
    fields = dataclasses.asdict(model)
    del fields["dtype"], fields["implementation"]
    return DreamerForCausalLM(DreamerConfig(**fields))


@torch.no_grad()
def seconds(model, tokens) -> tuple[float, float]:
    """CPU time of one prefill, and of one token after it, both by the model's own cache."""
    started = time.process_time()
    out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    prefilled = time.process_time()
    for _ in range(NEW):
        fed = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=fed, past_key_values=out.past_key_values, use_cache=True)
    return prefilled - started, (time.process_time() - prefilled) / NEW


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", list(MATCHED))
def test_prefill_and_decode_beside_qwen3_moe(variant: str, dtype: str) -> None:
    """Held for the layered model in float32, which does the same work; the others are shown (see docs/export.md)."""
    torch.set_num_threads(1)  # then CPU time is the model's own, whatever else the machine does
    config = dataclasses.replace(MODEL, **MATCHED[variant])
    models = [model.to(getattr(torch, dtype)).eval() for model in (dreamer(config), qwen3(MODEL))]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)
    tokens = torch.randint(0, MODEL.vocab_size, (1, PROMPT))
    for model in models:
        seconds(model, tokens)
    rounds = [[seconds(model, tokens) for model in models] for _ in range(ROUNDS)]  # in turn: a busy machine is fair
    for index, what in enumerate(("prefill", "decode")):
        ours, theirs = (min(r[model][index] for r in rounds) for model in (0, 1))
        print(f"{variant} {dtype} {what}: {1e3 * ours:.2f} ms, Qwen3-MoE {1e3 * theirs:.2f} ms")
        if (variant, dtype) == ("LA", "float32"):
            assert ours <= theirs * {"prefill": 1.2, "decode": 1.0}[what], what
