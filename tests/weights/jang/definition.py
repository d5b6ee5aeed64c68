"""The formats in numpy float64, written from their definition and sharing nothing with mlxrt but the levels' table."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mlxrt.models.quantized.centroids import CUBIC, lloyd_max, odd_cubic


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix, normalised."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def rotation(width: int, seed: int | None = 42, blocks: list[int] | None = None) -> np.ndarray:
    """R with R v = the rotated v."""
    blocks = blocks or [1 << b for b in range(31, -1, -1) if width >> b & 1]
    r, at = np.zeros((width, width)), 0
    for n in blocks:
        r[at : at + n, at : at + n] = hadamard(n)
        at += n
    signs = np.ones(width) if seed is None else np.random.default_rng(seed).choice([-1.0, 1.0], width)
    return r * signs


def stream(q: np.ndarray, bits: int) -> np.ndarray:
    """Quantised values [..., n] as one stream of bits per row: bytes."""
    each = (q[..., None].astype(np.int64) >> np.arange(bits)) & 1
    return np.packbits(each.reshape(*q.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def pack_aligned(q: np.ndarray, bits: int) -> np.ndarray:
    """Quantised values [..., n] packed into uint32, none crossing a border."""
    per = 32 // bits
    words = np.zeros((*q.shape[:-1], -(-q.shape[-1] // per)), np.uint32)
    for k in range(q.shape[-1]):
        words[..., k // per] |= q[..., k].astype(np.uint32) << np.uint32(k % per * bits)
    return words


def affine(w: np.ndarray, bits: int, group: int, rotated: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(tensors, the matrix they stand for)."""
    r = rotation(w.shape[-1]) if rotated else np.eye(w.shape[-1])
    rows = (w.astype(np.float64) @ r.T).reshape(*w.shape[:-1], -1, group)
    low, high = rows.min(-1), rows.max(-1)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-4).astype(np.float16)
    bias = low.astype(np.float16)
    wide = scale.astype(np.float64)[..., None], bias.astype(np.float64)[..., None]
    q = np.clip(np.rint((rows - wide[1]) / wide[0]), 0, 2**bits - 1)
    true = (q * wide[0] + wide[1]).reshape(w.shape) @ r
    words = np.ascontiguousarray(stream(q.reshape(w.shape), bits)).view(np.uint32)
    return {"weight": words, "scales": scale, "biases": bias}, true


def jangtq(w: np.ndarray, bits: int, seed: int = 42, awq: np.ndarray | None = None):
    """(tensors, the matrix they stand for); `awq` [in] or [E, in] divides the input."""
    by = np.ones(w.shape[-1]) if awq is None else awq.astype(np.float64)
    by = by if by.ndim == 1 else by[:, None, :]
    r, levels = rotation(w.shape[-1], seed), lloyd_max(w.shape[-1], bits).astype(np.float64)
    rows = (w.astype(np.float64) * by) @ r.T
    norms = np.sqrt((rows**2).sum(-1)).astype(np.float16)
    unit = rows / np.maximum(np.sqrt((rows**2).sum(-1)), 1e-10)[..., None]
    q = (unit[..., None] > (levels[:-1] + levels[1:]) / 2).sum(-1)
    true = (levels[q] * norms.astype(np.float64)[..., None]) @ r / by
    tensors = {"tq_packed": pack_aligned(q, bits), "tq_norms": norms, "tq_bits": np.array([bits], np.uint8)}
    return tensors | ({"awq_scale": awq} if awq is not None else {}), true


def jangh(w: np.ndarray, bits: int, rotated: bool = True):
    r = rotation(w.shape[-1], None, [32] * (w.shape[-1] // 32)) if rotated else np.eye(w.shape[-1])
    levels, rows = odd_cubic(bits).astype(np.float64), w.astype(np.float64) @ r.T
    scale = (np.abs(rows).max(-1) / levels[-1]).astype(np.float16)
    unit = rows / scale.astype(np.float64)[..., None]
    q = np.abs(unit[..., None] - levels).argmin(-1)
    true = (levels[q] * scale.astype(np.float64)[..., None]) @ r
    return {"tq2_packed": np.ascontiguousarray(stream(q, bits)).view(np.uint32), "tq2_scales": scale}, true


def jangh_config(rotation: str = "hadamard32") -> dict:
    books = {str(b): {"alpha": a, "beta": c, "levels": odd_cubic(b).tolist()} for b, (a, c) in CUBIC.items()}
    same = {"packing": "lsb-bitstream", "scale_dtype": "float16", "codebook_family": "odd-cubic"}
    return {"version": 2, "rotation": rotation, "codebooks": books, **same}


def vectors(w: np.ndarray, count: int, length: int, seed: int = 0, dtype=np.uint16):
    """Random vectors out of the matrix itself; every run of the rows takes the nearest."""
    runs = w.reshape(-1, length).astype(np.float64)
    book = runs[np.random.default_rng(seed).choice(len(runs), count)].astype(np.float16)
    q = ((runs[:, None] - book.astype(np.float64)) ** 2).sum(-1).argmin(-1).astype(dtype)
    true = book.astype(np.float64)[q].reshape(w.shape)
    return {"codes": q if w.shape[-1] % length else q.reshape(*w.shape[:-1], -1), "codebook": book}, true


def first_version(w: np.ndarray, widths: np.ndarray, *, zeros: bool, maps: bool):
    """JANG 1: blocks of 64 in a row; `widths` bits for each, `maps` as 1.0 has them, `zeros` as 1.0 and 1.1."""
    count, flat = w.size, w.reshape(-1).astype(np.float64)
    blocks = -(-count // 64)
    scale, bias, true, parts = [], [], np.zeros(count), []
    for i in range(blocks):
        bits, run = int(widths[i]), flat[64 * i : 64 * i + 64]
        s = np.float16(max((run.max() - run.min()) / (2**bits - 1), 1e-4))
        z = np.float16(np.rint(-run.min() / np.float64(s)))
        b = np.float16(run.min())
        low = -np.float64(s) * np.float64(z) if zeros else np.float64(b)
        q = np.clip(np.rint((run - low) / np.float64(s)), 0, 2**bits - 1)
        true[64 * i : 64 * i + 64] = q * np.float64(s) + low
        parts.append(((q[:, None].astype(np.int64) >> np.arange(bits)) & 1).reshape(-1).astype(np.uint8))
        scale.append(s)
        bias.append(z if zeros else b)
    data = np.packbits(np.concatenate(parts), bitorder="little")
    made = {"qweight": data, "scales": np.array(scale), "shape": np.array(w.shape, np.int64)}
    made["zeros" if zeros else "biases"] = np.array(bias)
    if maps:
        begins = np.concatenate([[0], np.cumsum(widths * 8)[:-1]]).astype(np.uint32)
        made |= {"bit_map": widths.astype(np.uint8), "block_offsets": begins}
    else:
        made["bits"] = np.array([widths[0]], np.uint8)
    return made, true.reshape(w.shape)


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], labels: dict | None = None, **names) -> Path:
    """A folder with one shard. names: `labels_file`, `shard`, `index`."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = names.get("shard", "model-00001-of-00001.safetensors")
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / shard, metadata={"format": "mlx"})
    if "index" in names:
        mapped = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
        (folder / names["index"]).write_text(json.dumps(mapped))
    (folder / "config.json").write_text(json.dumps(config))
    if labels is not None:
        (folder / names.get("labels_file", "jang_config.json")).write_text(json.dumps(labels))
    return folder
