"""Several processes, one for each host of a pod: how they find each other, and how they agree."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dreamer_jax.errors import UserError

HEARTBEAT_SECONDS = 30
"""A process that was silent for this long is given up, and with it the job."""


@dataclass(frozen=True)
class Processes:
    """Who takes part, as flags or environment say it.

    Attributes:
        coordinator: HOST:PORT of process 0.
        count: processes in all.
        index: this one, from 0.
    """

    coordinator: str
    count: int
    index: int


def start_processes(named: Processes | None = None) -> None:
    """Join the other processes of the job; does nothing for a job of one process. Before any other use of jax.

    Args:
        named: what the flags say. Otherwise JAX_COORDINATOR_ADDRESS with DREAMER_PROCESSES and DREAMER_PROCESS;
            otherwise SLURM, a TPU VM or GKE, as jax finds them.

    Raises:
        UserError: the settings are incomplete, or the others can't be reached.
    """
    if jax.distributed.is_initialized():
        return
    named = named or _named_by_environment()
    if named is not None and named.count == 1:
        return
    if named is None and not _cluster_of_several():
        return
    try:
        if named is None:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        else:
            jax.distributed.initialize(
                named.coordinator,
                named.count,
                named.index,
                cluster_detection_method="deactivate",
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of this job can't find each other: {error}. Name them with --coordinator HOST:PORT "
            "--processes N --process I, or set TPU_SKIP_MDS_QUERY=1 where there is only one"
        ) from error


def is_primary() -> bool:
    """Whether this process writes the logs: exactly one of a job does."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Return when every process has come here; `name` must be the same for all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def largest(value: int) -> int:
    """The largest of the values that the processes bring; all of them must call this at the same point."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def others_than_the_first(text: str) -> list[int]:
    """The processes that bring another text than process 0 does; all of them must call this at the same point."""
    if jax.process_count() == 1:
        return []
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    return np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()


def place_rows(batch: dict[str, np.ndarray], rows: range, total: int, sharding: jax.sharding.NamedSharding) -> Any:
    """A global batch [B, ...] of which this process brings the rows its devices hold.

    Args:
        batch: entries [len(rows), ...].
        rows: which of the global rows these are; see `rows_of_devices`.
        total: B.
        sharding: of the entries, over their first axis.
    """

    def place(values: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(total)
            return values[start - rows.start : stop - rows.start]

        return jax.make_array_from_callback((total, *values.shape[1:]), sharding, part)

    return {name: place(values) for name, values in batch.items()}


def rows_of_devices(total: int, sharding: jax.sharding.NamedSharding) -> range:
    """The smallest range of the B global rows that covers what this process's devices hold."""
    parts = [index[0].indices(total) for index in sharding.addressable_devices_indices_map((total,)).values()]  # type: ignore[index]
    return range(min(start for start, _, _ in parts), max(stop for _, stop, _ in parts))


def _named_by_environment() -> Processes | None:
    names = ("JAX_COORDINATOR_ADDRESS", "DREAMER_PROCESSES", "DREAMER_PROCESS")
    values = [os.environ.get(name) for name in names]
    if values[1] is None and values[2] is None:
        return None
    missing = [name for name, value in zip(names, values, strict=True) if not value]
    if missing:
        raise UserError(f"several processes: the environment variable {', '.join(missing)} is missing")
    return named_processes(*map(str, values))


def named_processes(coordinator: str, count: str, index: str) -> Processes:
    """The three words that name a process, checked.

    Raises:
        UserError: they aren't HOST:PORT and two fitting numbers.
    """
    if ":" not in coordinator:
        raise UserError(f"the coordinator '{coordinator}' is not HOST:PORT")
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise UserError(f"process {index} of {count}: the processes are numbered from 0 to their number - 1")
    return Processes(coordinator, int(count), int(index))


def _cluster_of_several() -> bool:
    """Whether the environment is that of a SLURM step or a TPU slice, of more than one host where that can be told."""
    if "SLURM_PROCID" in os.environ and "SLURM_STEP_NODELIST" in os.environ:
        return int(os.environ.get("SLURM_NTASKS", "1")) > 1
    if int(os.environ.get("MEGASCALE_NUM_SLICES", "1")) > 1:
        return True
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        return "," in hosts
    # jax has set this where it sees no TPU chip; a TPU VM's metadata name the hosts, be it only one.
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] not in ("", "tpu")
    return "TPU_SKIP_MDS_QUERY" not in os.environ and not on_cpu and importlib.util.find_spec("libtpu") is not None
