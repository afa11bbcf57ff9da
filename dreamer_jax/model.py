"""The front door for notebooks and scripts: a trained model as one object.

    import dreamer_jax

    model = dreamer_jax.load("runs/x")
    model.generate(["Question: "], max_tokens=64)[0].text
    model.logits([model.encode("Question: ")])              # [B, S, V]
    model.states([model.encode("Question: ")])              # [L+1, B, S, h]

docs/inference.md shows more of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dreamer_jax.config import Config
from dreamer_jax.config.models import give_working
from dreamer_jax.data.tokenizers import Tokenizer, load_tokenizer
from dreamer_jax.errors import UserError, whole
from dreamer_jax.families import Family, forward
from dreamer_jax.inference import (
    Engine,
    FoldedModel,
    LanguageModel,
    Sampler,
    Sampling,
    Scores,
    Text,
    fold,
    tokenizer_of,
)
from dreamer_jax.inference.embedding import embed
from dreamer_jax.inference.model import check_generates
from dreamer_jax.inference.text import Prompt
from dreamer_jax.runs.models import TrainedModel, changed, load_run


class Model:
    """A trained model; see `load`.

    Attributes:
        config: the configuration of its run; `config.model` has the sizes.
        family: what it is (dreamer_jax/families/contract.py).
        step: optimizer steps it was trained for.
        params: float32 parameters.
        model_state: its own, by collection, such as balancing biases.
    """

    def __init__(
        self,
        trained: TrainedModel,
        open_tokenizer: Callable[[], Tokenizer],
        mesh: Mesh | None = None,
        int8: bool = False,
    ):
        self.config: Config = trained.config
        self.family: Family = trained.family
        self.step, self.params, self.model_state = trained.step, trained.params, trained.model_state
        self._open_tokenizer, self._mesh, self._int8 = open_tokenizer, mesh, int8

    def __repr__(self) -> str:
        return f"<{self.family.headline()}, after {self.step} steps>"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one it was trained with.

        Raises:
            UserError: its file isn't where the run's configuration says, or is another one.
        """
        return self._open_tokenizer()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, begin-of-text first, as the documents of training begin."""
        return [self.tokenizer.bos, *self.tokenizer.encode(text)]

    def logits(self, tokens: Any, depth: int | None = None, initial_state: Any = None) -> jax.Array:
        """Logits of the token after each position, [B, S, V] float32.

        Args:
            tokens: [B, S] integers; see `encode`.
            depth: L; None for the trained one.
            initial_state: of a model that starts from a random state: that state, [B, S, h], or a number that
                multiplies the model's own draw (0: zeros). None: its own draw, which depends on the positions alone.
        Raises:
            UserError: rows of unequal lengths, tokens outside the vocabulary, an impossible depth, or a state that
                doesn't fit.
        """
        if not self.family.flags.generates:
            raise UserError(
                f"models of the family {self.config.model.family} answer puzzles, not every position; call "
                "dreamer_jax.families.puzzles.logits_by_depth with model.family, model.params and model.model_state"
            )
        tokens = self._tokens(tokens)
        start = self._start(initial_state, tokens)
        return _logits(self.family, self._depth(depth), self.params, self.model_state, tokens, start)

    def states(self, tokens: Any, depth: int | None = None, initial_state: Any = None) -> jax.Array:
        """The residual stream as it is, without the final norm: [L+1, B, S, h] in the compute precision.

        Entry 0 is before the first depth, entry l after depth l.

        Args:
            tokens, depth, initial_state: as of `logits`.
        """
        tokens = self._tokens(tokens)
        start = self._start(initial_state, tokens)
        return _states(self.family, self._depth(depth), self.params, self.model_state, tokens, start)

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        max_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] | str = (),
        depth: int | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 16,
    ) -> list[Text]:
        """Continue prompts; each result has `text`, `tokens`, `finish` and `mean_depth`.

        Args:
            prompts: texts, or lists of tokens, which are taken as they are.
            max_tokens: most tokens a text gets.
            temperature, top_k, top_p, min_p, seed: as of `inference.Sampling`; temperature 0 is greedy.
            stop: strings that end a text.
            depth: L; None for the trained one.
            sampler: as of `inference.Engine`; by default every token goes through all depths, or until it halts.
            batch_size: prompts computed at once.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        ends = [stop] if isinstance(stop, str) else stop
        return self.texts(depth, sampler, batch_size).generate(prompts, max_tokens, sampling, ends)

    def score(self, rows: Sequence[Prompt] | str, depth: int | None = None, batch_size: int = 16) -> list[Scores]:
        """Log-probabilities of every token of each row but its first, which for a text is begin-of-text.

        Args:
            rows: texts, or lists of tokens, of any lengths.
            depth: L; None for the trained one.
            batch_size: rows computed at once.

        Returns:
            `logprobs` and `greedy`, [n - 1] each, of every row of n tokens.
        """
        return self.texts(depth, batch_size=batch_size).score(rows)

    def embed(self, texts: Sequence[str] | str, depth: int | None = None, batch_size: int = 16) -> np.ndarray:
        """Embeddings [N, h] float32 of texts: the mean of what the head reads over the tokens of each but begin of
        text, with a mean square of 1. A text is cut off where a row of training ends.

        Args:
            texts: none of them empty.
            depth: L; None for the trained one.
            batch_size: texts computed at once.
        """
        if not self.family.flags.generates:
            raise UserError(f"models of the family {self.config.model.family} read puzzles, not texts")
        check_generates(self.config)
        wanted = [texts] if isinstance(texts, str) else texts
        if not all(isinstance(text, str) for text in wanted):
            raise UserError("embed: every text must be a str")
        rows = [self.encode(text)[: self.config.data.sequence_length] for text in wanted]
        if not rows or min(map(len, rows)) < 2:
            raise UserError("embed: there is no text, or an empty one")
        size = whole(batch_size, "batch_size", 1)
        return embed(self.family, self.params, self.model_state, rows, self._depth(depth), size)

    def texts(self, depth: int | None = None, sampler: Sampler | None = None, batch_size: int = 16) -> LanguageModel:
        """What `generate` and `score` use, which can also show texts while they grow (`stream`)."""
        return LanguageModel(Engine(self.folded(depth), sampler, self._mesh), self.tokenizer, batch_size=batch_size)

    def folded(self, depth: int | None = None) -> FoldedModel:
        """What engines compute with: weights in the compute precision, laid out for decoding.

        Args:
            depth: L; None for the trained one.
        """
        check_generates(self.config)
        return dataclasses.replace(self._folded, total_depth=self._depth(depth))

    @functools.cached_property
    def _folded(self) -> FoldedModel:
        return fold(self.config.model, self.params, self.model_state, int8=self._int8)

    def _depth(self, depth: int | None) -> int:
        return self.family.depth if depth is None else self.family.check_depth(depth)

    def _start(self, state: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        """What `forward` is told of the state of depth 0, [B, S, h] or a number."""
        if state is None:
            return {}
        if not self.family.flags.random:
            raise UserError(f"{self.config.model.family} starts from the embedding and takes no initial_state")
        array, wanted = np.asarray(state), (*tokens.shape, self.config.model.hidden_size)
        real = np.issubdtype(array.dtype, np.number) and not np.issubdtype(array.dtype, np.complexfloating)
        if array.shape not in ((), wanted) or not real or not np.isfinite(array).all():
            found = f"not {list(array.shape)} {array.dtype}" if real else f"not {array.dtype}"
            raise UserError(f"initial_state must be a finite number or [B, S, h] = {list(wanted)}, {found}")
        if array.ndim:
            return {"initial_state": jnp.asarray(array, self.config.model.dtype)}
        return {"state_scale": jnp.asarray(array, jnp.float32)}

    def _tokens(self, tokens: Any) -> jax.Array:
        """[B, S] int32."""
        try:
            array = np.asarray(tokens)
        except ValueError:
            array = np.empty(0)
        if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise UserError(
                "tokens must be [B, S] integers: rows of one length, such as [[1, 2, 3]]; "
                "score() and generate() take rows of any lengths"
            )
        vocabulary = self.config.model.vocab_size
        if array.min() < 0 or array.max() >= vocabulary:
            raise UserError(f"a token is outside the model's vocabulary of {vocabulary}")
        return jnp.asarray(array, jnp.int32)


def load(
    path: str | Path,
    *,
    step: int | None = None,
    average: int = 1,
    dtype: str | None = None,
    cache: str | None = None,
    knowledge: str | None = None,
    tokenizer: str | None = None,
    mesh: Mesh | None = None,
    family_module: str | Path | None = None,
    int8: bool = False,
) -> Model:
    """A trained model.

    Args:
        path: a run directory, one checkpoint in it (`runs/x/checkpoints/500`), or a folder that `dreamer export` wrote.
        step: the checkpoint of a run; by default the newest good one.
        average: the parameters are the mean of so many checkpoints, that one and those before it.
        dtype: compute precision, "float32" or "bfloat16"; by default the run's.
        cache: which keys of other tokens' depths a token sees, for families with several rules (`model.cache`).
        knowledge: a file of `dreamer embed` with other texts than the model was trained with, for models that attend to
            texts.
        tokenizer: where the tokenizer's file is now, if it was moved; needed only for texts.
        mesh: devices that share generation and scoring, as `inference.Engine` takes it; None for one.
        family_module: where the model's family is defined, if that is outside of the package; as `--family-module`.
        int8: whether generation and scoring keep the experts' matrices in eight bits, see `fold`.
    Raises:
        UserError: there is no such run or folder, or what is there is damaged.
    """
    if family_module is not None:
        give_working(str(family_module))
    folder = Path(path)
    if (folder / "config.json").is_file() and not (folder / "config.yaml").is_file():
        if step is not None or average != 1:
            raise UserError(f"{path} is an exported folder, which holds one step; leave step and average out")
        from dreamer_jax.export.reading import read_model

        trained = read_model(folder)
        if tokenizer is None and not _is_there(trained.config.data.tokenizer):
            its = changed(trained, dtype, cache, knowledge)
            return Model(its, lambda: load_tokenizer(str(folder / "tokenizer.json")), mesh, int8)
    else:
        trained = load_run(path, step, average)
    return Model(changed(trained, dtype, cache, knowledge), lambda: tokenizer_of(trained, tokenizer), mesh, int8)


def _is_there(tokenizer: str) -> bool:
    return tokenizer == "bytes" or Path(tokenizer).is_file()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(family: Family, depth: int, params: Any, model_state: Any, tokens: jax.Array, start: Any):
    params = family.cast(params)
    passed = forward(family, params, model_state, {"tokens": tokens}, depth, **start)
    hidden, _ = family.readout(params, passed.state, passed.memory, passed.context)
    return family.logits(params, hidden)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _states(family: Family, depth: int, params: Any, model_state: Any, tokens: jax.Array, start: Any):
    def observe(step):
        def seen(weights, state, *rest):
            return step(weights, state, *rest)._replace(counts=family.stream(state))

        return seen

    batch = {"tokens": tokens}
    passed = forward(family, family.cast(params), model_state, batch, depth, observe=observe, **start)
    return jnp.concatenate([passed.counts, family.stream(passed.state)[None]])
