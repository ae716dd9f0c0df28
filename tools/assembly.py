"""Machine code of the matmul micro-kernels for any CPU: python tools/assembly.py TRIPLE CPU FEATURES [KERNEL ...]

    python tools/assembly.py aarch64-unknown-linux-gnu neoverse-n1 "" q4

prints it, each kernel after a line `# kernel NAME`. A kernel is a weight format, for a whole tile of rows, or with
`_row` for one row; the formats in floating point share the kernel `float` for many rows. The kernels are typed and
linked as ever, with the paths of that CPU; LLVM's passes and back end then run for it in the place of the CPU at hand.
"""

import re
import sys
from typing import Any

from tfm.kernels import targets
from tfm.kernels.jit import jit, linked

KERNELS = ("q4", "q4_row", "q8", "q8_row", "float", "f32_row", "bf16_row", "f16_row", "bf12_row")


def entry(kernel: str) -> Any:
    """A compiled function of addresses around a micro-kernel."""
    from tfm.kernels import matmul
    from tfm.kernels.formats import affine, bands, finish
    from tfm.kernels.simd import STREAMS, TILE

    matrix_at, activations_at = matmul.matrix_at, matmul.activations_at
    if kernel == "float":
        return bands.many
    name, _, row = kernel.partition("_")
    (module,) = (module for module in matmul.FORMATS if module.__name__.endswith(f".{name}"))
    if module.QUANTIZED:
        rows = 1 if row else TILE
        product = affine.tile_kernel(module.dots_of_group(rows), module.GROUP_BYTES, rows, STREAMS if row else 1)

        @jit
        def tile(matrix, p, acts, t, out, stride, add):
            product(matrix, p, p, acts, t, out, stride, add)
    else:
        product = module.band_rows if STREAMS == 2 else module.band_row

        @jit
        def tile(matrix, p, acts, t, out, stride, add):
            for sums in product(matrix, p, acts.values + t * acts.stride, p):
                finish(sums, 0, out, stride, add)

    @jit
    def run(matrix, p, acts, out, stride, t, add):
        tile(matrix_at(matrix), p, activations_at(acts), t, out, stride, add != 0)

    return run


def assembly(kernel: str) -> str:
    import llvmlite.binding as llvm
    from numba.core.codegen import CPUCodeLibrary
    from numba.core.registry import cpu_target

    target = targets.current_target()
    machine = target.machine()
    run = entry(kernel)
    _, library = linked(run, "i" * run.py_func.__code__.co_argcount)
    code = re.sub(
        r'^target triple = ".*"$', f'target triple = "{target.triple}"', str(library._final_module), flags=re.M
    )
    layout = f'target datalayout = "{machine.target_data}"'
    module = llvm.parse_assembly(re.sub(r'^target datalayout = ".*"$', layout, code, flags=re.M))
    codegen = cpu_target.target_context.codegen()
    own, codegen._tm = codegen._tm, machine
    library._final_module = module
    CPUCodeLibrary._optimize_final_module(library)
    codegen._tm = own
    return str(machine.emit_assembly(module))


def main(triple: str, cpu: str, features: str, *kernels: str) -> None:
    targets.compile_for(targets.Target(triple, cpu, features))
    for kernel in kernels or KERNELS:
        print(f"# kernel {kernel}\n{assembly(kernel)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
