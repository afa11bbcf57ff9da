"""The words of `dreamer train` that name processes, and what counts as the loss of one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from dreamer_jax.cli import train
from dreamer_jax.cli.main import main
from dreamer_jax.cli.train import _lost_others, _split_flags
from dreamer_jax.config import Config, LoadedConfig
from dreamer_jax.errors import UserError
from dreamer_jax.parallel.distributed import named_processes


def test_processes_are_named_by_flags():
    words = ["c.yaml", "--coordinator", "host:1", "--run.dir", "r", "--processes=4", "--process", "2"]
    assert _split_flags(words) == (["c.yaml", "--run.dir", "r"], ["host:1", "4", "2"])
    assert _split_flags(["c.yaml"]) == (["c.yaml"], None)
    named = named_processes("host:1", "4", "2")
    assert (named.coordinator, named.count, named.index) == ("host:1", 4, 2)


@pytest.mark.parametrize("flags", [("host", "4", "2"), ("host:1", "4", "4"), ("host:1", "four", "0")])
def test_impossible_processes(flags):
    with pytest.raises(UserError):
        named_processes(*flags)


def test_incomplete_flags(capsys):
    assert main(["train", "quickstart", "--process", "1"]) == 2
    assert "--coordinator and --processes is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: socket closed"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:37264"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("operands could not be broadcast"), False),
        (KeyError("UNAVAILABLE"), False),
    ],
)
def test_the_loss_of_a_process_is_told_from_a_defect(error, lost):
    assert _lost_others(error) == lost


def test_one_of_several_ends_at_once_when_nobody_reads(monkeypatch):
    """Neither the error nor what is said of it may lead to Python's regular exit, which waits for the others."""

    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(train, "_train", broken)
    monkeypatch.setattr(train.sys, "stderr", SimpleNamespace(write=broken, flush=broken))
    monkeypatch.setattr(train.os, "_exit", exits := Mock())
    train._train_together(LoadedConfig(Config(), {}))
    exits.assert_called_once_with(141)


def test_the_configuration_of_a_run_elsewhere_does_not_train_another(tmp_path, monkeypatch, capsys):
    """A run that was copied or moved names the old place: training there isn't going on with the run that is named."""
    monkeypatch.setattr(train, "_train", began := Mock(return_value=0))
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "my copy"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "config.yaml").write_text("run: {dir: runs/a}\n")
    assert main(["train", "my copy/config.yaml", "--training.steps", "2"]) == 2
    assert "names another directory, runs/a" in (error := capsys.readouterr().err)
    assert "--run.dir 'my copy' to go on with the run here" in error
    began.assert_not_called()
    assert main(["train", "my copy/config.yaml", "--run.dir", "my copy"]) == 0
    assert main(["train", "my copy/config.yaml", "--run.dir", "runs/b"]) == 0
    (copy / "config.yaml").write_text(f"run: {{dir: '{copy}'}}\n")
    assert main(["train", "my copy/config.yaml"]) == 0
    assert began.call_count == 3
