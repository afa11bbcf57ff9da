"""The paper's fifteen training sets (its Table 4) and four benchmarks: where they are and what their fields are called.

The mixture `paper` names the same training sets, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A data set on the hub."""

    hub: str
    """owner/name."""
    question: str
    """The field with the question; "" for plain text."""
    answer: str
    licence: str
    config: str = ""
    """Configuration, or several with commas between."""
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train"})
    """Our name of a split -> the hub's."""
    calculator_notes: bool = False

    @property
    def url(self) -> str:
        """The data set's page."""
        return f"https://huggingface.co/datasets/{self.hub}"


_MATH_CONFIGS = (
    "algebra, counting_and_probability, geometry, intermediate_algebra, number_theory, prealgebra, precalculus"
)
_MMLU_CONFIGS = (
    "abstract_algebra, elementary_mathematics, high_school_mathematics, college_mathematics, high_school_statistics"
)
_MESSAGES = "messages.0.content", "messages.1.content"

TRAINING = {
    "math": Entry("EleutherAI/hendrycks_math", "problem", "solution", "MIT", _MATH_CONFIGS),
    "curated_openr1": Entry("bethgelab/CuratedThoughts", *_MESSAGES, "not stated", "OpenR1-Math-220k-default"),
    "curated_openthoughts": Entry(
        "bethgelab/CuratedThoughts", *_MESSAGES, "not stated", "OpenThoughts-114k-math-default"
    ),
    "orca_math": Entry("microsoft/orca-math-word-problems-200k", "question", "answer", "MIT"),
    "math_instruct": Entry("TIGER-Lab/MathInstruct", "instruction", "output", "MIT"),
    "gsm8k": Entry("openai/gsm8k", "question", "answer", "MIT", "main", calculator_notes=True),
    "amps_khan": Entry("XinyaoHu/AMPS_khan", "problem", "hints/solutions.*", "MIT"),
    "openthoughts2": Entry(
        "open-thoughts/OpenThoughts2-1M", "conversations.0.value", "conversations.1.value", "Apache-2.0"
    ),
    "numina_cot": Entry("AI-MO/NuminaMath-CoT", "problem", "solution", "Apache-2.0"),
    "natural_reasoning": Entry("facebook/natural_reasoning", "question", "responses.0.response", "CC-BY-NC-4.0"),
    "openmath_instruct2": Entry("nvidia/OpenMathInstruct-2", "problem", "generated_solution", "CC-BY-4.0"),
    "openmath_reasoning": Entry(
        "nvidia/OpenMathReasoning", "problem", "generated_solution", "CC-BY-4.0", splits={"train": "cot"}
    ),
    "deepmath": Entry("zwhe99/DeepMath-103K", "question", "r1_solution_1", "MIT"),
    "ibivibiv_math_instruct": Entry("ibivibiv/math_instruct", "instruction", "output", "not stated"),
    "nemotron_sft_math": Entry(
        "nvidia/Nemotron-Pretraining-SFT-v1",
        "",
        "text",
        "NVIDIA Data Agreement for Model Training",
        "Nemotron-SFT-MATH",
    ),
    "maths_college": Entry("ajibawa-2023/Maths-College", "instruction", "output", "Apache-2.0"),
}
"""By the name of the source in a mixture. CuratedThoughts is one data set with two parts."""

BENCHMARKS = {
    "gsm8k_test": Entry("openai/gsm8k", "question", "answer", "MIT", "main", {"test": "test"}),
    "math_test": Entry("EleutherAI/hendrycks_math", "problem", "solution", "MIT", _MATH_CONFIGS, {"test": "test"}),
    "mmlu_math_test": Entry("cais/mmlu", "question", "choices.*", "MIT", _MMLU_CONFIGS, {"test": "test"}),
    "mathqa_test": Entry("allenai/math_qa", "Problem", "options", "Apache-2.0", splits={"test": "test"}),
}
