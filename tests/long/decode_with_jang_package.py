"""Run by an interpreter that has the public `jang` package: a checkpoint's matrices as that package decodes them.

usage: python package_decode.py BUNDLE WIDTHS.json OUT.npz   (WIDTHS: module -> inputs, which no 3-bit tensor tells)
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from jang_tools.affine import dequantize_affine_numpy
from jang_tools.turboquant.codebook import compute_codebook
from jang_tools.turboquant.pipeline import unpack_bits
from jang_tools.turboquant.rotation import generate_random_signs, hadamard_inverse


def affine(path, arrays, width, hadamard):
    w, s, b = (np.array(arrays[f"{path}.{part}"]) for part in ("weight", "scales", "biases"))
    bits, group = 32 * w.shape[-1] // width, width // s.shape[-1]
    flat = [a.reshape(-1, a.shape[-1]) for a in (w, s, b)]
    rows = dequantize_affine_numpy(*flat, bits=bits, group_size=group)
    rotated = (
        hadamard and bits >= 3 and not any(word in f"{path}.weight" for word in ("embed", "lm_head", "norm", ".gate."))
    )
    if rotated:
        rows = np.array(hadamard_inverse(mx.array(rows), generate_random_signs(width, seed=42)))
    return rows.reshape(*w.shape[:-1], width)


def jangtq(path, arrays, width, seed):
    packed, norms = np.array(arrays[f"{path}.tq_packed"]), np.array(arrays[f"{path}.tq_norms"]).astype(np.float32)
    bits = int(arrays[f"{path}.tq_bits"].item())
    book = np.array(compute_codebook(width, bits), dtype=np.float32)
    lead = packed.shape[:-1]
    rows = [np.array(unpack_bits(mx.array(row), bits, width)) for row in packed.reshape(-1, packed.shape[-1])]
    values = mx.array(book[np.stack(rows)] * norms.reshape(-1, 1))
    return np.array(hadamard_inverse(values, generate_random_signs(width, seed=seed))).reshape(*lead, width)


def main(checkpoint, widths, out):
    labels = json.loads((Path(checkpoint) / "jang_config.json").read_text())
    hadamard = bool(labels.get("quantization", {}).get("hadamard_rotation"))
    widths = json.loads(Path(widths).read_text())
    arrays = {}
    for file in sorted(Path(checkpoint).glob("model*.safetensors")):
        arrays |= mx.load(str(file))
    made = {}
    for name, array in arrays.items():
        path, _, part = name.rpartition(".")
        if part == "scales":
            made[f"{path}.weight"] = affine(path, arrays, widths[path], hadamard)
        elif part == "tq_packed":
            made[f"{path}.weight"] = jangtq(path, arrays, widths[path], labels.get("mxtq_seed", 42))
        elif f"{path}.scales" not in arrays and part not in ("tq_norms", "tq_bits"):
            made[name] = np.array(array.astype(mx.float32))
    np.savez(out, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
