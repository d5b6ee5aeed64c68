"""CPU speed beside llama.cpp, file by file: python -m tests.long.check_cpu_speed [--minutes 3] [--clock processor].

SmolLM2 as published (Q4_1) and in Q8_0, TinyLlama in Q4_K_M: decode, prefill and batches of 4 by `mlxrt bench`, engines
in turn, 2 threads each. Wall clock on a calm machine. The files are written from the published ones, into the cache.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from mlxrt.weights import GgufCheckpoint
from mlxrt.weights.convert.gguf import convert_to_gguf
from mlxrt.weights.source.cache_dir import cache_root
from tests.long.check_real_models import SOURCES


def rewrite(source: Path, path: Path, kind: str) -> Path:
    """The same model with its matrices in another kind."""
    if not path.exists():
        convert_to_gguf(GgufCheckpoint(source), path, kind)
    return path


def write_files() -> dict[str, Path]:
    folder = cache_root() / "test-models"
    smollm2, tinyllama = SOURCES["smollm2"](), SOURCES["tinyllama"]()
    return {
        "Q4_1": smollm2,
        "Q8_0": rewrite(smollm2, folder / "smollm2-q8_0.gguf", "q8_0"),
        "Q4_K": rewrite(tinyllama, folder / "tinyllama-q4_k_m.gguf", "q4_k_m"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3, help="for each file")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--only", choices=("Q4_1", "Q8_0", "Q4_K"))
    parser.add_argument("--write", action="store_true", help="write the files, measure nothing")
    options = parser.parse_args()
    status = 0
    for kind, path in write_files().items():
        if options.write or options.only not in (None, kind):
            continue
        print(f"== {kind}: {path.name}", flush=True)
        command = [sys.executable, "-m", "mlxrt", "bench", "decode", "prefill", "batch", "--model", str(path)]
        command += ["--peer", "llama.cpp", "--threads", "2", "--requests", "4", "--lengths", "128", "--tokens", "64"]
        command += ["--minutes", str(options.minutes), "--clock", options.clock]
        status |= subprocess.run(command).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
