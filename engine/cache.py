"""Keys and values: blocks of 64 positions from one pool, found through a table a sequence. S counts the positions."""

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import KV_BLOCK

SLAB_BYTES = 1 << 24  # taken at once; a part that no block uses is never touched, and takes no memory


class BlockPool:
    """Blocks of block_bytes each, made when they are needed and used again when they were given back.

    limit is the most blocks that may be there at once; `take` raises TfmError beyond it, or when the machine has no
    memory left.
    """

    def __init__(self, block_bytes: int, limit: int | None = None) -> None:
        self.block_bytes, self.limit = block_bytes, limit
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._made = 0
        self._free: list[int] = []

    def take(self) -> int:
        """The address of a block; what stands in it is undefined."""
        if not self._free:
            self._make_slab()
        return self._free.pop()

    def _make_slab(self) -> None:
        """More free blocks, of one piece of memory: only a large piece gets large pages."""
        made = self._made
        count = max(1, SLAB_BYTES // self.block_bytes)
        if self.limit is not None:
            count = min(count, self.limit - made)
        if count < 1:
            raise TfmError(
                "cache: no room for more keys and values", f"{made} blocks of {self.block_bytes} bytes in use",
                f"{self.limit} blocks", "raise --max-ram, lower --ctx or use --kv-type q8",
            )  # fmt: skip
        try:
            slab = aligned_empty(count * self.block_bytes)
        except MemoryError:
            raise TfmError(
                "cache: no memory left for keys and values", f"{made} blocks of {self.block_bytes} bytes in use",
                do="lower --ctx or use --kv-type q8",
            ) from None  # fmt: skip
        self._slabs.append(slab)
        self._made += count
        address = slab.ctypes.data
        self._free = [address + i * self.block_bytes for i in reversed(range(count))]

    def give(self, address: int) -> None:
        """Take back a block that `take` gave."""
        self._free.append(address)


class Sequence:
    """The positions of one text that have been through the model. Close it (or use `with`) to give its blocks back."""

    def __init__(self, pool: BlockPool, ctx: int) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self.table = np.zeros(-(-ctx // KV_BLOCK), np.int64)  # addresses of the blocks, read by the kernels
        self.length = 0

    def reserve(self, length: int) -> None:
        """Have blocks for so many positions."""
        while len(self._blocks) * KV_BLOCK < length:
            block = self._pool.take()
            self.table[len(self._blocks)] = block
            self._blocks.append(block)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        assert 0 <= length <= self.length, f"cannot keep {length} of {self.length} positions"
        self.length = length
        while len(self._blocks) > -(-length // KV_BLOCK):
            self._pool.give(self._blocks.pop())

    def close(self) -> None:
        """Give all blocks back; the sequence is empty afterwards, and may be used again."""
        self.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
