"""Token ids in, token ids out: checkpoints, tokenizer, forward pass, cache, sampling. Prints nothing."""

from tfm.engine.errors import TfmError
from tfm.engine.loading import load

__all__ = ["TfmError", "load"]
