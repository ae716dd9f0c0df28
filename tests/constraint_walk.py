"""An answer by lot, of tokens that a constraint allows, for tests."""

import numpy as np

from tfm.engine.constraint import Constraint


def walk(constraint: Constraint, eos_ids: frozenset[int], seed: int) -> list[int]:
    """Allowed tokens, drawn by lot, until the end."""
    lot = np.random.default_rng(seed)
    ids: list[int] = []
    while not constraint.is_finished:
        assert len(ids) < 1000
        ids.append(int(lot.choice(np.flatnonzero(constraint.allowed()))))
        constraint.accept(ids[-1])
    return [id_ for id_ in ids if id_ not in eos_ids]
