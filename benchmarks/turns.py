"""Sides that take turns: what else goes on on the machine, its clock and its temperature fall on all of them."""

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asked import verdicts


class Worker:
    """A side that is loaded; it runs when asked and should be asleep otherwise."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.idle_s = self.idle_cpu_s = 0.0
        self.about = self._answer()

    def run(
        self, ids: Sequence[int] = (), rows: int = 1, depth: int = 0, batch: int = 1,
        limits: Mapping[str, object] | None = None, bytes: float = 0.0,
    ) -> dict:  # fmt: skip
        """The answer to a request; see serve.py."""
        assert self._process.stdin is not None
        request = {"ids": list(ids), "rows": rows, "depth": depth, "batch": batch, "limits": limits, "bytes": bytes}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.idle_s += answer["idle_s"]
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer

    def close(self) -> None:
        """End it and wait for that."""
        self._process.communicate()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{os.path.basename(self._process.args[1])} ended with status {self._process.wait()}")
        return json.loads(line)


def limit_share(limits_s: Sequence[float], samples_s: Sequence[float]) -> float:
    """The median of the turns' shares: memory changes between turns, medians of each side would not be of one turn."""
    return round(statistics.median(limit / took for limit, took in zip(limits_s, samples_s, strict=True)), 3)


@dataclass
class Test:
    """A thing to measure: for each side a function that gives the seconds (or bytes) of one run, the fewer the better.

    tokens: how many a run takes. limits_s: the least that the machine allowed tfm in each turn, and limit what that is
    bounded by. base: what does not count of what is asked. times: turns for each repetition.
    """

    name: str
    title: str
    runs: Mapping[str, Callable[[], float]]
    tokens: int | None = None
    unit: str = "s"
    warm: bool = True
    base: int = 0
    times: int = 1
    limits_s: list[float] = field(default_factory=list)
    limit: str | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, repetitions: int) -> None:
        """Once each to warm up, then in turns."""
        for run in self.runs.values() if self.warm else ():
            run()
        self.limits_s.clear()
        self.samples = {side: [] for side in self.runs}
        for _ in range(self.times * repetitions):
            for side, run in self.runs.items():
                self.samples[side].append(round(run(), 6))

    def result(self) -> dict[str, object]:
        """Samples, medians, how many times faster tfm is, its share of the limit, and what is asked."""
        medians = {side: statistics.median(samples) for side, samples in self.samples.items()}
        sides = {
            side: {f"samples_{self.unit}": samples, f"median_{self.unit}": medians[side]}
            for side, samples in self.samples.items()
        }
        if self.tokens:
            for side, median in medians.items():
                sides[side]["median_tok_s"] = round(self.tokens / median, 2)
        result: dict[str, object] = {"test": self.name, "title": self.title, "tokens": self.tokens, "sides": sides}
        peers = {side: median for side, median in medians.items() if side != "tfm"}
        if peers:
            result["best_peer"] = min(peers, key=peers.__getitem__)
            result["times_faster"] = {side: round(median / medians["tfm"], 3) for side, median in peers.items()}
        share = None
        if self.limits_s:
            share = limit_share(self.limits_s, self.samples["tfm"])
            result |= {"limit": self.limit, "limits_s": self.limits_s, "limit_share": share}
        if self.base:
            result["base_bytes"] = self.base
        return result | {"asked": verdicts(self.name, medians, share, self.base)}
