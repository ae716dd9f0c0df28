"""Keys and values of prompts that others begin with as well: full blocks, found by the tokens up to their end."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from tfm.engine.cache import BlockPool
from tfm.kernels.records import KV_BLOCK

IDLE_BYTES = 1 << 28  # of blocks that no sequence has; those that were used longest ago go first
Key = bytes


def block_keys(ids: Sequence[int]) -> list[Key]:
    """For each full block of a text a digest of all tokens up to its end; the last token of all is in no block.

    It is left to be run: nothing else tells what follows it.
    """
    full = max(0, len(ids) - 1) // KV_BLOCK
    blocks = np.array(ids[: full * KV_BLOCK], np.int64).reshape(full, KV_BLOCK)
    digest = hashlib.blake2b(digest_size=16)
    keys = []
    for block in blocks:
        digest.update(block.tobytes())
        keys.append(digest.digest())
    return keys


class PrefixCache:
    """Blocks that stay when their sequence is closed, to begin another with. It is one more user of each."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: OrderedDict[Key, int] = OrderedDict()  # a text's later blocks before its earlier ones: see _touch
        self._most_idle = max(1, IDLE_BYTES // pool.block_bytes)

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks that are there of a text's beginning."""
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        self._touch(keys[: len(blocks)])
        return blocks

    def add(self, keys: Sequence[Key], blocks: Iterable[int]) -> None:
        """Keep the blocks of a text's beginning; of those that are there already the old ones."""
        for key, block in zip(keys, blocks, strict=False):
            if key not in self._blocks:
                self._pool.share(block)
                self._blocks[key] = block
        self._touch(keys)
        self.shrink(self._most_idle)

    def _touch(self, keys: Sequence[Key]) -> None:
        """These were used last; a beginning after what follows it, which is of no use without it."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def shrink(self, most_idle: int) -> None:
        """Give back blocks that no sequence has, until at most so many are left."""
        idle = [key for key, block in self._blocks.items() if not self._pool.is_shared(block)]
        for key in idle[: max(0, len(idle) - most_idle)]:
            self._pool.give(self._blocks.pop(key))

    def close(self) -> None:
        """Give all blocks back."""
        for block in self._blocks.values():
            self._pool.give(block)
        self._blocks.clear()
