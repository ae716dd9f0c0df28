"""Token ids in, token ids out: checkpoints, tokenizer, forward pass, cache, sampling. Prints nothing.

`load` gives a Model; `SamplingParams` says how its `generate` chooses tokens; what a person can mend is a TfmError.
"""

from typing import TYPE_CHECKING, Any

from tfm.engine.errors import TfmError
from tfm.engine.loading import load

if TYPE_CHECKING:
    from tfm.engine.model import Model
    from tfm.engine.sampling_params import SamplingParams

__all__ = ["Model", "SamplingParams", "TfmError", "load"]


def __getattr__(name: str) -> Any:
    """Model and SamplingParams, imported when they are asked for: Model brings NumPy."""
    from importlib import import_module

    homes = {"Model": "tfm.engine.model", "SamplingParams": "tfm.engine.sampling_params"}
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
