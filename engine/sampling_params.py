"""How tokens are chosen, as it is asked for and as a model's generation_config.json has it.

Without NumPy: a command looks at what was asked for before it loads anything.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfm.engine.errors import TfmError
from tfm.engine.fields import is_integer, read_json, shown
from tfm.engine.files import is_there

LARGEST_SEED = (1 << 64) - 1
MOST_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; a value outside its range is a TfmError that names it.

    temperature 0 takes the likeliest token; top_k 0, top_p 1 and min_p 0 leave all tokens in. repeat_penalty divides
    positive logits, and multiplies negative ones, of every token of prompt and answer (1 is none; Keskar et al. 2019);
    presence_penalty, and frequency_penalty times the count, are taken from the logits of tokens of the answer.
    logit_bias is added to the logits of its ids. seed None stands for one that is drawn (see `seeded`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", least=0.0)
        self._check_number("top_p", least=0.0, most=1.0)
        self._check_number("min_p", least=0.0, most=1.0)
        self._check_number("repeat_penalty", least=0.0, above=True)
        self._check_number("presence_penalty")
        self._check_number("frequency_penalty")
        if not is_integer(self.top_k) or not 0 <= self.top_k <= MOST_TOP_K:
            raise TfmError("top_k", self.top_k, f"a whole number from 0 (all tokens) to {MOST_TOP_K}")
        if self.seed is not None and (not is_integer(self.seed) or not 0 <= self.seed <= LARGEST_SEED):
            raise TfmError("seed", self.seed, f"a whole number from 0 to {LARGEST_SEED}")
        for id_, bias in self.logit_bias.items():
            if not is_integer(id_) or not _is_number(bias) or math.isnan(bias) or bias == math.inf:
                raise TfmError("logit_bias", f"{id_}={bias}", "token ids with finite numbers or -inf")

    def _check_number(self, name: str, least: float = -math.inf, most: float = math.inf, above: bool = False) -> None:
        value = getattr(self, name)
        if _is_number(value) and math.isfinite(value) and least <= value <= most and not (above and value == least):
            return
        lower = "" if least == -math.inf else f" {'above' if above else 'from'} {least:g}"
        raise TfmError(name, value, f"a number{lower}{'' if most == math.inf else f' to {most:g}'}")

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repeat_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
    ) -> "SamplingParams":
        """The model's own settings from generation_config.json (greedy without one), with those that are given instead.

        As in transformers, the file asks for sampling by do_sample true, and then temperature is 1 when it is absent.
        """
        params = _from_file(folder / "generation_config.json")
        given: dict[str, Any] = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repeat_penalty": repeat_penalty, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty, "logit_bias": logit_bias, "seed": seed,
        }  # fmt: skip
        return replace(params, **{name: value for name, value in given.items() if value is not None})

    def seeded(self) -> "SamplingParams":
        """The same with a seed: its own, or one that is drawn now."""
        return self if self.seed is not None else replace(self, seed=int.from_bytes(os.urandom(4), "little"))

    def check_ids(self, vocab_size: int) -> None:
        """Raises TfmError when logit_bias names a token that the model does not have."""
        for id_ in self.logit_bias:
            if not 0 <= id_ < vocab_size:
                raise TfmError("logit_bias", f"token id {id_}", f"0 to {vocab_size - 1}")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or bias are in use."""
        plain = self.repeat_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return not plain or bool(self.logit_bias)


FILE_NAMES = {"repeat_penalty": "repetition_penalty"}
FILE_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")


def _from_file(path: Path) -> SamplingParams:
    if not is_there(path):
        return SamplingParams()
    content = read_json(path)
    sample = content.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise TfmError(f"{path}: field do_sample", shown(sample), "true, false")
    params = SamplingParams(temperature=1.0 if sample else 0.0)
    for name in FILE_FIELDS:
        written = FILE_NAMES.get(name, name)
        value: Any = content.get(written)
        if value is None or (name == "temperature" and not sample):
            continue
        try:
            params = replace(params, **{name: value})
        except TfmError as error:
            raise TfmError(f"{path}: field {written}{str(error).removeprefix(name)}") from None
    return params


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (is_integer(value) and abs(value) <= sys.float_info.max)
