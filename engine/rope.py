"""How fast each pair of a head turns under rotary position embedding, from config.json's fields (Su et al. 2021).

Pair i of a head turns by position * theta^(-2i / rotary_dim). Scaling for longer contexts slows pairs down: linear
all of them by the same factor; llama3 those that turn less than low_freq_factor times within the context of training,
not those that turn more than high_freq_factor times, and in between in proportion.
"""

import math

from tfm.engine.fields import Fields

SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""rope_type -> the parameters that it needs."""

DEFAULT_THETA = 10000.0


def read_inv_freq(fields: Fields, rotary_dim: int) -> tuple[float, ...]:
    """Radians a position for each pair: from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    old, new = fields.value("rope_scaling"), fields.value("rope_parameters")
    if old is not None and new is not None and old != new:
        raise fields.fault("rope_scaling", f"nothing beside {fields.name('rope_parameters')}, or the same")
    parameters = fields.group("rope_scaling" if new is None else "rope_parameters")
    theta = fields.number("rope_theta", DEFAULT_THETA, least=1e-6)
    if "rope_theta" in parameters:
        inner = parameters.number("rope_theta", least=1e-6)
        if "rope_theta" in fields and inner != theta:
            raise fields.fault("rope_theta", f"{inner:g}, as {parameters.name('rope_theta')} says")
        theta = inner
    inv_freq = [theta ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
    return tuple(_scale(inv_freq, parameters))


def _scale(inv_freq: list[float], parameters: Fields) -> list[float]:
    kinds = {kind: kind for kind in SCALINGS}
    kind = parameters.choice("rope_type" if "rope_type" in parameters else "type", kinds, "default")
    if "type" in parameters and parameters.choice("type", kinds) != kind:
        raise parameters.fault("type", f"{kind}, as {parameters.name('rope_type')} says")
    needed = SCALINGS[kind]
    for word in parameters.words():
        neutral = word == "partial_rotary_factor" and parameters.value(word) == 1
        if word not in {"rope_type", "type", "rope_theta", *needed} and not neutral:
            raise parameters.fault(word, f"nothing: rope type {kind} has no such parameter")
    if kind == "default":
        return inv_freq
    factor = parameters.number("factor", least=1.0)
    if kind == "linear":
        return [frequency / factor for frequency in inv_freq]
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.fault("high_freq_factor", f"more than low_freq_factor, {low:g}")
    context = parameters.integer("original_max_position_embeddings")
    return [_llama3(frequency, factor, low, high, context) for frequency in inv_freq]


def _llama3(frequency: float, factor: float, low: float, high: float, context: int) -> float:
    turns = context * frequency / (2 * math.pi)
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (kept + (1 - kept) / factor)
