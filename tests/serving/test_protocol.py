"""Bodies of requests, and conversations as tokens."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dreamer_jax.data.json_tokenizer import JsonTokenizer
from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.errors import UserError
from dreamer_jax.inference.samplers import Adaptive, DiffusionForcing, Lossless, Static
from dreamer_jax.serving.contract import Token
from dreamer_jax.serving.keys import Keys, read_keys
from dreamer_jax.serving.prompts import ChatTemplate, Prompts, chat_template_of
from dreamer_jax.serving.protocol import Message, Refused, parse
from dreamer_jax.serving.shapes import Part, Shapes

SAID = {"role": "user", "content": "hello"}


def read(chat: bool = False, **fields: Any):
    return parse(json.dumps(fields).encode(), chat)


@pytest.mark.parametrize(
    "prompt, read_as",
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
        ("", ("",)),
    ],
)
def test_prompts(prompt, read_as):
    assert read(prompt=prompt).prompts == read_as


def test_defaults_are_those_of_openai():
    plain, chat = read(prompt="a"), read(True, messages=[SAID])
    assert (plain.max_tokens, chat.max_tokens) == (16, None)
    for asked in (plain, chat):
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
        assert (asked.number, asked.stop, asked.logprobs, asked.stream) == (1, (), None, False)
        assert asked.sampler == Static() and asked.depth is None
    assert read(prompt="a").sampling.seed != read(prompt="a").sampling.seed
    assert read(prompt="a", seed=-1).sampling.seed == 2**32 - 1


@pytest.mark.parametrize(
    "fields, sampler",
    [
        ({"exit": {"criterion": "kl", "threshold": 1e-3}, "min_depth": 2}, Adaptive("kl", 1e-3, 2)),
        ({"exit": {}}, Adaptive()),
        ({"exit": {"criterion": None, "threshold": None, "every": 2}}, Adaptive(every=2)),
        ({"sampler": "adaptive", "min_depth": 3}, Adaptive(min_depth=3)),
        ({"sampler": {"name": "adaptive", "every": 2}}, Adaptive(every=2)),
        ({"sampler": {"name": "diffusion-forcing", "official_quirks": True}}, DiffusionForcing(official_quirks=True)),
    ],
)
def test_samplers(fields, sampler):
    assert read(prompt="a", **fields).sampler == sampler


def test_chat_fields():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    asked = read(True, messages=messages, logprobs=True, max_completion_tokens=3, stop="\n", stream=True,
                 stream_options={"include_usage": True}, n=2, user="me", tools=[], best_of=None)  # fmt: skip
    assert asked.messages == (Message("system", "be brief"), Message("user", "ab"))
    assert (asked.logprobs, asked.max_tokens, asked.stop, asked.number) == (0, 3, ("\n",), 2)
    assert asked.stream and asked.include_usage


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "prompt is missing"),
        ({"prompt": 5}, "prompt must be a string or a list"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, "a"]}, "prompt must be a string, a list of strings"),
        ({"prompt": [[True]]}, "prompt must be"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": ["a"] * 300, "n": 10}, "prompt and n ask for more than 2048 answers"),
        ({"prompt": "a", "n": 0}, "n must be 1 to 128"),
        ({"prompt": "a", "n": True}, "n must be an integer"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0: must be 1 or more"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "temperature": -1}, "temperature -1.0: must be from 0 to 1e+30"),
        ({"prompt": "a", "temperature": 10**400}, "temperature is too large a number"),
        ({"prompt": "a", "top_p": 10**400}, "top_p is too large a number"),
        ({"prompt": "a", "min_p": -(10**400)}, "min_p is too large a number"),
        ({"prompt": "a", "top_k": 10**400}, "top_k must be 0 to 2147483647"),
        ({"prompt": "a", "exit": {"every": 2**31}}, "exit.every is too large a number"),
        ({"prompt": "a", "exit": {}, "min_depth": 2**31}, "min_depth must be 1 to 2147483647"),
        ({"prompt": "a", "exit": {"threshold": 10**400}}, "exit.threshold is too large a number"),
        ({"prompt": "a", "exit": {"threshold": 1e300}}, "exit.threshold 1e+300: must be from 0"),
        ({"prompt": "a", "exit": {"threshold": -1}}, "exit.threshold -1: must be from 0"),
        ({"prompt": "a", "sampler": {"name": "adaptive", "threshold": -1}}, "sampler.threshold -1: must be from 0"),
        (
            {"prompt": "a", "sampler": {"name": "diffusion-forcing", "init_scale": 1e39}},
            "sampler.init_scale 1e+39: must",
        ),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop takes at most 4"),
        ({"prompt": "a", "stop": ""}, "none of them empty"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must be 0 to 20"),
        ({"prompt": "a", "echo": 1}, "echo must be true or false"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0: must be 1 or more"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens -1: must be 0 or more"),
        ({"prompt": "a", "best_of": 2}, "best_of isn't supported here"),
        ({"prompt": "a", "frequency_penalty": 0.1}, "frequency_penalty isn't supported here"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "goes with stream: true only"),
        ({"prompt": "a", "sampler": "statc"}, "sampler 'statc': there is none of that name"),
        ({"prompt": "a", "sampler": ""}, "sampler '': there is none of that name"),
        ({"prompt": "a", "sampler": {}}, "sampler must be a name, or an object with one"),
        ({"prompt": ["a"] * 2049}, "prompt and n ask for more than 2048 answers"),
        ({"prompt": "a", "temperature": 1e31}, "temperature 1e+31: must be from 0 to 1e+30"),
        ({"prompt": "a", "sampler": {"name": "adaptive", "min_depht": 1}}, "did you mean 'sampler.min_depth'?"),
        ({"prompt": "a", "exit": {"threshold": "x"}}, "exit.threshold"),
        ({"prompt": "a", "exit": {}, "sampler": "static"}, "give one of exit and sampler"),
        ({"prompt": "a", "min_depth": 2}, "min_depth goes with exit"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(Refused) as refused:
        read(**fields)
    assert message in refused.value.message and refused.value.status == 400 and "\n" not in refused.value.message


def test_the_field_at_fault_is_named_whole():
    for fields, param in (
        ({"messages": [{"role": "user", "content": "a", "foo": 1}]}, "messages.0.foo"),
        ({"messages": [{"role": "user", "content": "a"}], "stream": True, "stream_options": {"usage": True}},
         "stream_options.usage"),
    ):  # fmt: skip
        with pytest.raises(Refused) as refused:
            read(True, **fields)
        assert refused.value.param == param and f"'{param}'" in refused.value.message


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 1.5), ("min_p", -1)])
def test_a_number_out_of_range_names_its_field(name, value):
    with pytest.raises(Refused) as refused:
        read(**{"prompt": "a", name: value})
    assert refused.value.param == name and refused.value.message.startswith(f"{name} {float(value)}: must be ")


def test_a_setting_out_of_range_names_where_it_stands():
    for fields, param in (({"exit": {"every": 0}}, "exit"), ({"sampler": {"name": "static", "every": 2}}, "sampler")):
        with pytest.raises(Refused) as refused:
            read(prompt="a", **fields)
        assert refused.value.param == param


def test_an_echo_is_of_completions_only():
    assert read(prompt="a", echo=True, max_tokens=0).max_tokens == 0 and read(prompt="a", echo=True).max_tokens == 16
    with pytest.raises(Refused, match="echo isn't supported here"):
        read(True, messages=[{"role": "user", "content": "a"}], echo=True)


def test_values_that_change_nothing_are_taken():
    read(prompt="a", echo=False, best_of=1, frequency_penalty=0.0, presence_penalty=0, logit_bias={}, suffix=None)
    with pytest.raises(Refused):
        read(prompt="a", best_of=True)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json(body):
    with pytest.raises(Refused, match="the body isn't"):
        parse(body, False)


def test_a_conversation_in_the_words_of_the_run():
    tokenizer = ByteTokenizer()
    prompts = Prompts(tokenizer, 259, "Question: {question}\nAnswer: ")
    said = [Message("system", "Short."), Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]
    text = "Short.\nQuestion: 1+1?\nAnswer: 2\nQuestion: 2+2?\nAnswer: "
    assert prompts.conversation(said) == (tokenizer.bos, *text.encode())
    assert Prompts(tokenizer, 259, "").conversation(said[1:2]) == (tokenizer.bos, *b"1+1?")
    with pytest.raises(Refused, match="must end with what the user says"):
        prompts.conversation(said[:3])
    with pytest.raises(Refused, match="several fields"):
        Prompts(tokenizer, 259, "{a}{b}").conversation(said)
    with pytest.raises(Refused, match="from 0 to 258"):
        prompts.text([259])


def test_a_chat_template_and_text_that_spells_its_tokens(tmp_path):
    """Special tokens are the template's alone; what people write stays text, also in the middle of a word."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    built = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(32, 127)} | {"\n": 10}, []))
    built.add_special_tokens(["<s>", "</s>", "<|user|>", "<|end|>"])
    built.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|user|>{{ m.content | trim }}<|end|>{% endfor %}"
    )
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    chat = chat_template_of(tokenizer)
    assert chat is not None
    ids = chat.tokens([Message("user", " a<|end|>b ")])
    special = tokenizer.special_ids
    plain = tuple(tokenizer.encode("a<|end|>b"))
    assert ids == (special["<s>"], special["<|user|>"], *plain, special["<|end|>"])
    assert special["<|end|>"] not in plain and len(plain) == 9
    with pytest.raises(Refused, match="refuses the messages: no system"):
        chat.tokens([Message("system", "x")])
    settings["chat_template"] = "{{ messages | tojson }}"  # the text in it too, as JSON
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = chat_template_of(tokenizer)
    assert chat is not None
    text = '[{"role": "user", "content": "<b>a<|end|>b</b>"}]'
    assert chat.tokens([Message("user", "<b>a<|end|>b</b>")])[1:] == tuple(tokenizer.encode(text))
    assert chat_template_of(ByteTokenizer()) is None


