"""The sections of a configuration: frozen dataclasses whose docstrings are the command line's help.

The section `model` is the dataclass of the model's family, see models/. Touches nothing but the standard library, so
that every room may import it and `dreamer --help` stays quick. Letters in brackets: L depth, h hidden
size, V vocabulary, E experts, F expert size, k active experts, d head size, r router size, B batch, S sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dreamer_jax.config.models.dreamer import DreamerConfig
from dreamer_jax.config.puzzle import PuzzleConfig
from dreamer_jax.config.recurrence import STEPPED_TASKS, RecurrenceConfig
from dreamer_jax.config.values import ModelConfig, Remat, experts_of, knowledge_of, require, require_positive


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes rows of tokens."""

    source: Literal["task", "jsonl", "prepared", "puzzle"] = "task"
    """task: a built-in generator of reasoning problems. jsonl: a file with one JSON object a line. prepared: a
    directory made by `dreamer data prepare`. puzzle: a classification task of the section data.puzzle."""
    task: Literal["boolean", "arithmetic", "reachability", "induction", "addition", "problems", "permutations"] = (
        "boolean"
    )
    """Built-in task: nested boolean expressions, chained modular arithmetic, graph reachability, hops of induction
    heads, sums of many numbers, grade-school problems told in sentences, or products of permutations."""
    difficulty: int = 4
    """Hardest instance of the task seen in training (nesting, operations, hops, steps or products); drawn from 1 to
    this."""
    path: str = ""
    """Training file of source jsonl, or directory of source prepared."""
    heldout_path: str = ""
    """Held-out file or directory; empty: the last heldout_records records of a shuffle of path are kept out of
    training."""
    heldout_records: int = 256
    """Held-out records: of the file when heldout_path is empty, or instances of the task or puzzle."""
    prompt: str = "{question}\n"
    """Text before the answer; {name} stands for a field of the record."""
    completion: str = "{answer}"
    """The answer; {name} stands for a field. For plain text: prompt "" and completion "{text}"."""
    loss: Literal["all", "answer"] = "all"
    """Tokens that are trained on: all, or those of the completion (and the end of text) only."""
    mixture: str = ""
    """Source prepared: a mixture, file or name, whose weights, epochs or tokens replace those in the directory."""
    knowledge: str = ""
    """With model.pa_source texts: the file of their embeddings that `dreamer embed` made. A new run takes them over
    into its checkpoints, and doesn't read the file again."""
    tokenizer: str = "bytes"
    """bytes, the path of a tiktoken rank file with the Llama-3 tokenizer, or of a Hugging Face tokenizer.json."""
    sequence_length: int = 256
    """S: tokens in a row; documents are packed into rows and don't see each other."""
    copies: int = 1
    """Times that each token stands in its row; the last one is asked for the next token (width in place of depth,
    arXiv:2510.14961). Runs with more than one are evaluated by their loss and don't generate."""
    packing: Literal["best_fit", "concat"] = "best_fit"
    """best_fit: documents stay whole, rows are nearly full. concat: documents are laid end to end and cut at the
    ends of rows, which are full."""
    on_error: Literal["stop", "skip"] = "stop"
    """A broken record stops with its number, or is counted and skipped."""
    puzzle: PuzzleConfig = field(default_factory=PuzzleConfig)
    """The task of source puzzle."""

    def __post_init__(self) -> None:
        require_positive(self, "data", allow_zero=("heldout_records",))
        if self.source in ("jsonl", "prepared"):
            needed = {"jsonl": "a file, e.g. --data.path train.jsonl", "prepared": "a directory, e.g. --data.path data"}
            require(bool(self.path), "data.path", f"is empty; data.source {self.source} needs {needed[self.source]}")
        require(
            self.source in ("jsonl", "prepared") or not (self.path or self.heldout_path),
            "data.path",
            f"{self.path or self.heldout_path}: data.source {self.source} reads no files; set data.source to jsonl or "
            "prepared, or leave it out",
        )
        require(
            self.source == "prepared" or not self.mixture,
            "data.mixture",
            f"only prepared data are mixed, and data.source is {self.source}",
        )
        require(
            self.copies == 1 or self.source != "puzzle",
            "data.copies",
            f"{self.copies}: puzzles are graphs and sentences, whose parts stand once; leave it at 1",
        )

    @property
    def places(self) -> int:
        """Of a row: as many as tokens, but for copies."""
        return self.sequence_length * self.copies


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
    """Learning rate after the warm-up."""
    warmup_steps: int = 500
    """Steps of linear warm-up from zero."""
    schedule: Literal["constant", "cosine", "trapezoid"] = "constant"
    """What the learning rate does after the warm-up. constant: nothing. cosine: falls along half a wave until the last
    step. trapezoid: stays, and falls linearly over the last cooldown_steps."""
    cooldown_steps: int = 0
    """Steps of the linear descent at the end, for the schedule trapezoid."""
    learning_rate_floor: float = 0.0
    """Share of learning_rate that cosine and trapezoid end at."""
    initial_weights: str = ""
    """A run, or a checkpoint in it, whose weights a new run starts from instead of fresh ones, with a fresh optimizer;
    its model must have the same sizes, its data may be other."""
    trainable: str = ""
    """What is trained: roles (matrix, embedding, norm, ...) and parts of the model by name (such as head, or
    layer.expert_attention), commas between them (empty: everything). The rest stays as it starts; where no
    router key is trained, so do the biases that balance experts."""
    optimizer: Literal["adamw", "adam_atan2"] = "adamw"
    """The update of a step. adam_atan2 is Huginn's: the arctangent of the moments' quotient in place of the quotient,
    without an epsilon, and a smaller step for an array whose gradient has suddenly grown."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 1e-3
    """Decoupled weight decay, on matrices only; the learning rate multiplies it."""
    clip_norm: float = 0.5
    """Largest global norm of the gradient."""
    remat: Remat = "full"
    """What every depth keeps for the backward pass. full: the residual stream alone; the layer is computed again (least
    memory). attention: also projections, attention outputs and, without kernels, the experts' gate and up; norms,
    routing and activations are computed again, and gate and up in the backward kernel. none: everything; fastest where
    memory allows."""
    looping: float = 0.0
    """Weight of a loss that asks layers of their own to be alike, 1 less the mean cosine between the matrices of layers
    that lie looping_layers apart: as if those had been looped (Saunshi et al., 2025)."""
    looping_layers: int = 1
    """k, the layers of such a loop; model.depth is a multiple of it."""
    gradient_depths: int = 0
    """Depths whose contributions to the weight gradients of experts are kept aside and added in one pass, where a
    kernel does it: less memory traffic, more memory. Fewer where routing is so uneven that there is no room for
    another, and for attention MoEs with so many tokens that it would shorten nothing. 1 adds at every depth, with the
    least memory. 0 chooses: as many, up to 8, as fit an eighth of the chip's memory, or a 32nd for a map of an
    attention MoE. The sums are float32 always."""
    scatter: Literal["step", "microbatch"] = "step"
    """When gradients are summed over the devices and divided among them. step: once, after the last microbatch; until
    then every device holds the float32 sums of all of them. microbatch: after each; less memory, more on the wires."""
    scatter_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients travel in between devices. bfloat16: each device's are rounded once along an axis of the mesh, and
    summed in float32 where they arrive; half the bytes on the wires. Axes of more than 4 devices keep float32."""
    balance: Literal["step", "microbatch"] = "step"
    """When balancing biases of routers move, by what was counted since (Eq. 3). step: once, after the last microbatch.
    microbatch: after each, so that its routing is the next one's; for runs of few steps."""
    log_every: int = 10
    """Steps between two lines of metrics."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "training",
            allow_zero=(
                *("warmup_steps", "cooldown_steps", "learning_rate_floor"),
                *("weight_decay", "beta1", "beta2", "gradient_depths", "looping"),
            ),
        )
        require(self.learning_rate_floor <= 1, "training.learning_rate_floor", "is a share, at most 1")
        require(
            self.schedule != "constant" or not self.learning_rate_floor,
            "training.learning_rate_floor",
            f"{self.learning_rate_floor}: training.schedule constant never falls; set it to cosine or trapezoid",
        )
        require(
            self.schedule == "trapezoid" or not self.cooldown_steps,
            "training.cooldown_steps",
            f"only training.schedule trapezoid has a descent of so many steps, and it is {self.schedule}",
        )
        require(
            self.schedule != "trapezoid" or self.warmup_steps + self.cooldown_steps <= self.steps,
            "training.cooldown_steps",
            f"training.warmup_steps {self.warmup_steps} and {self.cooldown_steps} of cool-down are more than "
            f"training.steps {self.steps}",
        )
        require(
            self.batch_size % self.microbatches == 0,
            "training.microbatches",
            f"{self.microbatches} does not divide training.batch_size {self.batch_size}",
        )
        for name in ("beta1", "beta2"):
            require(getattr(self, name) < 1, f"training.{name}", "must be below 1")


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are used. The product of all three is the number of devices, or 1: the first only."""

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
        require_positive(self, "mesh")
        require(bool(self.data) and min(self.data) > 0, "mesh.data", f"{self.data}: every axis has one device or more")


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
        require_positive(self, "checkpoint", allow_zero=("keep_every",))
        for name in self.allowed:
            require(
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
        require_positive(self, "safety", allow_zero=("rollbacks",))


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out loss, perplexity and exact match during training, and benchmarks."""

    every: int = 500
    """Steps between evaluations; the last step is always evaluated."""
    harder: int = 0
    """Tasks and puzzles: also evaluate instances of exactly this difficulty (0: don't)."""
    tasks: str = ""
    """Benchmarks of `dreamer eval` to go through as well, commas between them, such as gsm8k,mathqa (empty: none)."""
    tasks_every: int = 0
    """Steps between evaluations of the benchmarks (0: as often as `every`); after the last step in any case."""
    data: str = "data"
    """Folder of the benchmarks' files, see docs/evaluation.md."""
    shots: int = 0
    """Examples before each question of a benchmark."""
    limit: int = 200
    """Questions of each benchmark, the first of every subject (0: all)."""

    def __post_init__(self) -> None:
        require_positive(self, "evaluation", allow_zero=("harder", "tasks_every", "shots", "limit"))


@dataclass(frozen=True)
class AnalysisConfig:
    """Statistics of depth attention, experts and residual stream during training; see docs/analysis.md."""

    every: int = 0
    """Steps between samples of the statistics that `dreamer analyze` collects, of one row a device (0: none)."""

    def __post_init__(self) -> None:
        require_positive(self, "analysis", allow_zero=("every",))


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs/dreamer"
    """Run directory: config, metrics, checkpoints, figures. An existing one is resumed."""
    seed: int = 0
    """Seed of initialisation and data order; two runs with one seed give identical metrics."""

    def __post_init__(self) -> None:
        require(self.seed >= 0, "run.seed", f"{self.seed} is negative")
        require(bool(self.dir), "run.dir", "is empty; name a directory, e.g. --run.dir runs/first")


@dataclass(frozen=True)
class Config:
    """A whole run. Precedence: defaults < YAML (and its `base:`) < command line."""

    model: ModelConfig = field(default_factory=DreamerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        rows = self.training.batch_size // self.training.microbatches
        require(
            rows % self.mesh.size == 0,
            "mesh.data",
            f"{self.mesh.size} devices do not divide the {rows} rows of a microbatch (mesh.slices x mesh.data x "
            "mesh.expert; training.batch_size / training.microbatches)",
        )
        data = self.data
        for key, value, fits in (
            ("source", data.source, data.source == "task"),
            ("task", data.task, data.task in STEPPED_TASKS),
            ("tokenizer", data.tokenizer, data.tokenizer == "bytes"),
            ("copies", data.copies, data.copies == 1),
        ):
            require(
                not self.recurrence.steps or fits,
                "recurrence.steps",
                f"needs the tasks {', '.join(STEPPED_TASKS)} as bytes, and data.{key} is {value}; set it to 0",
            )
        require(
            data.copies == 1 or not self.evaluation.tasks,
            "evaluation.tasks",
            f"models trained with data.copies {data.copies} don't go through benchmarks; leave it empty",
        )
        texts = knowledge_of(self.model)
        require(
            texts is None or bool(self.data.knowledge),
            "data.knowledge",
            "is empty; a model with model.pa_source texts needs a file of `dreamer embed`, e.g. "
            "--data.knowledge knowledge.safetensors",
        )
        require(
            texts is not None or not self.data.knowledge,
            "data.knowledge",
            "this model attends to no texts; set model.pa_source to texts, or leave the file out",
        )
        experts = experts_of(self.model)
        require(
            experts > 0 or self.mesh.expert == 1,
            "mesh.expert",
            f"{self.mesh.expert} devices have nothing to divide: models of family {self.model.family} have no experts "
            "that could be; leave it at 1",
        )
        of = "model.num_experts" if hasattr(self.model, "num_experts") else f"family {self.model.family}"
        require(
            self.mesh.expert <= max(experts, 1),
            "mesh.expert",
            f"{self.mesh.expert} devices can't divide the {experts} experts of {of}",
        )
