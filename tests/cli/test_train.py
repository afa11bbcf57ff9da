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
