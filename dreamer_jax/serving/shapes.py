"""What clients get: OpenAI's shapes of answers and of their parts, with the depth that every token took.

Every choice has the extension `tokens`: the text and the depth of each token of its text, which add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.inference.growing import UNFINISHED
from dreamer_jax.serving.contract import Token

UNLIKELY = -9999.0
"""The logarithm of a probability that can't be named."""


@dataclass(frozen=True)
class Part:
    """Some of an answer, or all of it.

    Attributes:
        index: of the choice.
        text: the texts of the tokens.
        tokens, texts: of each token what the engine said, and its text.
        offset: characters of the answer before this part.
        finish: how it ends; None while it goes on.
    """

    index: int
    tokens: tuple[Token, ...]
    texts: tuple[str, ...]
    offset: int = 0
    finish: str | None = None

    @property
    def text(self) -> str:
        """Of all tokens."""
        return "".join(self.texts)

    @property
    def ends(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None


@dataclass(frozen=True)
class Shapes:
    """The answers to one request.

    Attributes:
        tokenizer: of the model.
        chat: whether they answer a conversation.
        identity: of the answer.
        created: seconds since 1970.
        model: its name.
        logprobs: whether they were asked for.
        include_usage: whether a stream ends with usage.
    """

    tokenizer: Tokenizer
    chat: bool
    identity: str
    created: int
    model: str
    logprobs: bool
    include_usage: bool

    def whole(self, parts: Sequence[Part], usage: dict[str, Any]) -> dict[str, Any]:
        """An answer at once."""
        choices = []
        for part in parts:
            said = {"message": {"role": "assistant", "content": part.text, "refusal": None}}
            choices.append(self._choice(part, said if self.chat else {"text": part.text}))
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with for a choice: who speaks."""
        if not self.chat:
            return None
        return self._streamed(Part(index, (), ()), {"role": "assistant", "content": ""})

    def chunk(self, part: Part) -> dict[str, Any]:
        """The next part of a choice in a stream."""
        return self._streamed(part, {"content": part.text} if part.texts else {})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last part of a stream that was asked for usage."""
        return self._object(self._kind, []) | {"usage": usage}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _streamed(self, part: Part, delta: dict[str, Any]) -> dict[str, Any]:
        found = self._object(self._kind, [self._choice(part, {"delta": delta} if self.chat else {"text": part.text})])
        return found | {"usage": None} if self.include_usage else found

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, part: Part, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            logprobs = {"content": self._chat_logprobs(part), "refusal": None} if self.chat else self._logprobs(part)
        tokens = [{"text": text, "depth": token.depth} for token, text in zip(part.tokens, part.texts, strict=True)]
        return {"index": part.index, **said, "logprobs": logprobs, "finish_reason": part.finish, "tokens": tokens}

    def _logprobs(self, part: Part) -> dict[str, Any]:
        offsets, place = [], part.offset
        for text in part.texts:
            offsets.append(place)
            place += len(text)
        return {
            "tokens": [self._name(token.id) for token in part.tokens],
            "token_logprobs": [_number(token.logprob) for token in part.tokens],
            "top_logprobs": [
                None if token.logprob is None else self._by_name(token.likeliest) for token in part.tokens
            ],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, part: Part) -> list[dict[str, Any]]:
        return [
            self._named(token.id, token.logprob)
            | {"top_logprobs": [self._named(i, value) for i, value in token.likeliest]}
            for token in part.tokens
        ]

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {
            "token": self._name(token),
            "logprob": _number(logprob),
            "bytes": None if text is None else list(text.encode()),
        }

    def _by_name(self, likeliest: Sequence[tuple[int, float]]) -> dict[str, float | None]:
        """By the names of tokens; of several with one text the likeliest has it, and the others their numbers."""
        found: dict[str, float | None] = {}
        for token, value in likeliest:
            name = self._name(token)
            found[f"token_id:{token}" if name in found else name] = _number(value)
        return found

    def _name(self, token: int) -> str:
        """The text of a token; of one that has none, its number."""
        return self._text(token) or f"token_id:{token}"

    def _text(self, token: int) -> str | None:
        """Of a token in the middle of a text, here behind itself: at the beginning some decoders drop its space. None
        for special tokens and for those that are no whole characters."""
        alone, twice = self.tokenizer.decode([token]), self.tokenizer.decode([token, token])
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        return text if text and UNFINISHED not in text else None


def _number(logprob: float | None) -> float | None:
    """As JSON can have it: of a model whose numbers overflow it may be none, which OpenAI's answers have as -9999."""
    return logprob if logprob is None or math.isfinite(logprob) else UNLIKELY


def usage(prompt_tokens: int, answers: Sequence[Sequence[Token]]) -> dict[str, Any]:
    """What was counted; `mean_depth` is an extension.

    Args:
        prompt_tokens: of all prompts.
        answers: the tokens of each, those of stop strings included.
    """
    depths = [token.depth for answer in answers for token in answer]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(depths),
        "total_tokens": prompt_tokens + len(depths),
        "mean_depth": round(sum(depths) / len(depths), 3) if depths else None,
    }
