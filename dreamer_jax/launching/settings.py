"""What a launch needs to know: one frozen dataclass, read from a TOML file and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamer_jax.errors import UserError
from dreamer_jax.launching.slices import Slice, slice_of


@dataclass(frozen=True)
class Settings:
    """A run in the cloud; the same for TPU VMs (`launch/tpu`) and for GKE (`launch/gke/jobset`)."""

    name: str
    """Name of the run and of every resource that is made for it."""
    tpu: str
    """Accelerator type, e.g. v4-32, v5litepod-16 (or v5e-16), v5p-128."""
    config: str
    """Configuration of the run: a name of `dreamer config list`, or a path in the checkout, below dreamer_jax."""
    run_dir: str
    """Where the run lives: a folder in a bucket, gs://BUCKET/FOLDER, because machines come and go."""
    zone: str = ""
    """Zone of the TPU, e.g. us-east5-a."""
    project: str = ""
    """Google Cloud project; empty: gcloud's own."""
    spot: bool = False
    """Spot machines: cheaper, and preempted at any time."""
    options: tuple[str, ...] = ()
    """Further words for `dreamer train`."""
    prepare: str = ""
    """Shell command run in the checkout on every worker after installing, e.g. to copy data from a bucket."""
    queue_hours: int = 24
    """Hours that a request may wait in the queue; after that it is withdrawn instead of starting unattended."""
    failures: int = 3
    """Attempts in a row that may end within ten minutes before the launcher gives up."""
    network: str = ""
    """VPC network of the TPU; empty: default."""
    subnetwork: str = ""
    """Subnetwork of the TPU; empty: the network's own of the region."""
    service_account: str = ""
    """Service account of the machines, which must write to the bucket; empty: Compute Engine's default."""
    runtime_version: str = ""
    """Software image of the TPU VM; empty: the one that fits the accelerator type."""
    image: str = ""
    """GKE: container image made with launch/gke/Dockerfile."""
    kubernetes_account: str = "default"
    """GKE: Kubernetes service account with access to the bucket."""
    restarts: int = 100
    """GKE: how often the workers may be started again."""

    @property
    def slice(self) -> Slice:
        """The accelerator type, looked up."""
        return slice_of(self.tpu)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]+/.+", self.run_dir):
            raise UserError(
                f"run_dir '{self.run_dir}' is not gs://BUCKET/FOLDER (a bucket's name: 3 to 63 characters); "
                "a run in a machine's own folder is lost with it"
            )
        if any(word.partition("=")[0] == "--run.dir" for word in self.options):
            raise UserError("give the run directory as run_dir (--run-dir), not among the words for `dreamer train`")
        for field in ("queue_hours", "failures", "restarts"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} is {getattr(self, field)}; it must be at least 1")
        slice_of(self.tpu)

    def training_words(self) -> list[str]:
        """The words of `dreamer` that every worker runs."""
        return ["train", self.config, "--run.dir", self.run_dir, *self.options]


def check_name(name: str) -> None:
    """That a run may be called so.

    Raises:
        UserError: it may not.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(f"the name '{name}' won't do: at most 40 lower-case letters, digits and dashes, a letter first")


def read_settings(path: Path | None, given: dict[str, Any]) -> Settings:
    """Settings from a TOML file, with those of the command line in place of its own; words for `dreamer train` come
    behind the file's, of which those of the same key are left out.

    Args:
        path: TOML file with the fields of `Settings` as keys, or None.
        given: fields from the command line; None stands for "not given".

    Raises:
        UserError: for a file that can't be read, unknown or missing keys, or values of a wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"can't read the settings {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not TOML: {error}") from None
    written = values.get("options")
    values |= {key: value for key, value in given.items() if value is not None}
    if given.get("options") and isinstance(written, list):
        values["options"] = behind([str(word) for word in written], given["options"])
    return settings_from(values, str(path) if path else "the command line")


def behind(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Words `--key value` or `--key=value`, those of keys that are given now in place of the earlier ones."""
    keys = {word.partition("=")[0] for word in given if word.startswith("--")}
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word.partition("=")[0] not in keys
        kept += [word] if keeps else []
    return [*kept, *given]


def settings_from(values: dict[str, Any], where: str) -> Settings:
    """`Settings` of plain values, checked; `where` says in messages what was read."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    for key, value in values.items():
        if key not in fields:
            alike = difflib.get_close_matches(key, fields, n=1)
            raise UserError(f"{where}: unknown setting '{key}'" + (f"; did you mean '{alike[0]}'?" if alike else ""))
        wanted = {"bool": bool, "int": int, "str": str}.get(str(fields[key].type), (list, tuple))
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise UserError(f"{where}: {key} is {value!r}, which is not of type {fields[key].type}")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]
    if missing:
        names = ", ".join(missing)
        raise UserError(f"{where}: missing {names}; give each as --{missing[0].replace('_', '-')} VALUE or in a file")
    if "options" in values:
        values = values | {"options": tuple(str(word) for word in values["options"])}
    return Settings(**values)
