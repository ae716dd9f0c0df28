#!/usr/bin/env bash
# Run the kernel tests on aarch64 under QEMU's user emulation:   bash tools/aarch64.sh FOLDER [TEST FILE ...]
#
# FOLDER gets an arm64 Debian with Python and the arm64 wheels of what tfm depends on, at the first run; a later run
# finds them. Debian's packages are only unpacked, so that neither binfmt nor a chroot is needed. On the host it takes
# Debian's mmdebstrap and qemu-user-static, and any Python 3.11 or newer with pip.
#
# The tests run for each CPU below: its name is what the kernels are compiled for, and QEMU offers at most what it has,
# except that QEMU has no Neoverse V1 before version 8 and is asked for everything that it can do.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/test_simd.py tests/test_kernels.py tests/test_matmul.py)

if [ ! -e "$folder/root/usr/bin/python3.11" ]; then
    packages=python3.11,libpython3.11-stdlib,libgcc-s1,libstdc++6
    mmdebstrap --variant=extract --arch=arm64 --include=$packages bookworm "$folder/root" http://deb.debian.org/debian
fi
if [ ! -e "$folder/wheels/pytest" ]; then
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], "pytest", sep="\n")' \
        > "$folder/requirements.txt"
    platforms=()
    for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_aarch64"); done
    python3 -m pip install --quiet --target "$folder/wheels" "${platforms[@]}" --platform manylinux2014_aarch64 \
        --implementation cp --python-version 3.11 --only-binary :all: --requirement "$folder/requirements.txt"
fi

# .ci/types holds this checkout under the names by which it is imported.
path="$folder/wheels:$PWD/.ci/types:$PWD/tests"
qemu-aarch64-static --version | head -n 1
status=0
for cpu in "max neoverse-v1" "neoverse-n1 neoverse-n1" "cortex-a72 cortex-a72"; do
    read -r emulated compiled <<< "$cpu"
    echo "$(date -u +%F) QEMU CPU $emulated, compiled for $compiled: ${tests[*]}"
    nice -n 19 qemu-aarch64-static -cpu "$emulated" -L "$folder/root" \
        -E NUMBA_CPU_NAME="$compiled" -E TFM_CACHE="$folder/cache" -E PYTHONPATH="$path" \
        "$folder/root/usr/bin/python3.11" -m pytest -p no:cacheprovider "${tests[@]}" || status=1
done
exit $status
