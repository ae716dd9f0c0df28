"""Machine code of the matmul micro-kernels for any CPU: python tools/assembly.py TRIPLE CPU FEATURES [KERNEL ...]

    python tools/assembly.py aarch64-unknown-linux-gnu neoverse-n1 "" q4

prints it, each kernel after a line `# kernel NAME`. A kernel is a weight format, for a whole tile of rows, or with
`_row` for one row. The kernels are typed and linked as ever, with the paths of that CPU; LLVM's passes and back end
then run for it in the place of the CPU at hand.
"""

import re
import sys
from typing import Any

from tfm.kernels import targets
from tfm.kernels.jit import jit, linked

FORMATS = ("q4", "q8", "f32", "bf16", "f16")
KERNELS = tuple(name + end for name in FORMATS for end in ("", "_row"))


def entry(kernel: str) -> Any:
    """A compiled function of addresses around a micro-kernel."""
    from tfm.kernels import matmul
    from tfm.kernels.simd import TILE

    name, _, row = kernel.partition("_")
    (module,) = (module for module in matmul.FORMATS if module.__name__.endswith(f".{name}"))
    matrix_at, activations_at = matmul.matrix_at, matmul.activations_at
    tile = (module.row_kernel or module.tile_kernel(1)) if row else module.tile_kernel(TILE)

    @jit
    def run(matrix, panel, acts, out, stride):
        tile(matrix_at(matrix), panel, activations_at(acts), 0, 0, out, stride, False)

    return run


def assembly(kernel: str) -> str:
    import llvmlite.binding as llvm
    from numba.core.codegen import CPUCodeLibrary
    from numba.core.registry import cpu_target

    target = targets.current_target()
    machine = target.machine()
    _, library = linked(entry(kernel), "iiiii")
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
