"""Small benchmark files and models with known answers."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dreamer_jax.data.tokenizers import ByteTokenizer
from dreamer_jax.evaluation.benchmarks import MMLU_SUBJECTS
from dreamer_jax.inference import Generated, LanguageModel

GSM8K = [
    ("Ann has 3 apples and buys 4. How many has she?", "3+4 = <<3+4=7>>7\n#### 7"),
    ("A car costs $12,000 and a bike $500. Together?", "12,000+500 = 12,500\n#### 12,500"),
    ("It is 5 degrees and falls by 8. How cold is it?", "5-8 = -3\n#### -3"),
    ("What is half of 7?", "7/2 = 3.5\n#### 3.5"),
    ("How many legs have 9 ducks?", "9*2 = <<9*2=18>>18 legs.\n#### 18"),
    ("What is 10 times 100?", "#### 1000"),
]
MATH = [
    ("What is $1+1$?", "It is $\\boxed{2}$.", "Algebra"),
    ("What is half of three?", "So $x = \\boxed{\\frac{3}{2}}$.", "Algebra"),
    ("Where is the point?", "At $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.", "Precalculus"),
    ("Which is it?", "First \\boxed{1}, but then \\fbox{\\text{(B)}}.", "Geometry"),
]
MATHQA = [
    ("what is 19 * 2 ?", "a ) 38 , b ) 27.675 , c ) 30 , d ) data inadequate , e ) none of these", "a"),
    ("what is 6 * 6 ?", "a ) rs . 36 , b ) rs . 35 , c ) 36 : 1 , d ) 1 / 36 , e ) 3.6", "c"),
    ("which is twice there ?", "a ) 7 , b ) 8 , c ) 7 , d ) 9 , e ) 10", "c"),
    ("which list ?", "[ 'a ) 140 m' , 'b ) 90 m' , 'c ) 110 m' , 'd ) 150 m' , 'e ) none of these ' ]", "b"),
    ("what is 1 + 1 ?", "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5", "e"),
]


def write_benchmarks(folder: Path) -> Path:
    """The benchmarks' folder layout with a few questions of each."""
    gsm8k = [{"question": question, "answer": answer} for question, answer in GSM8K]
    math_rows = [{"problem": problem, "solution": solution, "type": kind} for problem, solution, kind in MATH]
    mathqa = [{"problem": problem, "options": options, "correct": letter} for problem, options, letter in MATHQA]
    for name, rows in (("gsm8k", gsm8k), ("math", math_rows), ("mathqa", mathqa)):
        for split, its in (("test", rows), ("train", rows[::-1])):
            write_jsonl(folder / name / f"{split}.jsonl", its)
    (folder / "mmlu_math").mkdir()
    for number, subject in enumerate(MMLU_SUBJECTS):
        for split, count in (("dev", 2), ("test", 3)):
            with (folder / "mmlu_math" / f"{subject}_{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows(
                    [f" What is {number} + {i},\nin {split}? ", *(number + i + k for k in range(4)), "ABCD"[i]]
                    for i in range(count)
                )
    return folder


def write_jsonl(path: Path, rows: Sequence[dict]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Scripted:
    """Answers a prompt with a given text, and scores each token of a row by a hash of it and the eight before."""

    def __init__(self, reply: Callable[[str], str] = lambda prompt: ""):
        self.reply = reply
        self.prompts: list[str] = []
        """All that was asked."""

    def generate(self, prompts, max_tokens, sampling, *, stop_ids, finished, batch_size, numbers):
        """The reply's bytes, in blocks of eight as the engine hands them out."""
        found = []
        for number, prompt in enumerate(prompts):
            text = bytes(token for token in prompt if token < 256).decode()
            self.prompts.append(text)
            tokens = list(self.reply(text).encode())
            shown, finish = tokens[:max_tokens], "stop" if len(tokens) < max_tokens else "length"
            for end in range(8, len(shown), 8):
                if finished is not None and finished(number, shown[:end]):
                    shown, finish = shown[:end], "stop"
                    break
            found.append(Generated(shown, [1] * len(shown), finish))
        return found

    def score(self, rows, batch_size):
        """Log-probabilities between -2 and 0."""
        found = []
        for row in rows:
            tokens = np.concatenate([np.zeros(16, np.uint64), np.asarray(row, np.uint64)])
            parts = [tokens[16 - back : len(tokens) - back] * np.uint64(31**back) for back in range(9)]
            mixed = np.sum(np.stack(parts), axis=0)
            logprobs = -2.0 * (mixed * np.uint64(2654435761) % np.uint64(2**32)).astype(np.float64)[1:] / 2**32
            found.append(SimpleNamespace(logprobs=logprobs, greedy=logprobs > -1))
        return found


class Successor(Scripted):
    """Knows one thing: half the time the next byte is one more than the last; the rest is shared out evenly."""

    LIKELY, OTHER = math.log(0.5), math.log(0.5 / 258)

    def score(self, rows, batch_size):
        """Of every row, by the rule."""
        found = []
        for row in rows:
            likely = np.array([after == before + 1 for before, after in itertools.pairwise(row)], bool)
            found.append(SimpleNamespace(logprobs=np.where(likely, self.LIKELY, self.OTHER), greedy=likely))
        return found


def model_of(engine, max_length: int = 4096, batch_size: int = 2) -> LanguageModel:
    """A model that reads bytes."""
    return LanguageModel(engine, ByteTokenizer(), max_length, batch_size)
