"""What sampling asks of the logits of a token: the Python side of kernels/softmax.py, without Numba at run time."""

import math

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry
from tfm.kernels.packing import data_address
from tfm.kernels.records import LANES

SUM_EXPONENTIALS = Entry("tfm.kernels.softmax:sum_exponentials", "iii")


def log_sum_exp(logits_V: npt.NDArray[np.float32]) -> float:
    """log(sum(exp(logits))), right to about 1e-7; NaN where a logit is not finite.

    A kernel: with NumPy a greedy choice took 155 us of the 2 to 3 ms of a token, and takes 95 so.
    """
    size = len(logits_V)
    if size % LANES or logits_V.dtype != np.float32 or not logits_V.flags.carray:
        padded_V = np.zeros(size + -size % LANES, np.float32)
        padded_V[:size] = logits_V
        logits_V = padded_V
    largest_and_sum = np.empty(2)
    SUM_EXPONENTIALS(data_address(logits_V), size, data_address(largest_and_sum))
    largest, total = largest_and_sum
    return float(largest) + math.log(float(total))
