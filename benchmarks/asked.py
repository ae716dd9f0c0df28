"""What tfm must reach, in one table. It goes into the results beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

FLASH = ("llama.cpp Q4_1, flash attention", "llama.cpp Q4_1, no flash attention")
LOOP = "llama-cpp-python, a loop"
FREE = "tfm, no constraint"
ONE_THREAD = "tfm, one thread"


@dataclass(frozen=True)
class Times:
    """So many times as fast as the peer; of several peers the fastest counts."""

    least: float
    peers: tuple[str, ...]


@dataclass(frozen=True)
class LimitShare:
    """This share of what memory or multipliers of the machine allow."""

    least: float


@dataclass(frozen=True)
class Most:
    """At most so many seconds; of memory, bytes beyond the test's base."""

    most: float


@dataclass(frozen=True)
class Cost:
    """At most this share more seconds than the peer."""

    most: float
    peer: str


Ask = Times | LimitShare | Most | Cost

ASKED: Mapping[str, tuple[Ask, ...]] = {
    "tg128 q4": (Times(1.6, ("llama.cpp Q4_1",)), LimitShare(0.85)),
    "tg128 q8": (Times(1.2, ("llama.cpp Q8_0",)), LimitShare(0.85)),
    "tg128 bf16": (Times(1.35, ("llama.cpp BF16",)), LimitShare(0.90)),
    "pp512 q4": (Times(2.5, ("llama.cpp Q4_1",)), Times(1.8, ("llama.cpp Q4_0",))),
    "pp512 bf16": (Times(1.3, ("transformers float32",)), Times(2.0, ("llama.cpp BF16",))),
    "pp4096 q4": (Times(2.0, FLASH),),
    "tg64 @ d4096 q4": (Times(2.5, FLASH), LimitShare(0.70)),
    "tg64 b16 q4": (Times(2.0, ("llama.cpp Q4_0, 16 sequences",)),),
    "tg16 llama-3-8b q4": (LimitShare(0.85),),
    "matmul": (Times(1.0, ("NumPy",)),),
    "exit": (Times(1 / 0.8, ("llama-cpp-python",)),),  # 0.8 times its seconds
    "cold": (Most(10.0),),
    "help": (Most(0.15),),
    "memory": (Most(150e6),),
    "batch mixed": (Times(2.0, (LOOP,)),),
    "batch shared": (Times(4.0, (LOOP,)),),
    "busy one": (Times(0.97, (ONE_THREAD,)),),  # not slower, but for what two equal models differ by
    "busy all": (Times(0.97, (ONE_THREAD,)),),
    "constraint schema": (Cost(0.10, FREE),),
    "constraint regex": (Cost(0.10, FREE),),
    "constraint grammar": (Cost(0.10, FREE),),
}


def verdicts(
    test: str, medians: Mapping[str, float], limit_share: float | None, base: float = 0
) -> list[dict[str, object]]:
    """What is asked of a test, what was measured, and whether that is enough. medians: by side, the less the better."""
    found: list[dict[str, object]] = []
    for ask in ASKED.get(test, ()):
        if isinstance(ask, Times):
            times = round(min(medians[peer] for peer in ask.peers) / medians["tfm"], 3)
            of = f"times as fast as {' or '.join(ask.peers)}"
            found.append({"asked": of, "at_least": ask.least, "measured": times, "met": times >= ask.least})
        elif isinstance(ask, LimitShare):
            share = limit_share or 0.0
            found.append(
                {"asked": "share of the limit", "at_least": ask.least, "measured": share, "met": share >= ask.least}
            )
        elif isinstance(ask, Cost):
            cost = round(medians["tfm"] / medians[ask.peer] - 1, 4)
            of = f"more time than {ask.peer}, as a share"
            found.append({"asked": of, "at_most": ask.most, "measured": cost, "met": cost <= ask.most})
        else:
            over = round(medians["tfm"] - base, 6)
            of = "bytes beyond the base" if base else "seconds"
            found.append({"asked": of, "at_most": ask.most, "measured": over, "met": over <= ask.most})
    return found
