"""The rules by which answers are scored, those of EleutherAI's lm-evaluation-harness, and standard errors.

Pure functions of texts and numbers; nothing here knows a model or a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


class Estimate(NamedTuple):
    """A measured value and its standard error (nan where one sample tells none)."""

    value: float
    error: float


def strict_number(text: str) -> str | None:
    """GSM8K's strict rule: the number after the first `#### `, as written; None if there is none."""
    match = _STRICT.search(text)
    return match[1].strip() if match else None


def flexible_number(text: str) -> str | None:
    """GSM8K's flexible rule: the last thing in the text that looks like a number, as written; None if nothing does."""
    last = None
    for match in _FLEXIBLE.finditer(text):
        last = match
    return (last[1] or last[2]).strip() if last else None


def same_number(answer: str | None, gold: str) -> bool:
    """Whether an extracted number is the one that GSM8K's gold solution ends with.

    Both sides lose commas, dollar signs, everything up to the last `#### ` and a final full stop; then they are
    compared as text, so that 5.0 is not 5.
    """
    return answer is not None and _bare(answer) == _bare(gold)


def _bare(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def last_boxed(text: str) -> str | None:
    r"""What MATH's last `\boxed{...}` (or `\fbox{...}`) holds, without the braces; None if there is none.

    Braces are balanced; an escaped one doesn't count. `\boxed 2`, without braces, holds what follows up to the next
    dollar sign or line end. A box that is never closed holds nothing.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = start + len("\\boxed" if text.startswith("\\boxed", start) else "\\fbox")
    rest = text[after:].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip()
    depth, escaped = 0, False
    for i, character in enumerate(rest):
        if not escaped:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return rest[1:i]
        escaped = character == "\\" and not escaped
    return None


def chosen(logprobs: Sequence[float], lengths: Sequence[int] | None = None) -> int | None:
    """Index of the likeliest choice; the first of several that are equally likely. None where one is NaN: a model
    that diverges chooses nothing.

    Args:
        logprobs: summed log-probability of each choice.
        lengths: divide by these first (`acc_norm` divides by the characters of the choice). A choice of no length
            is never taken unless all are such.
    """
    if any(map(math.isnan, logprobs)):
        return None
    if lengths is None:
        ranked = list(logprobs)
    else:
        ranked = [lp / n if n else -math.inf for lp, n in zip(logprobs, lengths, strict=True)]
    return ranked.index(max(ranked))


def mean(values: Sequence[float]) -> Estimate:
    """Mean, and its standard error: the sample's standard deviation over the root of its size."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    centre = math.fsum(values) / n
    if n == 1:
        return Estimate(centre, math.nan)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    return Estimate(centre, math.sqrt(variance / n))


def perplexity(logprobs: Sequence[float], counts: Sequence[float]) -> Estimate:
    """exp(-sum of log-probabilities / sum of counts) over samples, such as documents.

    Args:
        logprobs: summed log-probability of each sample, natural logarithm.
        counts: what each is divided by: its tokens or its bytes.

    Returns:
        The perplexity, with the standard error of a ratio of sums (first order, samples drawn independently).
    """
    n, total = len(counts), math.fsum(counts)
    if not total:
        return Estimate(math.nan, math.nan)
    loss = -math.fsum(logprobs) / total
    value = math.exp(min(loss, 700.0))
    if n == 1:
        return Estimate(value, math.nan)
    residuals = math.fsum((-lp - loss * count) ** 2 for lp, count in zip(logprobs, counts, strict=True))
    return Estimate(value, value * math.sqrt(residuals * n / (n - 1)) / total)
