"""`dreamer serve`: what its options come to, and what is said when it can't start."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="extra `serve`")
pytest.importorskip("uvicorn", reason="extra `serve`")

import dreamer_jax.model
from dreamer_jax.cli import serve
from dreamer_jax.cli.main import main
from dreamer_jax.errors import UserError
from dreamer_jax.inference import Adaptive, DiffusionForcing
from dreamer_jax.serving import process
from dreamer_jax.serving.connections import is_loopback
from tests.serving.asking import get, post, until
from tests.serving.fake import TOKENIZER, FakeEngine


@pytest.fixture
def started(monkeypatch):
    """What the command would have served, with a run that isn't there."""
    found: dict[str, Any] = {}
    data = SimpleNamespace(source="jsonl", prompt="Q: {question}\n", sequence_length=96)
    config = SimpleNamespace(data=data, model=SimpleNamespace(vocab_size=259))
    model = SimpleNamespace(tokenizer=TOKENIZER, config=config, folded=lambda depth: None)

    def engine_for(*sizes: Any) -> FakeEngine:
        found["sizes"], found["engine"] = sizes[1:], FakeEngine()
        return found["engine"]

    def load(run: str, **options: Any) -> Any:
        found["options"] = options
        return model

    def run(server: Any, taken: socket.socket, grace: float, say: Any) -> None:
        found.update(server=server, address=taken.getsockname(), grace=grace)
        taken.close()
        server.engine.close(0)

    monkeypatch.setattr(
        dreamer_jax.model, "load", lambda run, **options: found.update(run=run, options=options) or model
    )
    monkeypatch.setattr(serve, "engine_for", engine_for)
    monkeypatch.setattr(process, "serve", run)
    log = logging.getLogger("dreamer_jax.serving")
    before = log.handlers, log.propagate, log.level
    yield found
    log.handlers, log.propagate, log.level = before
    if "engine" in found:
        found["engine"].close(0)


def test_defaults(started, capsys):
    assert main(["serve", "runs/x", "--port", "0"]) == 0
    served = started["server"].served
    assert (served.name, served.context, served.keys, served.loopback, served.log_text) == ("x", 96, None, True, False)
    *sizes, mesh = started["sizes"]
    assert sizes == [16, 96, 64, None, []] and dict(mesh.shape) == {"slice": 1, "data0": 8, "expert": 1}
    assert started["grace"] == 30 and started["address"][0] == "127.0.0.1"
    assert served.prompts.text("a") == (256, 97) and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("wavy", "none of that name; one of static"),
        ('{"name": "adaptive", "treshold": 1}', "has no setting 'treshold'; did you mean 'threshold'?"),
        (
            '{"name": "adaptive", "threshold": [1]}',
            "[1]}: threshold must be a string, a number",
        ),
        ('{"wavefront": 3}', "has no name; as {"),
        ('{"name"', "isn't JSON; as {"),
    ],
)
def test_offers_that_are_none(started, word, said, capsys):
    assert main(["serve", "runs/x", "--port", "0", "--offer", word]) == 2
    assert said in capsys.readouterr().err


def test_a_context_that_has_no_room_for_an_answer(started, capsys):
    assert main(["serve", "runs/x", "--port", "0", "--context", "1"]) == 2
    assert "--context 1: must be 2 or more" in capsys.readouterr().err and "run" not in started


