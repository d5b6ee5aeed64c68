"""Compile the CPU kernels with AddressSanitizer, under the name that mlxrt opens: python -m tests.long.build_asan.

Run it in a copy of the checkout; then, there, python -m tests.long.mutate_gguf --count 200 with the environment that is
printed. Remove mlxrt/kernels/cpu/__pycache__ afterwards.
"""

import subprocess
import sys

from mlxrt.kernels.cpu import build


def main() -> int:
    path = build.SOURCES / "__pycache__" / build.library_name()
    path.parent.mkdir(exist_ok=True)
    sources = sorted(map(str, build.SOURCES.glob("*.c")))
    flags = ("-O1", "-g", "-march=native", "-fsanitize=address", "-fno-omit-frame-pointer", *build.FLAGS)
    subprocess.run(["gcc", *flags, *sources, "-o", str(path), *build.LIBRARIES], check=True)
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libstdc++.so")]  # it must find both
    found = [subprocess.run(["gcc", name], capture_output=True, text=True, check=True).stdout for name in names]
    print(f'LD_PRELOAD="{" ".join(map(str.strip, found))}" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1')
    return 0


if __name__ == "__main__":
    sys.exit(main())
