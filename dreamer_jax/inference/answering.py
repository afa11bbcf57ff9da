"""A few worked examples to read at the end of a run."""

from __future__ import annotations

from dreamer_jax.config.sections import Config
from dreamer_jax.data import Data, Record
from dreamer_jax.inference.engine import Engine
from dreamer_jax.inference.model import fold
from dreamer_jax.runs.state import TrainState


def answer(config: Config, state: TrainState, data: Data, records: list[Record], limit: int = 64) -> list[str]:
    """The model's own answers to prompts, decoded greedily.

    Args:
        records: their prompts are answered; longer ones than a row are answered with "".
        limit: most tokens of an answer; it also ends where a row of training would.
    """
    tokenizer, length = data.tokenizer, config.data.sequence_length
    prompts = [[tokenizer.bos, *tokenizer.encode(record.prompt)] for record in records]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < length]
    engine = Engine(fold(config.model, state.params, state.model_state))
    rows = engine.generate([prompts[i] for i in fitting], limit, stop_ids=[tokenizer.eos])
    answers = [""] * len(prompts)
    for i, row in zip(fitting, rows, strict=True):
        answers[i] = tokenizer.decode(row.tokens[: length - len(prompts[i])])
    return answers
