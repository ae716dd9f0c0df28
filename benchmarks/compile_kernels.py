"""Prints the seconds that it takes to make ready what a model runs, Numba's import included.

With an empty TFM_CACHE all of it is compiled.
"""

import time

start = time.perf_counter()

from tfm.engine.team import Team  # noqa: E402
from tfm.kernels.packing import PACK  # noqa: E402

Team.prepare()
PACK.prepare()
print(time.perf_counter() - start)
