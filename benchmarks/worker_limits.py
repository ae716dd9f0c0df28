"""What this machine can do at most, whenever it is asked: a worker. See serve.py.

A request with `bytes` is answered with the time that reading so many takes, another one with what tfm bench measures.
"""

import time
from dataclasses import asdict

from serve import Request, serve, settings

from tfm.engine import roofline


def main(threads: int, passes: int) -> None:
    roofline.prepare()
    loops = roofline.Loops(threads)

    def run(request: Request) -> dict[str, object]:
        if request.bytes:
            return {"seconds": loops.read_seconds(request.bytes), "top": 0}
        start = time.perf_counter()
        limits = asdict(loops.measure(passes))
        return {"seconds": time.perf_counter() - start, "top": 0, "limits": limits}

    serve({}, run)


if __name__ == "__main__":
    main(**settings())
