"""Texts as pairs of what is given and what is scored."""

from __future__ import annotations

from dreamer_jax.data.tokenizers import Tokenizer, encode_pair

Pair = tuple[list[int], list[int]]
"""Tokens that are given, one or more, and those that are scored."""


def harness_pair(tokenizer: Tokenizer, context: str, text: str) -> Pair:
    """A context and its continuation as lm-evaluation-harness encodes them.

    The two are encoded together, then cut where the first ends when encoded alone; spaces at the end of the first
    belong to the second. Where a prompt and its completion are known, `encode_pair` is meant.
    """
    kept = context.rstrip()
    text = context[len(kept) :] + text
    before = tokenizer.encode(kept) if kept else []
    together = tokenizer.encode(kept + text)
    return [tokenizer.bos, *before], together[len(before) :]


def rolling_windows(tokenizer: Tokenizer, text: str, length: int, prompt: str = "") -> list[Pair]:
    """(context, tokens to predict) of windows in which every token of a text is predicted once.

    The first window begins with the begin-of-text token. The others take up where the last one ended, given one
    token; the last window predicts only what is left and gets all the context that fits (as the harness does).

    Args:
        length: most tokens the model sees.
        prompt: where the text is a completion, what stands before it; predicted as well.
    """
    before, after = encode_pair(tokenizer, prompt, text)
    tokens = before + after
    padded = [tokenizer.bos, *tokens]  # padded[i] stands before tokens[i]
    windows = []
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        windows.append((padded[max(0, end - length) : start + 1], tokens[start:end]))
    return windows
