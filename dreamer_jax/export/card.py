"""The model card: what the model is, how it was trained, its budget, and what its licences ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dreamer_jax.budget.report import render, report
from dreamer_jax.config.sections import Config
from dreamer_jax.data.tokenizers import ByteTokenizer, RankTokenizer, Tokenizer
from dreamer_jax.export.description import Description, form_of
from dreamer_jax.families import build


def write_card(folder: Path, description: Description, tokenizer: Tokenizer | None, steps: Sequence[int] = ()) -> None:
    """Write README.md; a model without texts has no tokenizer. `steps`: of the checkpoints that were averaged."""
    config, form = description.config, form_of(description.config)
    about = form.about(description, tokenizer)
    tags = "\n".join(f"- {tag}" for tag in about.tags)
    library = "library_name: transformers\npipeline_tag: text-generation\n" if tokenizer else ""
    text = f"""---
{library}license: other
tags:
{tags}
---

# {about.title}

{about.introduction}

## How it was trained

{_training(description, steps)}

## Use

{about.use}

## Budget

```
{render(report(config), build(config.model).sentence())}
```{about.counted}

## Licences

- `{form.model_file}` is part of Dreamer-JAX, Apache License 2.0.
- The weights: whoever trained the model says under which terms they are passed on, with regard to the licence of
  the training data. Nothing is granted by this file; replace this line and `license:` above before publishing.
{_tokenizer_licence(tokenizer)}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


OPTIMIZERS = {"adamw": "AdamW", "adam_atan2": "AdamW with the arctangent of the moments' quotient"}


def _training(description: Description, steps: Sequence[int]) -> str:
    config, training = description.config, description.config.training
    return "\n".join(
        [
            f"- {description.step:,} optimizer steps of {training.batch_size} rows of "
            f"{config.data.sequence_length} tokens, {_source(config)}",
            f"- loss on {'all tokens' if config.data.loss == 'all' else 'the tokens of the answers'}; "
            f"{OPTIMIZERS[training.optimizer]}, learning rate {training.learning_rate:g} after {training.warmup_steps} "
            f"steps of warm-up, weight decay {training.weight_decay:g}, gradient norm clipped at "
            f"{training.clip_norm:g}",
            f"- computed in {config.model.dtype} with float32 weights, seed {config.run.seed}",
            *([f"- the weights are the mean of the checkpoints after {_listed(steps)} steps"] if steps[1:] else []),
        ]
    )


def _listed(steps: Sequence[int]) -> str:
    *others, last = (f"{step:,}" for step in sorted(steps))
    return f"{', '.join(others)} and {last}"


def _source(config: Config) -> str:
    if config.data.source == "task":
        return f"generated problems: {config.data.task}, difficulty 1 to {config.data.difficulty}"
    return f"from {Path(config.data.path).name}"


def _tokenizer_licence(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    if isinstance(tokenizer, ByteTokenizer):
        return "- The tokenizer is plain bytes; nobody's rights are in it."
    if not isinstance(tokenizer, RankTokenizer):
        return (
            "- The tokenizer files are those of the run; whoever made them says under which terms they are passed on."
        )
    return """\
- The tokenizer files come from a rank file that Dreamer-JAX didn't make. If it is Llama 3's, the Meta Llama 3
  Community License applies to them: whoever passes them on gives a copy of that licence, keeps the notice "Meta Llama 3
  is licensed under the Meta Llama 3 Community License, Copyright (c) Meta Platforms, Inc. All Rights Reserved." in a
  file named `Notice`, displays "Built with Meta Llama 3", gives the model a name that starts with "Llama 3", and
  follows its acceptable use policy. Licence texts that lay beside the rank file were copied into this folder. Other
  rank files have terms of their own."""
