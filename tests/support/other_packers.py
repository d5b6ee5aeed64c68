"""Quantised matrices as GPTQ, AWQ and compressed-tensors store them, written number by number from their definitions.

`Drawn` also gives the value every number stands for, in float64.
"""

from dataclasses import dataclass

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, lowest first


@dataclass
class Drawn:
    """q [in, out], zero and scale [groups, out], and the group of every input."""

    q: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    group: np.ndarray
    bits: int

    @property
    def values(self) -> np.ndarray:
        """[out, in], float64."""
        zero, scale = self.zero[self.group].astype(np.float64), self.scale[self.group].astype(np.float64)
        return ((self.q.astype(np.float64) - zero) * scale).T


def draw(out: int, columns: int, bits: int, size: int, *, seed: int, symmetric=False, shuffled=False) -> Drawn:
    luck = np.random.default_rng(seed)
    size = columns if size == -1 else size
    groups = -(-columns // size)
    group = np.arange(columns) // size
    if shuffled:
        group = luck.permutation(group)
    zero = np.full((groups, out), 1 << (bits - 1)) if symmetric else luck.integers(1, 1 << bits, (groups, out))
    scale = luck.uniform(0.001, 0.03, (groups, out)).astype(np.float16)
    return Drawn(luck.integers(0, 1 << bits, (columns, out)), zero, scale, group, bits)


def stream(numbers, bits: int) -> list[int]:
    """Numbers as 32-bit words, one after another from the lowest bit on; a number may cross two words."""
    whole = sum(int(n) << (bits * i) for i, n in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    return [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


def signed(rows) -> np.ndarray:
    return np.array(rows, np.uint32).view(np.int32)


def gptq(d: Drawn, *, less: int, index: bool, zeros: bool = True) -> dict[str, np.ndarray]:
    parts = {"qweight": signed([stream(column, d.bits) for column in d.q.T]).T.copy(), "scales": d.scale}
    if zeros:
        parts["qzeros"] = signed([stream(row - less, d.bits) for row in d.zero])
    return parts | ({"g_idx": d.group.astype(np.int32)} if index else {})


def interleaved(row) -> list[int]:
    words = []
    for eight in np.asarray(row).reshape(-1, 8):
        words.append(sum(int(eight[output]) << (4 * nibble) for nibble, output in enumerate(AWQ_ORDER)))
    return words


def awq(d: Drawn) -> dict[str, np.ndarray]:
    return {
        "qweight": signed([interleaved(row) for row in d.q]),
        "qzeros": signed([interleaved(row) for row in d.zero]),
        "scales": d.scale,
    }


def compressed(d: Drawn, *, zeros: bool, index: bool) -> dict[str, np.ndarray]:
    """Numbers and zeros are signed; the packer adds half the range."""
    parts = {
        "weight_packed": signed([stream(row, d.bits) for row in d.q.T]),
        "weight_scale": d.scale.T.copy(),
        "weight_shape": np.array(d.q.T.shape, np.int64),
    }
    if zeros:
        # packed along the outputs: [out * bits / 32, groups]
        parts["weight_zero_point"] = signed([stream(outputs, d.bits) for outputs in d.zero]).T.copy()
    return parts | ({"weight_g_idx": d.group.astype(np.int32)} if index else {})


def e4m3(code: int) -> float:
    """The float8 of a byte: sign, four bits of exponent (bias 7), three of fraction, no infinities."""
    code = int(code)
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
