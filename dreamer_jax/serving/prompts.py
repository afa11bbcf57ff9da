"""From what clients send to the tokens that the model continues."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from dreamer_jax.data.json_tokenizer import JsonTokenizer, settings_beside
from dreamer_jax.data.jsonl import Template
from dreamer_jax.data.tokenizers import Tokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.serving.protocol import Message, Refused


class Prompts:
    """Prompts of one model.

    A conversation goes through the tokenizer's chat template where it has one. Otherwise it is what `dreamer chat
    --history` makes of it: what the user says is put into the run's prompt, what the model has said stands behind it
    with a line break, and so does what the system says, as it is.

    Args:
        tokenizer: of the model.
        vocabulary: tokens that the model knows.
        template: the run's prompt, `data.prompt`.
        chat: the tokenizer's chat template; None if it has none.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, template: str, chat: ChatTemplate | None = None):
        self.tokenizer, self._vocabulary = tokenizer, vocabulary
        self._template, self._chat = Template(template, "data.prompt"), chat

    def text(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Of a completion: begin-of-text and the text, or tokens as they are.

        Raises:
            Refused: a token isn't the model's.
        """
        if isinstance(prompt, str):
            return (self.tokenizer.bos, *self.tokenizer.encode(prompt))
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise Refused(400, f"prompt: tokens are from 0 to {self._vocabulary - 1}", "prompt")
        return tuple(prompt)

    def ends(self, chat: bool) -> tuple[int, ...]:
        """Tokens that end an answer: end-of-text, and in a conversation what its template closes a turn with."""
        turn = self._chat.turn_end if chat and self._chat is not None else None
        return (self.tokenizer.eos,) if turn in (None, self.tokenizer.eos) else (self.tokenizer.eos, turn)

    def conversation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Of a conversation.

        Raises:
            Refused: the model's template can't take it.
        """
        if self._chat is not None:
            return self._chat.tokens(messages)
        fields = self._template.fields
        if len(fields) > 1:
            raise Refused(
                400,
                f"the prompt of this run takes several fields ({', '.join(fields)}); ask /v1/completions",
                "messages",
            )
        if messages[-1].role == "assistant":
            raise Refused(400, "messages must end with what the user says", "messages")
        parts = []
        for message in messages:
            if message.role == "user":
                parts.append(self._template.fill({fields[0]: message.content}) if fields else message.content)
            else:
                parts.append(f"{message.content}\n")
        return self.text("".join(parts))


PRIVATE = range(0xF0000, 0x10FFFE)
"""Characters without a meaning."""


class ChatTemplate:
    """A Jinja template of conversations, as Hugging Face's tokenizers have it, in a sandbox.

    Special tokens come from the template alone: what people say is encoded as plain text, also where it spells one.

    Args:
        source: the template.
        tokenizer: its tokenizer.
        names: `bos_token` and `eos_token`, as the template writes them.
    Raises:
        UserError: jinja2 isn't installed, or the template is broken.
    """

    def __init__(self, source: str, tokenizer: JsonTokenizer, names: dict[str, str]):
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise UserError(f"{tokenizer.path.parent}: its chat template needs jinja2: pip install jinja2") from None
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UserError(f"{tokenizer.path.parent}: its chat template is broken: {error}") from None
        self._tokenizer, self._names = tokenizer, names
        self.turn_end = tokenizer.special_ids.get(names.get("eos_token", ""))
        """What the model ends its turn with, as `<|im_end|>`, which need not be its end-of-text; None if it isn't
        said."""
        written = sorted(tokenizer.special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, written))) if written else None

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Of a conversation, up to where the model speaks.

        Raises:
            Refused: the template doesn't take it.
        """
        # Special tokens that people have spelled are a character each until they are text: one without a meaning, which
        # no template changes or divides, and that nobody has written.
        taken = set().union(*(m.content for m in messages))
        free = (chr(n) for n in PRIVATE if chr(n) not in taken)
        marks: dict[str, str] = {}

        def hide(found: re.Match[str]) -> str:
            if found[0] not in marks and (mark := next(free, None)):
                marks[found[0]] = mark
            return marks.get(found[0], "\ufffd")  # where somebody has written all that there are

        said = [{"role": m.role, "content": self._special.sub(hide, m.content) if self._special else m.content}
                for m in messages]  # fmt: skip
        try:
            asked = {"messages": said, "tools": None, "documents": None, "add_generation_prompt": True}
            text = self._template.render(**asked, **self._names)
        except Exception as error:  # a template may do whatever Python does: add texts to numbers, divide by zero
            raise Refused(400, f"the model's chat template refuses the messages: {error}", "messages") from None
        ids, plain = [], 0
        for found in self._special.finditer(text) if self._special else ():
            ids += self._plain(text[plain : found.start()], marks)
            ids.append(self._tokenizer.special_ids[found[0]])
            plain = found.end()
        ids += self._plain(text[plain:], marks)
        return tuple(ids) if ids[:1] == [self._tokenizer.bos] else (self._tokenizer.bos, *ids)

    def _plain(self, text: str, marks: dict[str, str]) -> list[int]:
        text = text.translate({ord(mark): special for special, mark in marks.items()})
        return self._tokenizer.encode(text) if text else []


def _environment() -> Any:
    """Jinja with what Hugging Face's templates have beside: `raise_exception`, `strftime_now`, `break` and `continue`,
    `generation`, which marks what a model has said and changes no text, and a `tojson` that escapes no HTML."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that lies beside a tokenizer.json, in `chat_template.jinja` or `tokenizer_config.json`.

    Raises:
        UserError: what is there can't be read.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return None
    folder = tokenizer.path.parent
    settings = settings_beside(tokenizer.path)
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{path}: isn't text that can be read; mend it or remove it") from None
    if isinstance(source, list):  # several by name
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, tokenizer, {name: settings[name] for name in ("bos_token", "eos_token")})
