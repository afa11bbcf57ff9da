"""How fast the exported PyTorch model is on a CPU, next to Hugging Face's Qwen3-MoE."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from dreamer_jax.benchmarks.qwen3 import EXPERTS, cache_name, check_comparable, qwen, require_transformers
from dreamer_jax.config.sections import Config
from dreamer_jax.export.description import NOT_DESCRIBED, twin_of

Seconds = dict[str, float]


def bench_export(
    config: Config,
    layered: Config,
    dtype: str,
    prompt: int,
    tokens: int,
    rounds: int,
    threads: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time a prefill and a decoded token of both, in turns, with random weights.

    Args:
        config: our model.
        layered: an LA configuration; Qwen3-MoE gets its sizes.
        dtype: "float32" or "bfloat16", of both.
        prompt, tokens: tokens of the one prompt, and to decode after it.
        rounds: turns of each side.
        threads: of torch. With one, the time taken is the CPU time, which other programs disturb less.
        say: told what is being done.

    Returns:
        JSON-like: `machine`; `ours` and `theirs`: parameters, and median seconds of `prefill` and of a `decode`d
        token; `ratio`: for both, their seconds over ours, median and range over the rounds.

    Raises:
        UserError: torch or transformers is missing, or `layered` isn't an LA configuration in float32.
    """
    require_transformers()
    check_comparable(layered)
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(config.run.seed)
    clock = time.process_time if threads == 1 else time.perf_counter
    prompt_tokens = torch.randint(0, min(config.model.vocab_size, layered.model.vocab_size), (1, prompt))

    def measure(model: Any) -> Seconds:
        return _seconds(model, prompt_tokens, tokens, clock)

    ours = _ours(config).to(getattr(torch, dtype)).eval()
    experts, theirs = _fastest(layered, getattr(torch, dtype), measure, say)
    measure(ours)
    taken: list[tuple[Seconds, Seconds]] = []
    for number in range(rounds):
        if number % 10 == 0:
            say(f"round {number + 1} of {rounds}")
        taken.append((measure(ours), measure(theirs)))
    return {
        "machine": {"threads": threads, "torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": dtype,
        "prompt": prompt,
        "ours": _side(ours, [pair[0] for pair in taken]),
        "theirs": _side(theirs, [pair[1] for pair in taken]) | {"experts": experts},
        "ratio": {part: _spread([pair[1][part] / pair[0][part] for pair in taken]) for part in ("prefill", "decode")},
    }


def _fastest(
    layered: Config, dtype: Any, measure: Callable[[Any], Seconds], say: Callable[[str], None]
) -> tuple[str, Any]:
    """The fastest of Qwen3-MoE's ways to compute experts, and the model that does."""
    candidates = {}
    for experts in EXPERTS:
        say(f"trying Qwen3-MoE with experts {experts}")
        model = qwen(layered, experts).to(dtype).eval()
        measure(model)
        candidates[experts] = (min(sum(measure(model).values()) for _ in range(3)), model)
    experts, (_, theirs) = min(candidates.items(), key=lambda item: item[1][0])
    return experts, theirs


def _ours(config: Config) -> Any:
    """The class of an exported folder, with random weights."""
    from dreamer_jax.export import modeling_dreamer

    fields = {k: v for k, v in dataclasses.asdict(twin_of(config)).items() if k not in NOT_DESCRIBED}
    return modeling_dreamer.DreamerForCausalLM(modeling_dreamer.DreamerConfig(**fields))


def _seconds(model: Any, prompt: Any, tokens: int, clock: Callable[[], float]) -> Seconds:
    """One prefill and one decoded token after it, each by the model's own cache."""
    import torch

    with torch.no_grad():
        started = clock()
        out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        filled = clock()
        for _ in range(tokens):
            fed = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=fed, use_cache=True, **{cache_name(model): out.to_tuple()[1]})
        return {"prefill": filled - started, "decode": (clock() - filled) / tokens}


def _side(model: Any, taken: list[Seconds]) -> dict[str, Any]:
    medians = {part: statistics.median(seconds[part] for seconds in taken) for part in ("prefill", "decode")}
    return {"parameters": sum(weight.numel() for weight in model.parameters()), **medians}


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
