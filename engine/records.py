"""The records that the forward pass reads: the layer table and the step.

NumPy structured types, filled in Python (image.py, layers.py, model.py).

Fields are int64 addresses and counts unless they say otherwise; an address of 0 means that the thing is not there. D is
the hidden size.
"""

from typing import Any

import numpy as np

from tfm.kernels.records import HEADS, MATRIX

_I = np.int64


def _record(*fields: Any) -> np.dtype[Any]:
    return np.dtype([field if isinstance(field, tuple) else (field, _I) for field in fields], align=True)


# A norm: its kind, float32 weights and biases of D padded to 16.
NORM = _record("kind", "weight", "bias", ("eps", np.float64))

# Rotary position embedding: tables of cos and sin, float32 [positions, half]; half 0 where there is none.
ROPE = _record("half", "interleaved", "cos", "sin")

# One block of the transformer. up_proj.data is 0 where there is no MLP; gated says whether gate_proj is there.
LAYER = _record(
    ("attn_norm", NORM), ("heads", HEADS), ("rope", ROPE), "cache_offset",
    ("q_proj", MATRIX), ("k_proj", MATRIX), ("v_proj", MATRIX), ("o_proj", MATRIX),
    ("mlp_norm", NORM), "hidden_act", "gated",
    ("gate_proj", MATRIX), ("up_proj", MATRIX), ("down_proj", MATRIX),
)  # fmt: skip

# What stands at the beginning of an image (image.py); its addresses, and those of its layer table, count from there.
# size is the image's, decode_bytes are the matrices that every new token reads.
IMAGE = _record(
    "size", "decode_bytes", "num_layers", "layers",
    ("embed_tokens", MATRIX), ("lm_head", MATRIX), ("norm", NORM), "position_embeddings",
)  # fmt: skip

# One forward pass over T rows: what goes in, the weights, and where the threads write. Strides are bytes from row to
# row; tokens are int64 [T], and so are logit_rows, the numbers of the rows whose logits are asked for. The fields of
# CHANGING differ from step to step; they stand last, and behind them what the last three point to.
CHANGING = ("rows", "num_spans", "num_logit_rows", "segments", "logits", "tokens", "spans", "logit_rows")
STEP = _record(
    "logits_stride", "hidden_size", "num_layers", "layers",
    ("embed_tokens", MATRIX), "position_embeddings", ("norm", NORM), ("lm_head", MATRIX),
    "kv_type", "partials", "partial_bytes", "claims",
    "x", "x_stride", "heads_out", "heads_stride", "attended", "attended_stride",
    "gate", "up", "mlp_stride", "activations",
    *CHANGING,
)  # fmt: skip

FEW_ROWS = 8  # so few rows every thread normalises and quantises for itself, which costs less than to wait for others
