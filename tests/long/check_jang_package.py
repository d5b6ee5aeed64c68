"""Bundles that the public `jang` package makes of fresh tiny models, loaded here, against its own decoded matrices;
checkpoints that we write of them, decoded there; and that both write the same JANGTQ codes.

usage: python -m tests.long.check_jang_package --jang PYTHON [--seed N] [--keep FOLDER]
PYTHON is an interpreter of a venv with jang==2.5.50, safetensors==0.7.0 (0.8 writes wrong arrays), numpy, mlx[cpu],
scikit-learn, tqdm, huggingface_hub and jinja2. Exit 1 when a checkpoint does not load or differs.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
import numpy as np
# isort: on

from mlxrt.engine.weight_size import build_skeleton
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.convert.convert import convert as convert_ours
from mlxrt.weights.convert.recipe import Recipe
from mlxrt.weights.convert.tensors import open_source

from ..weights.jang import sources
from ..weights.jang.float_model import close, float_logits

LIMIT = 1e-4
SMALL = {"head_dim": 48, "rotary_dim": 24}
MODELS = {
    "moe": (
        sources.qwen3_moe(hidden=192, inner=160, experts=6, used=2),
        [["JANG_2S"], ["JANG_4L"], ["JANG_3L", "--hadamard"]],
    ),
    "odd": (sources.qwen3(hidden=224, inner=352, head=56), [["JANG_2L"], ["JANG_4M"], ["JANG_3M", "--hadamard"]]),
    "tied": (sources.llama(hidden=128, inner=320, tied=True), [["JANG_1L"], ["JANG_6M"], ["JANG_4S", "--hadamard"]]),
    "minimax": (sources.minimax(hidden=192, inner=80, experts=7, **SMALL), [["JANGTQ2"], ["JANGTQ4"]]),
    # the package pads experts to 32, but for this profile fails to
    "minimaxk": (sources.minimax(hidden=192, inner=112, experts=32, **SMALL), [["JANGTQ_K"]]),
    "minimax3": (sources.minimax(hidden=320, inner=90, experts=5, **SMALL), [["JANGTQ3"]]),
}


def convert(python: str, source: Path, checkpoint: Path, profile: list[str]) -> None:
    if profile[0].startswith("JANGTQ"):
        call = [python, "-m", "jang_tools.convert_minimax_jangtq", str(source), str(checkpoint), profile[0]]
    else:
        call = [python, "-m", "jang_tools", "convert", str(source), "-o", str(checkpoint), "-p", *profile]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode or not list(checkpoint.glob("*.safetensors")):
        raise SystemExit(f"{' '.join(call)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def widths(config: dict) -> dict[str, int]:
    """Inputs of every module, under the checkpoint's names."""
    moe = "block_sparse_moe" if config["model_type"] == "minimax_m2" else "mlp"
    found = {}
    for path, module in build_skeleton(config).named_modules():
        if "weight" in module and module["weight"].ndim > 1:
            found[path.replace(".mlp.experts.", f".{moe}.switch_mlp.")] = module["weight"].shape[-1]
    return found


def decoded(python: str, checkpoint: Path, config: dict, work: Path) -> dict[str, np.ndarray]:
    (work / "widths.json").write_text(json.dumps(widths(config)))
    script = Path(__file__).with_name("decode_with_jang_package.py")
    call = [python, str(script), str(checkpoint), str(work / "widths.json"), str(work / "decoded.npz")]
    subprocess.run(call, check=True, capture_output=True, text=True)
    return dict(np.load(work / "decoded.npz"))


def measure(python: str, checkpoint: Path, work: Path, seed: int) -> float:
    """The worse of packed and unpacked."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokens = np.random.default_rng(seed).integers(3, config["vocab_size"], 12).tolist()
    true = float_logits(config, decoded(python, checkpoint, config, work), tokens)
    worst = 0.0
    for unpack in (True, False):
        with mlxrt.load(str(checkpoint), mlxrt.EngineConfig(dequantise=unpack)) as engine:
            worst = max(worst, close(np.array(engine.score(tokens)), true))
    return worst


def decodes_ours(python: str, source: Path, work: Path, recipe: Recipe) -> float:
    """Our checkpoint's matrices as the package decodes them, against our own: the largest relative difference."""
    folder = work / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    convert_ours(FolderCheckpoint(source), folder, recipe)
    config = json.loads((folder / "config.json").read_text())
    theirs, ours = decoded(python, folder, config, work), open_source(FolderCheckpoint(folder))
    assert set(theirs) == {ours.stored_name(name) for name in ours.shapes}
    worst = 0.0
    for name in ours.shapes:
        mine = np.array(ours.tensor(name).astype(mx.float32))
        worst = max(worst, float(np.abs(mine - theirs[ours.stored_name(name)]).max() / np.abs(mine).max()))
    return worst


def same_indices(theirs: Path, source: Path, work: Path, profile: str) -> bool:
    """Whether our encoder gives the package's codes and norms; its experts are padded, those are left out."""
    folder = work / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    convert_ours(FolderCheckpoint(source), folder, Recipe("jangtq", profile=profile))
    ours, others = FolderCheckpoint(folder).load(), FolderCheckpoint(theirs).load()
    names = [name for name in others if ".tq_" in name]
    return bool(names) and all(
        np.array_equal(np.array(ours[n]), np.array(others[n])[: ours[n].shape[0]]) for n in names
    )


OURS = (Recipe("jang", profile="JANG_2L"), Recipe("jang", profile="JANG_4M", hadamard=True), Recipe("jangtq", bits=4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jang", required=True, help="an interpreter that has the jang package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the checkpoints stay (default: nowhere)")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        for n, (name, (config, profiles)) in enumerate(MODELS.items()):
            source = place / f"{name}-source"
            sources.write_source(source, config, options.seed + n)
            for profile in profiles:
                checkpoint = place / f"{name}-{'-'.join(profile)}"
                convert(options.jang, source, checkpoint, profile)
                off = measure(options.jang, checkpoint, Path(temporary), options.seed)
                failed += off > LIMIT
                print(f"{name:9} {' '.join(profile):20} {off:.2e}  {'ok' if off <= LIMIT else 'FAILED'}", flush=True)
                if profile[0].startswith("JANGTQ"):
                    same = same_indices(checkpoint, source, Path(temporary), profile[0])
                    failed += not same
                    print(
                        f"{name:9} {profile[0]:20} our codes are {'the same' if same else 'OTHERS: FAILED'}", flush=True
                    )
            for recipe in OURS:
                off = decodes_ours(options.jang, source, Path(temporary), recipe)
                failed += off > 1e-6
                what = recipe.name + (" --hadamard" if recipe.hadamard else "")
                print(
                    f"{name:9} ours {what:20} decoded there {off:.1e} {'ok' if off <= 1e-6 else 'FAILED'}", flush=True
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
