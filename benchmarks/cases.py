"""The tests on a loaded model, and the sides that run them, as data.

Names are llama-bench's with the format after them: tg128 decodes 128 tokens one by one from an empty context, pp512
reads a prompt of 512 in one call; @ d4096 has 4,096 tokens before it, b16 sixteen sequences side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asked import FLASH

SHAPE = "llama-3-8b.json"
"""A config.json beside this file."""
SHORT, LONG = 640, 4224  # positions of a context
SEQUENCES = 16


@dataclass(frozen=True)
class Side:
    """A program with a model. model is one of models.MODELS, SHAPE, or what the worker itself makes sense of."""

    name: str
    program: str
    model: str
    ctx: int = SHORT
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Sides of one key are one process."""
        return f"{self.name} {self.model}"


@dataclass(frozen=True)
class Case:
    """What is run: of `batch` sequences that have `depth` tokens, each gets `tokens` more, `rows` at a time."""

    name: str
    title: str
    sides: tuple[Side, ...]
    tokens: int
    rows: int
    depth: int = 0
    batch: int = 1


def tfm(model: str, ctx: int = LONG) -> Side:
    return Side("tfm", "tfm", model, ctx)


def llama(name: str, model: str, ctx: int = SHORT, **more: object) -> Side:
    return Side(f"llama.cpp {name}", "llama_cpp", model, ctx, more)


Q4, Q8, BF16 = tfm("q4_1"), tfm("q8_0"), tfm("bf16")
LLAMA_Q4_1, LLAMA_Q4_0 = llama("Q4_1", "q4_1"), llama("Q4_0", "q4_0")
LLAMA_Q8_0, LLAMA_BF16 = llama("Q8_0", "q8_0"), llama("BF16", "bf16")
TORCH = Side("transformers float32", "transformers", "checkpoint")
CTRANSLATE2 = Side("CTranslate2 int8", "ctranslate2", "ctranslate2")
LLAMA_FLASH = tuple(
    Side(name, "llama_cpp", "q4_1", LONG, {"flash": flash}) for name, flash in zip(FLASH, (True, False), strict=True)
)
LLAMA_MANY = llama(f"Q4_0, {SEQUENCES} sequences", "q4_0", 64, sequences=SEQUENCES)
MATMUL = (Side("tfm", "matmul", "tfm"), Side("NumPy", "matmul", "numpy"))

CASES = (
    Case("tg128 q4", "decode, q4 (tg128)", (Q4, LLAMA_Q4_1, LLAMA_Q4_0), 128, 1),
    Case("tg128 q8", "decode, q8 (tg128)", (Q8, LLAMA_Q8_0, CTRANSLATE2), 128, 1),
    Case("tg128 bf16", "decode, bf16 (tg128)", (BF16, LLAMA_BF16), 128, 1),
    Case("pp512 q4", "prompt of 512, q4 (pp512)", (Q4, LLAMA_Q4_1, LLAMA_Q4_0), 512, 512),
    Case("pp512 q8", "prompt of 512, q8 (pp512)", (Q8, LLAMA_Q8_0, CTRANSLATE2), 512, 512),
    Case("pp512 bf16", "prompt of 512, bf16 (pp512)", (BF16, LLAMA_BF16, TORCH), 512, 512),
    Case("tg64 b16 q4", "16 sequences decoding, q4 (tg64 b16)", (Q4, LLAMA_MANY), 64, 1, batch=SEQUENCES),
    Case("pp4096 q4", "prompt of 4096, q4 (pp4096)", (Q4, *LLAMA_FLASH), 4096, 4096),
    Case("tg64 @ d4096 q4", "decode after 4096, q4 (tg64 @ d4096)", (Q4, *LLAMA_FLASH), 64, 1, depth=4096),
    Case("matmul", "float32 matmul, 2048 x 2048 x 2048", MATMUL, 1, 1),
    Case("tg16 llama-3-8b q4", "decode, q4, shape of Llama-3-8B (tg16)", (tfm(SHAPE, SHORT),), 16, 1),
)
