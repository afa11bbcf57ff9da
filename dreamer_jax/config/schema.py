"""The one schema of a configuration: frozen dataclasses whose docstrings are the command line's help.

Touches nothing but the standard library, so that every room may import it and `dreamer --help` stays quick.
Letters in brackets are SPEC.md's: L depth, h hidden size, V vocabulary, E experts, F expert size, k active
experts, d head size, r router size, B batch, S sequence.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from dreamer_jax.config.errors import ConfigError

Variant = Literal["LA", "LA+DA", "DR", "DR+DA"]
Mixing = Literal["sequential", "parallel_attention", "parallel"]
Implementation = Literal["auto", "xla", "pallas"]
Remat = Literal["full", "attention", "none"]


@dataclass(frozen=True)
class ModelConfig:
    """What is computed (the paper's section 3 and Table 3)."""

    variant: Variant = "DR+DA"
    """LA: distinct layers. DR: one layer applied at every depth. +DA: with depth attention."""
    mixing: Mixing = "parallel_attention"
    """How the attentions are combined: Eq. 4, Eq. 5 (the paper's) or Eq. 6."""
    depth: int = 8
    """L: depths a token passes. In DR also the number of experts of each attention MoE."""
    hidden_size: int = 128
    """h: size of the residual stream."""
    vocab_size: int = 512
    """V: rows of the embedding and of the output head; at least the tokenizer's size."""
    sa_heads: int = 4
    """Query heads of the sequence attention."""
    sa_kv_heads: int = 2
    """Key/value heads of the sequence attention; divides sa_heads."""
    sa_head_size: int = 32
    """d of the sequence attention; even."""
    sa_rope_base: float = 10_000.0
    """RoPE base over the positions of the sequence."""
    da_heads: int = 1
    """Query heads of the depth attention."""
    da_kv_heads: int = 1
    """Key/value heads of the depth attention; divides da_heads."""
    da_head_size: int = 32
    """d of the depth attention; divisible by 4 (two RoPE halves)."""
    depth_rope_base: float = 500.0
    """RoPE base over the depths, in depth attention and in every router."""
    num_experts: int = 64
    """E: experts of the expert attention (of each layer in LA)."""
    experts_per_token: int = 4
    """k: experts a token selects."""
    expert_size: int = 64
    """F: intermediate size of an expert."""
    router_size: int = 32
    """r: size of the routers' queries and keys; divisible by 4."""
    expert_bias_rate: float = 1e-3
    """Update rate of the balancing bias of the expert attention (Eq. 3)."""
    attention_bias_rate: float = 1e-2
    """Update rate of the balancing biases of the attention MoEs (Eq. 3)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision; weights, routing, softmax, norm statistics and loss are always float32."""
    implementation: Implementation = "auto"
    """Backend of the attentions and experts; auto takes the fastest of the platform."""

    @property
    def recurrent(self) -> bool:
        """Whether one layer is shared by all depths (DR)."""
        return self.variant.startswith("DR")

    @property
    def depth_attention(self) -> bool:
        """Whether depth attention is part of the mixture."""
        return self.variant.endswith("+DA")

    def __post_init__(self) -> None:
        _require_positive(self, "model")
        _require(
            self.sa_heads % self.sa_kv_heads == 0,
            "model.sa_kv_heads",
            f"{self.sa_kv_heads} does not divide model.sa_heads {self.sa_heads}",
        )
        _require(
            self.da_heads % self.da_kv_heads == 0,
            "model.da_kv_heads",
            f"{self.da_kv_heads} does not divide model.da_heads {self.da_heads}",
        )
        _require(
            self.sa_head_size % 2 == 0,
            "model.sa_head_size",
            f"{self.sa_head_size} is odd; RoPE rotates pairs, so use an even number",
        )
        for name in ("da_head_size", "router_size"):
            value = getattr(self, name)
            _require(
                value % 4 == 0,
                f"model.{name}",
                f"{value} is not divisible by 4; depth RoPE rotates pairs in two halves",
            )
        _require(
            self.experts_per_token <= self.num_experts,
            "model.experts_per_token",
            f"{self.experts_per_token} is more than model.num_experts {self.num_experts}",
        )


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes rows of tokens."""

    source: Literal["task", "jsonl", "prepared"] = "task"
    """task: a built-in generator of reasoning problems. jsonl: a file with one JSON object a line. prepared: a
    directory made by `dreamer data prepare`."""
    task: Literal["boolean", "arithmetic", "reachability"] = "boolean"
    """Built-in task: nested boolean expressions, chained modular arithmetic, or graph reachability."""
    difficulty: int = 4
    """Hardest instance of the task seen in training (nesting, operations or hops); drawn from 1 to this."""
    path: str = ""
    """Training file of source jsonl, or directory of source prepared."""
    heldout_path: str = ""
    """Held-out file or directory; empty: the last heldout_records records of a shuffle of path are kept out of
    training."""
    heldout_records: int = 256
    """Held-out records: of the file when heldout_path is empty, or instances of the task."""
    prompt: str = "{question}\n"
    """Text before the answer; {name} stands for a field of the record."""
    completion: str = "{answer}"
    """The answer; {name} stands for a field. For plain text: prompt "" and completion "{text}"."""
    loss: Literal["all", "answer"] = "all"
    """Tokens that are trained on: all, or those of the completion (and the end of text) only."""
    mixture: str = ""
    """Source prepared: a mixture file whose weights, epochs or tokens are used instead of those in the directory."""
    tokenizer: str = "bytes"
    """bytes, the path of a tiktoken rank file with the Llama-3 tokenizer, or of a Hugging Face tokenizer.json."""
    sequence_length: int = 256
    """S: tokens in a row; documents are packed into rows and don't see each other."""
    packing: Literal["best_fit", "concat"] = "best_fit"
    """best_fit: documents stay whole, rows are nearly full. concat: documents are laid end to end and cut at the
    ends of rows, which are full."""
    on_error: Literal["stop", "skip"] = "stop"
    """A broken record stops with its number, or is counted and skipped."""

    def __post_init__(self) -> None:
        _require_positive(self, "data", allow_zero=("heldout_records",))
        if self.source != "task":
            needed = {"jsonl": "a file, e.g. --data.path train.jsonl", "prepared": "a directory, e.g. --data.path data"}
            _require(bool(self.path), "data.path", f"is empty; data.source {self.source} needs {needed[self.source]}")
        _require(
            self.source == "prepared" or not self.mixture,
            "data.mixture",
            f"only prepared data are mixed, and data.source is {self.source}",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """The recipe of the paper's Table 3 by default."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 32
    """B: rows of data.sequence_length tokens in one optimizer step, over all devices."""
    microbatches: int = 1
    """Parts a batch is computed in, one after the other (gradient accumulation)."""
    learning_rate: float = 4e-4
    """Learning rate after the warm-up; constant from there."""
    warmup_steps: int = 500
    """Steps of linear warm-up from zero."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.999
    """AdamW: decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 1e-3
    """AdamW: decoupled weight decay, on matrices only."""
    clip_norm: float = 0.5
    """Largest global norm of the gradient."""
    remat: Remat = "full"
    """What every depth keeps for the backward pass. full: the residual stream alone; the layer is computed again (least
    memory). attention: also projections, attention outputs and the experts' gate and up; norms, routing and activations
    are computed again. none: everything; fastest where memory allows."""
    gradient_depths: int = 0
    """Depths whose contributions to the expert weight gradients are kept aside and added in one pass, where a kernel
    does it: less memory traffic, more memory. 1 adds at every depth, with the least memory. 0 chooses: as many, up to
    8, as fit an eighth of the chip's memory. The sums are float32 always."""
    log_every: int = 10
    """Steps between two lines of metrics."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "training", allow_zero=("warmup_steps", "weight_decay", "beta1", "beta2", "gradient_depths")
        )
        _require(
            self.batch_size % self.microbatches == 0,
            "training.microbatches",
            f"{self.microbatches} does not divide training.batch_size {self.batch_size}",
        )
        for name in ("beta1", "beta2"):
            _require(getattr(self, name) < 1, f"training.{name}", "must be below 1")


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are used. The product of all three must be the number of devices."""

    slices: int = 1
    """TPU slices, connected by the data-centre network; each has a copy of the state's layout."""
    data: tuple[int, ...] = (1,)
    """Devices along each axis of a slice's torus that share a batch, such as [4, 4, 4] on a v5p-128, or one number.
    Weights are gathered and gradients scattered along one axis after the other, two rings of 4 at once."""
    expert: int = 1
    """Devices, neighbours on the last axis of the torus, that divide the experts among them; each also takes rows of
    the batch."""
    exchange: Literal["gather", "ragged"] = "gather"
    """How tokens reach the experts of other devices. gather: all tokens of the group visit all its devices; best for
    groups up to model.experts_per_token. ragged: each goes where its experts are, by a TPU's ragged all-to-all."""

    @property
    def size(self) -> int:
        """Devices in all; the rows of a batch are divided over all of them."""
        return math.prod((self.slices, *self.data, self.expert))

    def __post_init__(self) -> None:
        _require_positive(self, "mesh")
        _require(bool(self.data) and min(self.data) > 0, "mesh.data", f"{self.data}: every axis has one device or more")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and what is kept; see docs/checkpoints.md."""

    every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints that are kept; with 1 there is none to fall back to if it is damaged."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this, forever (0: none)."""
    allow: str = ""
    """Changes of a run's configuration to go on with: learning_rate, depth, or both with a comma between them."""

    def __post_init__(self) -> None:
        _require_positive(self, "checkpoint", allow_zero=("keep_every",))
        for name in self.allowed:
            _require(
                name in ALLOWED_CHANGES,
                "checkpoint.allow",
                f"'{name}' is not a change that can be allowed; choose from {', '.join(ALLOWED_CHANGES)}",
            )

    @property
    def allowed(self) -> tuple[str, ...]:
        """The names in `allow`."""
        return tuple(name.strip() for name in self.allow.split(",") if name.strip())


ALLOWED_CHANGES = ("learning_rate", "depth")
"""What `checkpoint.allow` can name."""


@dataclass(frozen=True)
class SafetyConfig:
    """What a run does when its numbers or its machines fail."""

    skipped_in_a_row: int = 10
    """Steps in a row without a finite loss and gradient after which the run goes back to its last good checkpoint."""
    rollbacks: int = 3
    """How often a run goes back, each time to other data, before it stops."""
    stuck_seconds: int = 900
    """A process that has finished no step, evaluation or checkpoint for this long ends itself (compiling apart)."""

    def __post_init__(self) -> None:
        _require_positive(self, "safety", allow_zero=("rollbacks",))


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out loss, perplexity and exact match during training, and benchmarks."""

    every: int = 500
    """Steps between evaluations; the last step is always evaluated."""
    harder: int = 0
    """Tasks: also evaluate instances of exactly this difficulty (0: don't)."""
    tasks: str = ""
    """Benchmarks of `dreamer eval` to go through as well, commas between them, such as gsm8k,mathqa (empty: none)."""
    tasks_every: int = 0
    """Steps between evaluations of the benchmarks (0: as often as `every`); after the last step in any case."""
    data: str = "data"
    """Folder of the benchmarks' files, see docs/evaluation.md."""
    shots: int = 0
    """Examples before each question of a benchmark."""
    limit: int = 200
    """Questions of each benchmark, its first ones (0: all)."""

    def __post_init__(self) -> None:
        _require_positive(self, "evaluation", allow_zero=("harder", "tasks_every", "shots", "limit"))


@dataclass(frozen=True)
class AnalysisConfig:
    """Statistics of depth attention, experts and residual stream during training; see docs/analysis.md."""

    every: int = 0
    """Steps between samples of the statistics that `dreamer analyze` collects, of one row a device (0: none)."""

    def __post_init__(self) -> None:
        _require_positive(self, "analysis", allow_zero=("every",))


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs/dreamer"
    """Run directory: config, metrics, checkpoints, figures. An existing one is resumed."""
    seed: int = 0
    """Seed of initialisation and data order; two runs with one seed give identical metrics."""

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "run.seed", f"{self.seed} is negative")
        _require(bool(self.dir), "run.dir", "is empty; name a directory, e.g. --run.dir runs/first")


@dataclass(frozen=True)
class Config:
    """A whole run. Precedence: defaults < YAML (and its `base:`) < command line."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        rows = self.training.batch_size // self.training.microbatches
        _require(
            rows % self.mesh.size == 0,
            "mesh.data",
            f"{self.mesh.size} devices do not divide the {rows} rows of a microbatch "
            "(training.batch_size / training.microbatches)",
        )
        _require(
            self.mesh.expert <= self.model.num_experts,
            "mesh.expert",
            f"{self.mesh.expert} devices can't divide the {self.model.num_experts} experts of model.num_experts",
        )


def _require(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {problem}", key=key)


def _require_positive(section: object, prefix: str, allow_zero: tuple[str, ...] = ()) -> None:
    """Every number of a section is positive, but for the named ones, which may be zero."""
    for f in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        smallest_ok = value >= 0 if f.name in allow_zero else value > 0
        _require(
            smallest_ok,
            f"{prefix}.{f.name}",
            f"{value} is too small; it must be " + ("zero or more" if f.name in allow_zero else "more than zero"),
        )
