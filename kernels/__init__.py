"""Arrays in, arrays out: SIMD, the thread team, matmul, softmax, attention. Knows no model, file or option."""
