"""Any task of EleutherAI's lm-evaluation-harness on a model of this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dreamer_jax.errors import UserError, how_to_install
from dreamer_jax.evaluation.encoding import Pair, harness_pair, rolling_windows
from dreamer_jax.evaluation.opening import LONGEST_INPUT, load_language_model
from dreamer_jax.inference import LanguageModel, Likelihood, Sampling

try:
    from lm_eval.api.model import LM
    from tqdm import tqdm
except ImportError as error:
    raise UserError(f"the adapter needs lm-evaluation-harness ({error}); {how_to_install('eval')}") from None

MAX_TOKENS = 256
"""Of an answer where the task doesn't say: the harness's own default."""


class LMEvalAdapter(LM):
    """A `LanguageModel` as the harness wants it: `lm_eval.simple_evaluate(model=LMEvalAdapter(...), ...)`.

    Args:
        model: see `load_language_model`.
        window: tokens seen at once by tasks that score whole texts; None takes the model's longest request.

    Raises:
        UserError: on import, if lm-eval isn't installed.
    """

    def __init__(self, model: LanguageModel, window: int | None = None):
        super().__init__()
        self._model = model
        self._window = window or model.max_length or LONGEST_INPUT

    @classmethod
    def of_run(cls, run: str, window: int | None = None, **options: Any) -> LMEvalAdapter:
        """The adapter of a run directory, or of one checkpoint in it; options as of `load_language_model`."""
        return cls(load_language_model(run, **options), window)

    @property
    def tokenizer_name(self) -> str:
        """What identifies the tokenizer, for the harness's caches."""
        return self._model.tokenizer.fingerprint

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(summed log-probability, whether greedy) of each request's continuation after its context."""
        pairs = [harness_pair(self._model.tokenizer, *request.args) for request in requests]
        return [(one.logprob, one.greedy) for one in self._likelihoods(pairs, "loglikelihood", disable_tqdm)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Summed log-probability of each request's whole text."""
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            its = rolling_windows(self._model.tokenizer, request.args[0], self._window)
            windows += its
            owners += [owner] * len(its)
        totals = [0.0] * len(requests)
        found = self._likelihoods(windows, "loglikelihood_rolling", disable_tqdm)
        for owner, one in zip(owners, found, strict=True):
            totals[owner] += one.logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Each request's continuation, without its stop string."""
        texts = [""] * len(requests)
        kinds: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault(_generation(request.args[1]), []).append(i)
        for (stops, max_tokens, *numbers), members in kinds.items():
            sampling = _sampling(*numbers)

            def generate(
                part: Sequence[tuple[int, str]], stops=stops, tokens=max_tokens, sampling=sampling
            ) -> list[str]:
                # Draws depend on the request's number, whatever else is asked in the same part.
                numbers, prompts = zip(*part, strict=True)
                return [answer.text for answer in self._model.generate(prompts, tokens, sampling, stops, numbers)]

            asked = [(i, requests[i].args[0]) for i in members]
            sizes = [len(prompt) for _, prompt in asked]
            found = self._in_parts(asked, sizes, generate, "generate_until", disable_tqdm)
            for i, text in zip(members, found, strict=True):
                texts[i] = text
        return texts

    def _likelihoods(self, pairs: Sequence[Pair], name: str, quiet: bool) -> list[Likelihood]:
        sizes = [len(context) + len(text) for context, text in pairs]
        return self._in_parts(pairs, sizes, self._model.likelihoods, name, quiet)

    def _in_parts(
        self, items: Sequence[Any], sizes: Sequence[int], work: Callable, name: str, quiet: bool
    ) -> list[Any]:
        """`work` on a few batches at a time, the longest first, with a progress bar; results in the order of items."""
        order = sorted(range(len(items)), key=lambda i: -sizes[i])
        results: list[Any] = [None] * len(items)
        amount = 4 * self._model.batch_size
        with tqdm(total=len(items), desc=name, disable=quiet) as bar:
            for first in range(0, len(order), amount):
                part = order[first : first + amount]
                for i, result in zip(part, work([items[i] for i in part]), strict=True):
                    results[i] = result
                bar.update(len(part))
        return results


def _generation(options: dict[str, Any]) -> tuple:
    """(stops, max_tokens, temperature, top_k, top_p, min_p, seed) of a request's options; temperature 0 is greedy."""
    until = options.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    lengths = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # as the harness ranks them
    max_tokens = next((options[name] for name in lengths if options.get(name)), MAX_TOKENS)
    given = options.get("temperature")
    temperature = float(given or 0.0)
    if options.get("do_sample") is False:
        temperature = 0.0
    elif options.get("do_sample") and given is None:
        temperature = 1.0
    ranks = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0), float(options.get("min_p") or 0.0)
    return stops, int(max_tokens), temperature, *ranks, int(options.get("seed") or 0)


def _sampling(temperature: float, *others: Any) -> Sampling | None:
    return Sampling(temperature, *others) if temperature else None
