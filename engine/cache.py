"""Keys and values: blocks of 64 positions from one pool, found through a table a sequence. S counts the positions."""

import ctypes
from collections.abc import Iterable
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import KV_BLOCK

SLAB_BYTES = 1 << 24  # taken at once; a part that no block uses is never touched, and takes no memory


class BlockPool:
    """Blocks of block_bytes each, made when they are needed and used again when nobody uses them any more.

    A block may have several users, who read it and do not write to it. limit is the most blocks that may be there at
    once; `take` raises TfmError beyond it, or when the machine has no memory left.
    """

    def __init__(self, block_bytes: int, limit: int | None = None) -> None:
        self.block_bytes, self.limit = block_bytes, limit
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._made = 0
        self._free: list[int] = []
        self._users: dict[int, int] = {}

    @property
    def blocks_in_use(self) -> int:
        return len(self._users)

    def take(self) -> int:
        """The address of a block with one user; what stands in it is undefined."""
        if not self._free:
            self._make_slab()
        address = self._free.pop()
        self._users[address] = 1
        return address

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

    def share(self, address: int) -> None:
        """One user more of a block."""
        self._users[address] += 1

    def is_shared(self, address: int) -> bool:
        return self._users[address] > 1

    def give(self, address: int) -> None:
        """One user less; a block that nobody uses is free again."""
        users = self._users.pop(address) - 1
        if users:
            self._users[address] = users
        else:
            self._free.append(address)

    def copy(self, address: int) -> int:
        """A block with one user and the same contents, in place of one that is shared."""
        copy = self.take()
        ctypes.memmove(copy, address, self.block_bytes)
        self.give(address)
        return copy


class Sequence:
    """The positions of one text that have been through the model. Close it (or use `with`) to give its blocks back.

    ids are the tokens at these positions.
    """

    def __init__(self, pool: BlockPool, ctx: int) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self.table = np.zeros(-(-ctx // KV_BLOCK), np.int64)  # addresses of the blocks, read by the kernels
        self.table_address = self.table.ctypes.data  # kept, as to ask for it takes 2 us
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The addresses of its blocks; the last may be full in part."""
        return tuple(self._blocks)

    def reserve(self, length: int) -> None:
        """Have blocks for so many positions, of which those from self.length on may be written."""
        first = self.length // KV_BLOCK
        if length > self.length and first < len(self._blocks) and self._pool.is_shared(self._blocks[first]):
            self._blocks[first] = self.table[first] = self._pool.copy(self._blocks[first])
        while len(self._blocks) * KV_BLOCK < length:
            self._blocks.append(self._pool.take())
            self.table[len(self._blocks) - 1] = self._blocks[-1]

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        assert 0 <= length <= self.length, f"cannot keep {length} of {self.length} positions"
        del self.ids[length:]
        while len(self._blocks) > -(-length // KV_BLOCK):
            self._pool.give(self._blocks.pop())

    def keep(self, ids: Items[int]) -> int:
        """Forget what is not the beginning of ids, and the last of ids in any case; gives how many positions stay."""
        self.truncate(common_prefix(self.ids, ids[:-1]))
        return self.length

    def fork(self, length: int) -> "Sequence":
        """Another sequence with the first `length` positions. Memory is shared until one of the two writes to it."""
        assert 0 <= length <= self.length, f"cannot fork {length} of {self.length} positions"
        other = Sequence(self._pool, len(self.table) * KV_BLOCK)
        other._append(self._blocks[: -(-length // KV_BLOCK)], self.ids[:length])
        return other

    def adopt(self, blocks: Iterable[int], ids: Items[int]) -> None:
        """Begin an empty sequence with full blocks that are there, and that hold the keys and values of ids."""
        assert not self._blocks, "the sequence has begun"
        self._append(blocks, ids)
        assert len(self._blocks) * KV_BLOCK == len(ids), "full blocks"

    def _append(self, blocks: Iterable[int], ids: Items[int]) -> None:
        for block in blocks:
            self._pool.share(block)
            self._blocks.append(block)
            self.table[len(self._blocks) - 1] = block
        self.ids += ids

    def close(self) -> None:
        """Give all blocks back; the sequence is empty afterwards, and may be used again."""
        self.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def common_prefix(some: Items[object], other: Items[object]) -> int:
    """How many items two lists begin with in common."""
    for i, (a, b) in enumerate(zip(some, other, strict=False)):
        if a != b:
            return i
    return min(len(some), len(other))