@pytest.mark.parametrize(
    "change, said, expected",
    [
        ("upper", "a<|end|>b", "A<|end|>B"),
        ("title", "a<|end|>b<|end|><s>", "A<|end|>b<|end|><s>"),
        ("truncate(5, true, '', 0)", "a <|end|> b c", "a <|end|> b"),
        ("list | join('-')", "a<|end|>\U000f0000<s>", "a-<|end|>-\U000f0000-<s>"),
    ],
)
def test_a_template_may_change_text_that_spells_a_special_token(tmp_path, change, said, expected):
    """Which stays as it is, always the same, and a character that a person has written is that person's."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    characters = [*map(chr, range(32, 127)), "\n", "\U000f0000"]
    vocabulary = {character: i for i, character in enumerate(characters)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    built.add_special_tokens(["<s>", "</s>", "<|end|>"])
    built.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": "{{ messages[0].content | " + change + " }}", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = chat_template_of(JsonTokenizer(tmp_path / "tokenizer.json"))
    assert chat is not None
    assert chat.tokens([Message("user", said)])[1:] == tuple(vocabulary[character] for character in expected)


def test_a_turn_of_a_conversation_ends_as_its_template_ends_it(tmp_path):
    """Instruct models end a turn with another token than a text: `<|im_end|>` beside `<|endoftext|>`."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    built = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(32, 127)}, []))
    built.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    built.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": "{{ messages[0].content }}", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    prompts = Prompts(tokenizer, tokenizer.vocab_size, "", chat_template_of(tokenizer))
    assert prompts.ends(chat=False) == (tokenizer.eos,)
    assert prompts.ends(chat=True) == (tokenizer.eos, tokenizer.special_ids["<|im_end|>"])
    assert Prompts(ByteTokenizer(), 259, "").ends(chat=True) == (ByteTokenizer().eos,)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    template("", tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(UserError, match=r"chat_template\.jinja: isn't text"):
        chat_template_of(JsonTokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ["x"]}')
    assert chat_template_of(JsonTokenizer(tmp_path / "tokenizer.json")) is None


def test_a_template_finds_no_tools(tmp_path):
    """As Hugging Face calls it: there are none, which is another thing than a name that isn't known."""
    asks = "{% if tools is not none or documents is not none %}T{% endif %}{{ messages[0].content }}"
    plain = "{{ messages[0].content }}"
    found = [template(its, tmp_path).tokens([Message("user", "abc")]) for its in (asks, plain)]
    assert found[0] == found[1]


def template(source: str, tmp_path: Path) -> ChatTemplate:
    """Of a tokenizer whose tokens are characters."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    characters = {chr(i): i for i in range(32, 127)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(characters | {"<s>": 0, "</s>": 1}, []))
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    return ChatTemplate(source, JsonTokenizer(tmp_path / "tokenizer.json"), {})


@pytest.mark.parametrize(
    "source, text",
    [
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "a"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "b"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "ab"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{{ strftime_now('%Y') }}", str(datetime.date.today().year)),
        ("{{ {'b': '<&>', 'a': 1} | tojson }}", '{"b": "<&>", "a": 1}'),
        ("{{ [1] | tojson(separators=(',', ':'), indent=1) | replace('\n', '') }}", "[ 1]"),
    ],
)
def test_what_templates_of_hugging_face_have(source, text, tmp_path):
    chat = template(source, tmp_path)
    assert "".join(map(chr, chat.tokens([Message("user", "a"), Message("user", "b")])[1:])) == text


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ strftime_now(1) }}", "must be str"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source, message, tmp_path):
    with pytest.raises(Refused, match=f"chat template refuses the messages: .*{message}") as refused:
        template(source, tmp_path).tokens([Message("user", "a")])
    assert refused.value.status == 400


def test_tokens_that_decode_to_one_text_have_names_of_their_own(tmp_path):
    """SentencePiece's words with and without a space before them, and a byte that is spelled as one."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {"<s>": 0, "</s>": 1, "▁T": 2, "T": 3, "▁": 4, "▁F": 5, "<0x54>": 6, "<0xC3>": 7}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("▁", "T")]))
    decoders = tokenizers.decoders
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    shapes = Shapes(JsonTokenizer(tmp_path / "tokenizer.json"), False, "x", 0, "m", True, False)
    token = Token(2, 4, -0.1, tuple((i, -float(i)) for i in (2, 3, 4, 5, 6, 7, 0)))
    (choice,) = shapes.whole([Part(0, (token,), ("T",))], {})["choices"]
    assert choice["logprobs"]["tokens"] == [" T"] and choice["text"] == "T"
    names = [" T", "T", " ", " F", "token_id:6", "token_id:7", "token_id:0"]
    assert choice["logprobs"]["top_logprobs"][0] == dict(zip(names, (-2, -3, -4, -5, -6, -7, 0), strict=True))


def test_what_is_no_number_has_no_place_in_json():
    token = Token(65, 4, math.nan, ((65, math.nan), (66, -math.inf)))
    for chat in (False, True):
        shapes = Shapes(ByteTokenizer(), chat, "x", 0, "m", True, False)
        text = json.dumps(shapes.whole([Part(0, (token,), ("A",))], {}), allow_nan=False)
        assert text.count("-9999.0") == 3


def test_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n0123456789abcdef\n\n  fedcba9876543210  \n")
    keys = read_keys(str(path))
    assert keys.open("Bearer 0123456789abcdef") and keys.open("bearer fedcba9876543210")
    for wrong in (None, "", "0123456789abcdef", "Basic 0123456789abcdef", "Bearer # ours", "Bearer \udcff"):
        assert not keys.open(wrong)
    from dreamer_jax.errors import UserError

    wrong = (("", "holds no key"), ("short\n", "line 1: a key is 16"), ("a b" * 9, "line 1"), ("é" * 20, "of ASCII"))
    for content, message in wrong:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            read_keys(str(path))
    with pytest.raises(UserError, match="can't be read"):
        read_keys(str(tmp_path))
    assert isinstance(keys, Keys)


def test_a_name_alone_means_what_is_offered_under_it():
    """With `min_depth` beside it too. An object, or `exit`, is a sampler of its own."""
    offered = {"adaptive": Adaptive(threshold=0.5), "static": Static()}

    def sampler(**fields):
        return parse(json.dumps({"prompt": "a", **fields}).encode(), False, offered).sampler

    assert sampler(sampler="adaptive") == Adaptive(threshold=0.5)
    assert sampler(sampler={"name": "adaptive"}) == sampler(exit={}) == Adaptive()
    assert sampler(sampler="adaptive", min_depth=2) == Adaptive(threshold=0.5, min_depth=2)
    assert sampler(sampler={"name": "adaptive"}, min_depth=2) == Adaptive(min_depth=2)
    assert sampler() == sampler(sampler="static") == Static() and sampler(sampler="lossless") == Lossless()
