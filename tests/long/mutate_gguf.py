"""Damaged GGUF files, answered: every one gives a typed error or the numbers that its unpacked weights give.

    python -m tests.long.mutate_gguf [--count 1000] [--seed 0] [--save FOLDER]

Damaged are headers, metadata, kinds, sizes, blocks of every packed kind, and sets of split files. A child process loads
each file twice, with its packed weights (CPU kernels) and with `dequantise`, and compares their logits. Exit code 0: no
other exception, no death, no hang, no difference.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mlxrt.kernels.ops.k_quants import K_QUANT_HALVES, K_QUANTS, block_shape
from tests.support.fuzz.pool import Child
from tests.support.fuzz.seeds import FIXTURES, Gguf
from tests.support.llama_cpp_files import convert
from tests.support.tiny_files import CONFIG, float_weights, write_gguf

Files = dict[str, bytes]
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FAMILIES = ("qwen3_5_moe", "qwen3_next", "gemma4_mm", "gemma4_moe", "minimax_m2", "gpt_oss", "mixtral", "gemma3_text")
ODD = (0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 256, 257, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
TOKENS, SECONDS, TOLERANCE = [1, 5, 9, 30, 2, 7], 60, 2e-3


def k_quant_blocks(kind: str, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of one block, with scales that leave numbers of an ordinary size."""
    size, _ = block_shape(kind)
    blocks = rng.integers(0, 256, (rows, K_QUANTS[kind] // size, size), np.uint8)
    at, count = K_QUANT_HALVES[kind]
    halves = rng.uniform(1e-4, 1e-3, (*blocks.shape[:2], count)).astype(np.float16)
    blocks[..., at : at + 2 * count] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def make_seeds(folder: Path) -> dict[str, Files]:
    """A model for each packed kind, one for each converted family, and a set of split files."""
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    rng, seeds = np.random.default_rng(0), {}
    for kind in dict.fromkeys((*PACKED, *(k for k in K_QUANTS if k.upper() not in PACKED))):
        weights = {k: v * 0.1 if v.ndim == 2 else v for k, v in float_weights(config).items()}
        if kind in K_QUANTS:
            weights = {k: k_quant_blocks(kind, len(v), rng) if v.ndim == 2 else v for k, v in weights.items()}
        path = write_gguf(folder / f"{kind}.gguf", weights, config, kind.upper())
        seeds[kind] = {"x.gguf": path.read_bytes()}
    for family in FAMILIES:
        place = folder / family
        place.mkdir()
        for name in ("config.json", "model.safetensors"):
            text = (FIXTURES / family / name).read_bytes()
            (place / name).write_bytes(text.replace(b'"swiglu_alpha": 1.3', b'"swiglu_alpha": 1.702'))
        try:
            seeds[family] = {"x.gguf": convert(place, folder / f"{family}.gguf").read_bytes()}
        except AssertionError:  # a fixture has a number that GGUF has no key for
            continue
    seeds["split"] = split_set(folder, seeds["q4_k"]["x.gguf"])
    return seeds


def split_set(folder: Path, blob: bytes, count: int = 3) -> Files:
    """A file as llama.cpp's gguf-split writes it: metadata in the first part, tensors in turn."""
    whole, files = Gguf(blob), {}
    sizes = [*sorted(r["offset"] for r in whole.tree["tensors"]), len(whole.data)]
    for part in range(count):
        records, data = [], b""
        for record in whole.tree["tensors"][part::count]:
            end = sizes[sizes.index(record["offset"]) + 1]
            records.append(record | {"offset": len(data)})
            data += whole.data[record["offset"] : end]
        metadata = dict(whole.tree["metadata"]) if part == 0 else {}
        metadata |= {"split.no": part, "split.count": count, "split.tensors.count": len(whole.tree["tensors"])}
        piece = Gguf(blob)
        piece.data = data
        files[f"x-{part + 1:05}-of-{count:05}.gguf"] = piece.encode({"metadata": metadata, "tensors": records})
    return files


def damage_header(blob: bytes, rng: random.Random) -> bytes:
    size, out = Gguf(blob).start, bytearray(blob)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(size)
        if rng.random() < 0.5:
            out[at] = rng.randrange(256)
        else:
            out[at : at + 8] = rng.choice(ODD).to_bytes(8, "little")
    return bytes(out)


def damage_size(blob: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(1, len(blob))
    return blob[:cut] if rng.random() < 0.7 else blob + rng.randbytes(cut % 4096)


def damage_tensor(blob: bytes, rng: random.Random) -> bytes:
    """Another kind, other dimensions, another place, another name."""
    whole = Gguf(blob)
    record, what = rng.choice(whole.tree["tensors"]), rng.choice(("kind", "dims", "offset", "name", "drop"))
    if what == "kind":
        record["kind"] = rng.choice((0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 20, 23, 30, 39, rng.choice(ODD)))
    elif what == "dims":
        record["dims"][rng.randrange(len(record["dims"]))] = rng.choice(ODD)
    elif what == "offset":
        record["offset"] = rng.choice((*ODD, record["offset"] + 32, record["offset"] + 1))
    elif what == "name":
        record["name"] = rng.choice(whole.tree["tensors"])["name"] + rng.choice(("", "x", ".weight"))
    else:
        whole.tree["tensors"].remove(record)
    return whole.encode(whole.tree)


def damage_metadata(blob: bytes, rng: random.Random) -> bytes:
    whole = Gguf(blob)
    key = rng.choice(list(whole.tree["metadata"]))
    if rng.random() < 0.2:
        del whole.tree["metadata"][key]
    else:
        whole.tree["metadata"][key] = rng.choice((*ODD, -1, 0.0, float("nan"), 1e38, "x", "llama", True, [], [1, 2]))
    return whole.encode(whole.tree)


def damage_blocks(blob: bytes, rng: random.Random) -> bytes:
    start, out = Gguf(blob).start, bytearray(blob)
    for _ in range(rng.choice((1, 3, 50))):
        at = rng.randrange(start, len(out))
        count = rng.choice((1, 2, 16, 210))
        out[at : at + count] = (rng.choice((b"\xff", b"\x00", b"\x7c")) * count if rng.random() < 0.5
                                else rng.randbytes(count))[: len(out) - at]  # fmt: skip
    return bytes(out)


def damage_set(files: Files, rng: random.Random) -> Files:
    """Parts missing, exchanged, renamed, with other numbers, or damaged like any file."""
    names, out = sorted(files), dict(files)
    one, other = rng.sample(names, 2)
    what = rng.choice(("missing", "exchanged", "twice", "numbers", "damaged", "damaged", "whole"))
    if what == "missing":
        del out[one]
    elif what == "exchanged":
        out[one], out[other] = out[other], out[one]
    elif what == "twice":
        out[one] = out[other]
    elif what == "numbers":
        part = Gguf(out[one])
        part.tree["metadata"][rng.choice(("split.no", "split.count", "split.tensors.count"))] = rng.choice((*ODD, "x"))
        out[one] = part.encode(part.tree)
    elif what == "damaged":
        out[one] = rng.choice(DAMAGES)(out[one], rng)
    return out


DAMAGES = (damage_header, damage_size, damage_tensor, damage_metadata, damage_blocks)


def serve(pipe: Connection, log: str) -> None:
    from tests.support.fuzz import child

    child.weights = child.text = lambda path: None
    child.whole = compare
    child.serve(pipe, log)


def compare(path: Path) -> None:
    """The packed model's logits and the unpacked one's."""
    import mlxrt
    from mlxrt.errors import MlxrtError

    found = []
    for dequantise in (False, True):
        options = mlxrt.EngineConfig(kv_memory="32M", dequantise=dequantise, dtype="float32", prefix_cache=False)
        try:
            with mlxrt.load(str(path), options) as engine:
                tokens = [t % engine.model.config.vocab_size for t in TOKENS]
                chunk = None if dequantise else 1 + path.stat().st_size % 6  # the kernels' ways by number of rows
                found.append((np.array(engine.score(tokens, chunk)), engine.generate(tokens, max_tokens=4).tokens))
        except MlxrtError as error:
            found.append(error)
    errors = [x for x in found if isinstance(x, MlxrtError)]
    if len(errors) == 1 and "NaN" not in str(errors[0]) and "float16" not in str(errors[0]):
        raise RuntimeError(f"packed or unpacked alone was refused: {errors[0]}")
    if errors:
        raise errors[0]
    packed, plain = (x[0] for x in found)
    if not (np.isfinite(packed) == np.isfinite(plain)).all():
        raise RuntimeError("finite and infinite logits differ between packed and unpacked weights")
    far = np.abs(np.where(np.isfinite(plain), packed - plain, 0)).max()
    largest = np.abs(plain[np.isfinite(plain)]).max(initial=1.0)
    if far > TOLERANCE * largest:
        raise RuntimeError(f"packed and unpacked weights differ by {far} of {largest}")


def write(files: Files, folder: Path) -> Path:
    for old in folder.iterdir():
        old.unlink()
    for name, blob in files.items():
        (folder / name).write_bytes(blob)
    return folder / min(files)


def mutate(seeds: dict[str, Files], rng: random.Random) -> tuple[str, Files]:
    name = rng.choice((*seeds, "split", "split"))
    if name == "split":
        return "split set", damage_set(seeds[name], rng)
    damage = rng.choice((*DAMAGES, damage_blocks))
    return damage.__name__.removeprefix("damage_"), {"x.gguf": damage(seeds[name]["x.gguf"], rng)}


def run(count: int, seed: int, save: Path) -> int:
    rng, tally, bad = random.Random(seed), Counter(), 0
    with tempfile.TemporaryDirectory() as made:
        (place := Path(made) / "case").mkdir()
        (source := Path(made) / "seeds").mkdir()
        seeds, child = make_seeds(source), None
        cases = [("sound", files) for files in seeds.values()]
        for i in range(count + len(cases)):
            what, files = cases[i] if i < len(cases) else mutate(seeds, rng)
            child = child or Child(Path(made) / "log", serve)
            outcome, details = child.load(write(files, place), SECONDS)
            if outcome in ("died", "hung"):
                child.stop()
                child = None
            tally[what, outcome] += 1
            if outcome not in ("ok", "refused") or (what == "sound" and outcome != "ok"):
                bad += 1
                print(f"{i}: {what}: {outcome}: {details[-1500:]}", flush=True)
                (folder := save / str(i)).mkdir(parents=True, exist_ok=True)
                write(files, folder)
        if child:
            child.stop()
    for (what, outcome), n in sorted(tally.items()):
        print(f"{n:6} {what}: {outcome}")
    print(f"{count} damaged files, seed {seed}: {bad} wrong")
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("gguf-failures"))
    options = parser.parse_args()
    return run(options.count, options.seed, options.save)


if __name__ == "__main__":
    sys.exit(main())
