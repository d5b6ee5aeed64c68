"""CPU speed beside llama.cpp, file by file: python -m tests.long.check_cpu_speed [--minutes 3] [--clock processor].

SmolLM2 as published (Q4_1) and in Q8_0, TinyLlama in Q4_K: decode, prefill and batches of 4 by `mlxrt bench`, engines
in turn, 2 threads each. Wall clock on a calm machine. The files are written from the published ones, into the cache.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from mlxrt.weights.source.cache_dir import cache_root
from tests.long.check_real_models import SOURCES

Type = gguf.GGMLQuantizationType


def quantize_q4_k(values: np.ndarray) -> np.ndarray:
    """Rows of a multiple of 256 as Q4_K: plain minima and maxima of every 32 numbers."""
    groups = values.reshape(*values.shape[:-1], -1, 8, 32).astype(np.float32)
    low = np.minimum(groups.min(-1), 0)
    scale = np.maximum((groups.max(-1) - low) / 15, 1e-8)
    d, dmin = ((x.max(-1) / 63).astype(np.float16) for x in (scale, np.maximum(-low, 1e-8)))
    wide = [x.astype(np.float32)[..., None] for x in (d, dmin)]
    sc, m = (np.clip(np.rint(x / np.maximum(w, 1e-12)), 0, 63) for x, w in zip((scale, -low), wide))
    step, offset = np.maximum(sc * wide[0], 1e-12)[..., None], (m * wide[1])[..., None]
    codes = np.clip(np.rint((groups + offset) / step), 0, 15).astype(np.uint8)
    sc, m = sc.astype(np.uint8), m.astype(np.uint8)
    head = np.concatenate([sc[..., :4] | sc[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6], axis=-1)
    tail = sc[..., 4:] & 15 | m[..., 4:] << 4
    packed = (codes[..., ::2, :] | codes[..., 1::2, :] << 4).reshape(*codes.shape[:-2], 128)
    halves = np.stack([d, dmin], axis=-1).view(np.uint8)
    return np.concatenate([halves, head, tail, packed], axis=-1).reshape(*values.shape[:-1], -1)


def rewrite(source: Path, path: Path, quantize: Callable[[np.ndarray], np.ndarray], kind: Type) -> Path:
    """The same model with its matrices in another kind."""
    if path.exists():
        return path
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path.with_suffix(".partial"), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1])
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quantize(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".partial").rename(path)
    return path


def write_files() -> dict[str, Path]:
    folder = cache_root() / "test-models"
    smollm2, tinyllama = SOURCES["smollm2"](), SOURCES["tinyllama"]()
    q8 = rewrite(smollm2, folder / "smollm2-q8_0.gguf", lambda x: gguf.quants.quantize(x, Type.Q8_0), Type.Q8_0)
    return {
        "Q4_1": smollm2,
        "Q8_0": q8,
        "Q4_K": rewrite(tinyllama, folder / "tinyllama-q4_k.gguf", quantize_q4_k, Type.Q4_K),
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
