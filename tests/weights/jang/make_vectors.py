"""Cut ../shared's format vectors, made with the public package, to what tests keep.

usage: python -m tests.weights.jang.make_vectors ../shared/fixtures/jang/vectors
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
WEIGHTS = ("20x320b3", "32x192b4", "16x192b8", "pad3")


def main(vectors: Path) -> None:
    load = lambda name: np.load(vectors / f"{name}.npz")  # noqa: E731
    kept = {f"tables/{k}": v for k, v in load("mxtq_signs_codebooks").items() if "7168" not in k or "codebook" in k}
    kept |= {f"whole/{k}": v for k, v in load("mxtq_packing").items()}
    kept |= {f"stream/{k}": v for k, v in load("packing_all_widths").items()}
    kept |= {f"turn/{k}": v[:1] for k, v in load("mxtq_rotation").items()}
    for k, v in load("mxtq_weights").items():
        name, _, part = k.partition("_")
        if name in WEIGHTS and part != "W":
            kept[f"coded/{k}"] = v[:6] if part not in ("x", "y") else v[:, :6] if part == "y" else v
    kept |= {f"bit/{k}": v for k, v in load("affine_1bit").items() if k != "W"}
    for k, v in load("jangh_tq2").items():
        if "_W" not in k:
            kept[f"second/{k}"] = v if "levels" in k or "_x" in k else v[:1]
    kept |= {f"vq/{k}": v for k, v in load("codebook_vq").items() if k != "W"}
    kept |= {f"first/{k}": v.astype(np.float32) for k, v in load("jang_v1_reference").items()}
    np.savez_compressed(HERE / "vectors.npz", **kept)
    for file in ("jang_config.json", "model.jang.index.json", "model-00001-of-00001.jang.safetensors"):
        (HERE / "first_version").mkdir(exist_ok=True)
        (HERE / "first_version" / file).write_bytes((vectors / "jang_v1_model" / file).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