def test_options(started, tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    words = ["--rows", "3", "--context", "50", "--queue", "7", "--depth", "5", "--grace", "1.5", "--log-text"]
    words += [
        "--mesh.data",
        "1",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--dtype",
        "bfloat16",
        "--offer",
        "diffusion-forcing",
    ]
    words += ["--offer", '{"name": "adaptive", "criterion": "kl", "every": 2}']
    assert main(["serve", "runs/x/checkpoints/500", *words, "--api-key-file", str(keys)]) == 0
    served = started["server"].served
    assert (served.name, served.context, served.loopback, served.log_text) == ("x-500", 50, False, True)
    assert served.keys.open("Bearer 0123456789abcdef") and capsys.readouterr().err == ""
    offered = [DiffusionForcing(), Adaptive("kl", every=2)]
    assert started["sizes"] == (3, 50, 7, 5, offered, None) and started["grace"] == 1.5
    assert started["options"] == {
        "average": 1,
        "dtype": "bfloat16",
        "int8": False,
        "cache": None,
        "tokenizer": None,
        "knowledge": None,
    }
    assert main(["serve", "runs/x", *words]) == 0
    assert "without --api-key-file: everybody who reaches this machine may ask" in capsys.readouterr().err


def test_devices(started, capsys):
    """All that there are, eight in these tests, unless fewer are asked for; what there isn't is refused."""
    for words, shape in ((["2"], {"data0": 4, "expert": 2}), (["4", "--mesh.data", "1"], {"data0": 1, "expert": 4})):
        assert main(["serve", "runs/x", "--port", "0", "--mesh.expert", *words]) == 0
        assert dict(started["sizes"][-1].shape) == {"slice": 1} | shape
    capsys.readouterr()
    for words, said in (
        (["3"], "--mesh.expert 3: jax sees 8 devices; give --mesh.data, too, to take fewer"),
        (["3", "--mesh.data", "3"], "--mesh.data 3 x --mesh.expert 3 is 9 devices; jax sees 8"),
        (["0"], "0"),
    ):
        assert main(["serve", "runs/x", "--mesh.expert", *words]) == 2
        found = capsys.readouterr().err
        assert said in found and found.count("\n") == 1


def test_a_model_that_does_not_generate_is_said_before_its_tokenizer(monkeypatch, capsys):
    """The words of a puzzle are no file that could be named."""

    class Solver:
        def folded(self, depth: int | None) -> None:
            raise UserError("it doesn't generate text")

        @property
        def tokenizer(self) -> None:
            raise UserError("name the tokenizer")

    monkeypatch.setattr(dreamer_jax.model, "load", lambda run, **options: Solver())
    assert main(["serve", "runs/x", "--port", "0"]) == 2
    assert capsys.readouterr().err == "dreamer: error: it doesn't generate text\n"


def test_a_port_that_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "runs/x", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use; name another one (--port 0 takes any)" in capsys.readouterr().err


def test_of_two_that_start_together_one_gets_the_port(monkeypatch):
    """Both take it at the same moment: the other one has bound itself to it, too, before this one listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with process.open_port("127.0.0.1", port), pytest.raises(OSError, match="in use"):
            other.listen()
        listen = socket.socket.listen

        def second(its: socket.socket, *backlog: int) -> None:
            listen(other)
            listen(its, *backlog)

        monkeypatch.setattr(socket.socket, "listen", second)
        with pytest.raises(UserError, match="in use; name another one"):
            process.open_port("127.0.0.1", port)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--port", "70000"], "must be at most 65535"),
        (["--grace", "-1"], "'-1' is not a number of seconds"),
        (["--host", "no.such.host.invalid"], "name another one"),
        (["--api-key-file", "nowhere"], "nowhere: can't be read"),
        (["--port", "0"], "runs/x is not a run directory"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["serve", "runs/x", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_the_extra(missing, monkeypatch, capsys):
    ours = ("dreamer_jax.serving.process", "dreamer_jax.serving.server")
    for name in [name for name in sys.modules if name in ours or name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["dreamer_jax.serving"], "process")
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["serve", "runs/x"]) == 2
    said = capsys.readouterr().err
    assert "dreamer serve needs the extra serve" in said and "[serve]'" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:80", "127.0.0.1:8000", "[::1]:8000", "a.localhost", "127.9.9.9"]
)
def test_names_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", "[::2]:8000"]
)
def test_names_of_others(host):
    assert not is_loopback(host)


@pytest.mark.slow  # trains a run and compiles an engine: some 30 CPU seconds
def test_a_run_is_served_and_writes_what_generate_writes(tmp_path, capsys):
    """Through the command, a process of its own with two devices, and HTTP; the page is there, too, and SIGTERM ends
    it."""
    small = {"model.depth": 3, "model.hidden_size": 16, "model.num_experts": 2, "model.experts_per_token": 1}
    small |= {"model.expert_size": 16, "training.steps": 2, "training.batch_size": 2, "data.sequence_length": 64}
    words = [f"--{key}={value}" for key, value in small.items()]
    run, prompt = str(tmp_path / "run"), "((T&F)|T)="
    assert main(["train", "quickstart", *words, "--evaluation.harder=0", f"--run.dir={run}"]) == 0
    capsys.readouterr()
    assert main(["generate", run, "--prompt", prompt, "--max-tokens", "12"]) == 0
    text = capsys.readouterr().out[:-1]
    command = [sys.executable, "-m", "dreamer_jax", "serve", run, "--port", "0", "--rows", "2"]
    command += ["--mesh.data", "1", "--mesh.expert", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            lines = iter(running.stderr.readline, "")
            url = next(line.split()[-1] for line in lines if line.startswith("serving run at "))
            assert any(line.startswith("ready: compiled ") for line in lines)
            until(lambda: get(f"{url}/health")[0] == 200)
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            for fields in ({}, {"sampler": "lossless"}):
                status, answer, _ = post(url, json.dumps(body | fields).encode())
                assert status == 200 and answer["choices"][0]["text"] == text
                assert answer["usage"]["mean_depth"] == 3
            status, answer, _ = post(url, json.dumps(body | {"depth": 4}).encode())
            assert status == 400 and "this server goes to 3; start it with --depth 4" in answer["error"]["message"]
            assert answer["error"]["param"] == "depth"
            assert "<title>Dreamer</title>" in get(f"{url}/")[1]
            assert main(["bench", "serve", "--url", url, "--requests", "6", "--json"]) == 0
            running.terminate()
            assert running.wait(20) == 0 and running.stderr.read().endswith("stopped\n")
        finally:
            running.kill()
    assert json.loads(capsys.readouterr().out)["modes"]["as served"]["tokens"] > 0
