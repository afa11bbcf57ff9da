"""What clients ask for: bodies of OpenAI's completions and chat completions, read strictly, with our extensions.

The reference is https://platform.openai.com/docs/api-reference (completions, chat). Three rules for fields that aren't
read here: one that OpenAI has and that can't change the answer is ignored (`IGNORED`); one that OpenAI has and that
would change it is refused unless it has the value that changes nothing (`UNSUPPORTED`); any other is refused, since it
is a slip of the pen as a rule.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import SAMPLERS, Adaptive, Sampler, Static
from dreamer_jax.inference.samplers.by_name import as_written, sampler_of
from dreamer_jax.inference.sampling import Sampling

MOST_ANSWERS = 128
"""`n`, as at OpenAI."""
MOST_PROMPTS = 2048
"""Prompts of one body, times `n`; as many prompts as at OpenAI."""
MOST_STOPS = 4
"""Stop strings, as at OpenAI."""
MOST_LOGPROBS = 20
"""Likeliest tokens beside a chosen one: OpenAI's chat completions take 20, its completions 5."""
SHORT = 16
"""Tokens of a completion whose `max_tokens` isn't given, as at OpenAI."""

IGNORED = frozenset(
    ["metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"]
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Field -> the values that change nothing; null never does."""
NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
}


class Refused(Exception):
    """A request that isn't answered.

    Args:
        status: of HTTP.
        message: what is wrong and how to mend it.
        param: the field at fault.
        code: for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        # A name that a client has given may hold half of a surrogate pair, which no answer can be written with.
        self.message = message.encode(errors="backslashreplace").decode()
        self.param = None if param is None else param.encode(errors="backslashreplace").decode()
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Message:
    """One of a conversation."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body, read.

    Attributes:
        prompts: texts or tokens, of completions.
        messages: of chat completions; None in the others.
        model: the name that it asks for; None if it names none.
        number: answers to each prompt.
        max_tokens: None for as many as fit.
        stop: strings that end an answer.
        sampling, sampler, depth, logprobs: as of `contract.Request`.
        echo: whether the prompts come with the answers.
        stream, include_usage: whether the answer comes in parts, and whether usage comes last.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Message, ...] | None
    model: str | None
    number: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling
    sampler: Sampler
    depth: int | None
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool


class Fields:
    """The fields of an object, taken out one by one; null is as good as none.

    Args:
        values: the object.
        within: the field that it is the value of, with a dot behind; "" for the body.
    """

    def __init__(self, values: dict[str, Any], within: str = ""):
        self._values = {key: value for key, value in values.items() if value is not None}
        self._within, self._known = within, list[str]()

    def take(self, name: str, *kinds: type) -> Any:
        """The value of a field, of one of these types; None if there is none. An integer is a number, too."""
        self._known.append(name)
        value = self._values.pop(name, None)
        accepted = (*kinds, int) if float in kinds else kinds
        if value is None or (isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool))):
            return value
        self.refuse(name, f"must be {' or '.join(NAMES[kind] for kind in kinds)}")

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """An integer within bounds."""
        value = self.take(name, int)
        if value is not None and not least <= value <= (math.inf if most is None else most):
            self.refuse(name, f"{value}: must be {least} or more" if most is None else f"must be {least} to {most}")
        return value

    def number(self, name: str, otherwise: float) -> float:
        """A number; an integer that is larger than any is refused."""
        value = self.take(name, float)
        try:
            return otherwise if value is None else float(value)
        except OverflowError:
            self.refuse(name, "is too large a number")

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Refuse the value of a field."""
        raise Refused(400, f"{self._within}{name} {problem}", f"{self._within}{name}")

    def end(self) -> None:
        """Refuse what is left, by the rules above."""
        for name, value in self._values.items():
            if not self._within and name in IGNORED:
                continue
            if not self._within and name in UNSUPPORTED:
                if not any(value == neutral and type(value) in (type(neutral), float)
                           for neutral in UNSUPPORTED[name]):  # fmt: skip
                    raise Refused(400, f"{name} isn't supported here; leave it out", name, "unsupported_parameter")
                continue
            alike = difflib.get_close_matches(name, self._known, n=1)
            fix = f"did you mean '{self._within}{alike[0]}'?" if alike else "leave it out"
            whole = f"{self._within}{name}"
            raise Refused(400, f"unknown field '{whole}'; {fix}", whole, "unknown_parameter")


def parse(body: bytes, chat: bool, offered: Mapping[str, Sampler] = MappingProxyType({})) -> Asked:
    """Read a body; a sampler's name alone means the one that is offered under it.

    Raises:
        Refused: with status 400.
    """
    try:
        values = json.loads(body, parse_constant=_no_number)
    except UnicodeDecodeError:
        raise Refused(400, "the body isn't UTF-8") from None
    except (ValueError, RecursionError) as error:
        why = " that can be read: NaN, too many digits, or too deep"
        if isinstance(error, json.JSONDecodeError):
            why = f" (line {error.lineno}, column {error.colno})"
        raise Refused(400, f"the body isn't JSON{why}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise Refused(400, "the body must be a JSON object")
    try:
        return _asked(Fields(values), chat, offered)
    except UserError as error:
        raise Refused(400, str(error)) from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _asked(fields: Fields, chat: bool, offered: Mapping[str, Sampler]) -> Asked:
    stream = bool(fields.take("stream", bool))
    options = fields.take("stream_options", dict)
    include_usage = False
    if options is not None:
        if not stream:
            fields.refuse("stream_options", "goes with stream: true only")
        inner = Fields(options, "stream_options.")
        include_usage = bool(inner.take("include_usage", bool))
        inner.take("include_obfuscation", bool)  # this server has no padding to leave out
        inner.end()
    echo = not chat and bool(fields.take("echo", bool))
    asked = Asked(
        prompts=() if chat else _prompts(fields),
        messages=_messages(fields) if chat else None,
        model=fields.take("model", str),
        number=fields.integer("n", 1, MOST_ANSWERS) or 1,
        max_tokens=_max_tokens(fields, chat, echo),
        stop=_stop(fields),
        sampling=_sampling(fields),
        sampler=_sampler(fields, offered),
        depth=fields.integer("depth", 1),
        logprobs=_logprobs(fields, chat),
        echo=echo,
        stream=stream,
        include_usage=include_usage,
    )
    fields.end()
    if len(asked.prompts) * asked.number > MOST_PROMPTS:
        fields.refuse("prompt", f"and n ask for more than {MOST_PROMPTS} answers")
    return asked


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.take("prompt", str, list)
    if value is None:
        fields.refuse("prompt", "is missing")
    if isinstance(value, str):
        return (_text(fields, "prompt", value),)
    if value and all(type(each) is int for each in value):
        return (tuple(value),)
    if not value:
        fields.refuse("prompt", "is empty")
    prompts: list[str | tuple[int, ...]] = []
    for each in value:
        if isinstance(each, str):
            prompts.append(_text(fields, "prompt", each))
        elif isinstance(each, list) and each and all(type(token) is int for token in each):
            prompts.append(tuple(each))
        else:
            fields.refuse("prompt", "must be a string, a list of strings, a list of tokens, or a list of those")
    return tuple(prompts)


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.take("messages", list)
    if not value:
        fields.refuse("messages", "is missing or empty")
    found = []
    for number, each in enumerate(value):
        within = f"messages.{number}."
        if not isinstance(each, dict):
            fields.refuse(f"messages.{number}", "must be an object with role and content")
        inner = Fields(each, within)
        role, content = inner.take("role", str), inner.take("content", str, list)
        inner.take("name", str)
        if role not in ("system", "developer", "user", "assistant"):
            inner.refuse("role", "must be system, developer, user or assistant")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                       for part in content):  # fmt: skip
                inner.refuse("content", 'may have parts {"type": "text", "text": ...} only')
            content = "".join(part["text"] for part in content)
        if content is None:
            inner.refuse("content", "is missing")
        if role == "assistant":
            inner.take("refusal", str)
        inner.end()
        found.append(Message("system" if role == "developer" else role, _text(inner, "content", content)))
    return tuple(found)


def _text(fields: Fields, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        fields.refuse(name, "holds half of a surrogate pair, which is no character")
    return text


def _max_tokens(fields: Fields, chat: bool, echo: bool) -> int | None:
    plain = fields.integer("max_tokens", 0 if echo else 1)
    if not chat:
        return SHORT if plain is None else plain
    newer = fields.integer("max_completion_tokens", 1)
    if plain is not None and newer is not None and plain != newer:
        fields.refuse("max_tokens", "and max_completion_tokens say different things; give one of them")
    return newer or plain


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop", str, list)
    stop = [value] if isinstance(value, str) else value or []
    if not all(isinstance(each, str) and each for each in stop):
        fields.refuse("stop", "must be a string or a list of strings, none of them empty")
    if len(stop) > MOST_STOPS:
        fields.refuse("stop", f"takes at most {MOST_STOPS} strings")
    return tuple(_text(fields, "stop", each) for each in stop)


def _sampling(fields: Fields) -> Sampling:
    seed = fields.take("seed", int)
    values: dict[str, Any] = {
        "temperature": fields.number("temperature", 1.0),
        "top_k": fields.integer("top_k", 0, 2**31 - 1) or 0,
        "top_p": fields.number("top_p", 1.0),
        "min_p": fields.number("min_p", 0.0),
        "seed": secrets.randbits(32) if seed is None else seed % 2**32,
    }
    try:
        return Sampling(**values)
    except UserError as error:  # "sampling: top_p 1.5: must be ..."
        name, _, problem = str(error).removeprefix("sampling: ").partition(" ")
        fields.refuse(name, problem)


def _sampler(fields: Fields, offered: Mapping[str, Sampler]) -> Sampler:
    value, exits = fields.take("sampler", str, dict), fields.take("exit", dict)
    min_depth = fields.integer("min_depth", 1, 2**31 - 1)
    its = offered.get(value) if isinstance(value, str) and exits is None else None
    if its is not None and min_depth is None:
        return its
    if isinstance(its, Adaptive):
        return dataclasses.replace(its, min_depth=min_depth)
    if exits is not None:
        if value is not None:
            fields.refuse("exit", "is sampler adaptive; give one of exit and sampler")
        unknown = [key for key in exits if key not in ("criterion", "threshold", "every")]
        if unknown:
            fields.refuse(f"exit.{unknown[0]}", "is unknown; exit takes criterion, threshold and every")
        value, within = exits | {"name": Adaptive.name}, "exit."
    else:
        within = "sampler."
    if value is None or isinstance(value, str):
        value = {"name": Static.name if value is None else value}
    settings: dict[str, Any] = {key: setting for key, setting in value.items() if setting is not None}
    name = settings.pop("name", None)
    if not isinstance(name, str):
        fields.refuse("sampler", 'must be a name, or an object with one: {"name": "adaptive", "threshold": 0.05}')
    if name not in SAMPLERS and offered:
        fields.refuse("sampler", f"'{name}': there is none of that name here; one of {', '.join(offered)}")
    if min_depth is not None:
        if name != Adaptive.name or "min_depth" in settings:
            fields.refuse("min_depth", "goes with exit, or sampler adaptive that says no other")
        settings["min_depth"] = min_depth
    for key, setting in settings.items():
        if isinstance(setting, (dict, list)):
            fields.refuse(f"{within}{key}", "must be a string, a number, or true or false")
        if isinstance(setting, int) and abs(setting) >= 2**31:
            fields.refuse(f"{within}{key}", "is too large a number")
    try:
        return sampler_of(name, as_written(settings), within)
    except UserError as error:
        raise Refused(400, str(error), within.removesuffix(".")) from None


def _logprobs(fields: Fields, chat: bool) -> int | None:
    if not chat:
        return fields.integer("logprobs", 0, MOST_LOGPROBS)
    wanted, likeliest = fields.take("logprobs", bool), fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if likeliest is not None and not wanted:
        fields.refuse("top_logprobs", "goes with logprobs: true only")
    return (likeliest or 0) if wanted else None
