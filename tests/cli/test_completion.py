"""`dreamer completion`: what a shell may offer, seen by the words that are written so far, and by bash itself."""

import shutil
import subprocess
import sys

import pytest

from dreamer_jax.cli.completion import SCRIPTS, candidates
from dreamer_jax.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    "words, offered",
    [
        (["tr"], ["train"]),
        ([""], list(COMMANDS)),
        (["train", "quick"], ["quickstart"]),
        (["study", "z"], ["zoo"]),
        (["data", "pr"], ["prepare"]),
        (["data", "prepare", "gsm8k_math_b"], ["gsm8k_math_bpe", "gsm8k_math_bytes"]),
        (["train", "quickstart", "--model.vari"], ["--model.variant"]),
        (["train", "quickstart", "--model.core_l"], ["--model.core_layers"]),
        (["train", "quickstart", "--model.variant", "DR"], ["DR", "DR+DA"]),
        (["train", "quickstart", "--model.family", "hug"], ["huginn", "huginn_classifier"]),
        (["bench", "train", "--model.fam"], ["--model.family"]),
        (["bench", "train", "--agai"], ["--against"]),
        (["generate", "runs/x", "--samp"], ["--sampler"]),
        (["generate", "runs/"], []),
        (["checkpoint", ""], ["list", "verify", "prune"]),
        (["frontier", ""], ["graph", "boolean", "family"]),
        (["checkpoint", "prune", "x", "--keep"], ["--keep", "--keep-every"]),
        (["frontier", "boolean", "--preset", "l"], ["laptop"]),
        (["frontier", "boolean", "--training.wa"], ["--training.warmup_steps"]),
        (["frontier", "graph", ""], []),
        (["study", "zoo", "--training.wa"], ["--training.warmup_steps"]),
        (["train", "quickstart", "--coord"], ["--coordinator"]),
        (["train", "quickstart", "--fam"], ["--family-module"]),
        (["generate", "runs/x", "--dtype", "b"], ["bfloat16"]),
        (["data", "tr"], ["train-tokenizer"]),
        (["data", "show", "quick"], ["quickstart"]),
        (["data", "show", "quickstart", "--data.sou"], ["--data.source"]),
        (["data", "build", ""], []),
        (["generate", "runs/x", "--int"], ["--int8"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nonsense", "x"], []),
    ],
)
def test_what_is_offered(words: list[str], offered: list[str]) -> None:
    assert candidates(words) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes() -> None:
    """The script as bash runs it; `dreamer` is this interpreter."""
    script = f"""
        dreamer() {{ {sys.executable} -m dreamer_jax "$@"; }}
        {SCRIPTS["bash"]}
        COMP_WORDS=(dreamer train quickst); COMP_CWORD=2; _dreamer; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quickstart"] and done.stderr == ""


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "one of: bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "bash", "now"]) == 2
    assert "leave out now" in capsys.readouterr().err
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
