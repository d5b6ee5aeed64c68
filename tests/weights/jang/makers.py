"""Tiny checkpoints of every kind, each with the float tensors it stands for: what tests and the fuzz run load."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from . import definition as of
from . import sources

AFFINE_LABELS = {"format": "jang", "format_version": "2.0", "quantization": {"profile": "JANG_4M"}}


@dataclass
class JangCheckpoint:
    """The tensors and labels of a folder to be, and the truth about it."""

    config: dict
    tensors: dict[str, np.ndarray]
    true: dict[str, np.ndarray]  # by the original's names, float64
    labels: dict | None
    names: dict
    extra: dict[str, dict[str, np.ndarray]]  # other files
    files: dict[str, str]  # and their text

    def write(self, folder: Path) -> Path:
        of.write(folder, self.config, self.tensors, self.labels, **self.names)
        for name, tensors in self.extra.items():
            save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / name)
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return folder

    def write_true(self, folder: Path) -> Path:
        """The float model, plain."""
        plain = {key: value for key, value in self.config.items() if key in PLAIN}
        return of.write(folder, plain, {name: a.astype(np.float32) for name, a in self.true.items()})


PLAIN = {*sources.qwen3(), *sources.qwen3_moe(), *sources.minimax(), "attention_bias"}


def checkpoint(config: dict, seed: int, labels: dict | None) -> tuple[JangCheckpoint, dict[str, np.ndarray]]:
    """An empty checkpoint, and the weights to put into it; norms, routers and biases are in it already."""
    made = sources.weights(config, seed)
    plain = {n: a for n, a in made.items() if a.ndim == 1 or n.endswith(".gate.weight")}
    true = {n: a.astype(np.float64) for n, a in made.items()}
    return JangCheckpoint(dict(config), dict(plain), true, labels, {}, {}, {}), {
        n: a for n, a in made.items() if n not in plain
    }


def put(b: JangCheckpoint, name: str, made: tuple[dict[str, np.ndarray], np.ndarray], under: str | None = None) -> None:
    """The tensors of one matrix, and the matrix."""
    path = (under or name).removesuffix(".weight")
    b.tensors |= {f"{path}.{part}": array for part, array in made[0].items()}
    b.true[name] = made[1]


def put_affine(b: JangCheckpoint, weights: dict[str, np.ndarray], bits: dict[str, int], rotated: bool = False) -> None:
    """Everything that is left; `bits` by a part of the name, 4 for what has none."""
    entries = {}
    for name, w in weights.items():
        width = next((n for part, n in bits.items() if part in name), 4)
        group = next(g for g in (64, 32) if w.shape[-1] % g == 0)
        rotates = rotated and width >= 3 and not any(part in name for part in ("embed", "lm_head", "norm", ".gate."))
        put(b, name, of.affine(w, width, group, rotates))
        entries[name.removesuffix(".weight")] = {"bits": width, "group_size": group, "mode": "affine"}
    b.config["quantization"] = {"bits": min(bits.values(), default=4), "group_size": 64, "mode": "affine", **entries}


def experts(weights: dict[str, np.ndarray], names=("gate_proj", "up_proj", "down_proj")):
    """(layer, projection's name here, [E, out, in], the names of the single ones); takes them out of `weights`."""
    layers = sorted({int(n.split(".")[2]) for n in weights if ".experts." in n})
    for layer in layers:
        for name in names:
            single = [
                n for n in weights if n.startswith(f"model.layers.{layer}.") and f".{name}." in n and "experts" in n
            ]
            single.sort(key=lambda n: int(n.split("experts.")[1].split(".")[0]))
            yield layer, name, np.stack([weights.pop(n) for n in single]), single


def put_experts(
    b: JangCheckpoint, single: list[str], path: str, made: tuple[dict[str, np.ndarray], np.ndarray]
) -> None:
    b.tensors |= {f"{path}.{part}": array for part, array in made[0].items()}
    for i, name in enumerate(single):
        b.true[name] = made[1][i]


def mixed(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3(hidden=96, inner=160, head=32), seed, AFFINE_LABELS)
    put_affine(b, weights, {"embed": 6, "lm_head": 8, "q_proj": 5, "o_proj": 8, "up_proj": 2, "down_proj": 3})
    b.tensors["model.layers.0.mlp.up_proj.importance"] = np.ones(3, np.float16)
    return b


def one_bit(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.llama(hidden=128, inner=256), seed, AFFINE_LABELS)
    put_affine(b, weights, {"embed": 8, "mlp": 1, "self_attn": 4})
    return b


def wrong_config(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3(hidden=128, inner=256, head=32), seed, AFFINE_LABELS)
    put_affine(b, weights, {"mlp": 2, "self_attn": 8})
    for path, entry in b.config["quantization"].items():
        if isinstance(entry, dict) and "self_attn" in path:
            entry |= {"bits": 4, "group_size": 128}  # the same words and scales, read otherwise
    return b


def legacy_config(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3(hidden=128, inner=192, head=32), seed, {"format": "mxq", "version": 2})
    put_affine(b, weights, {"mlp": 3, "self_attn": 6})
    b.config["quantization"] = {"bits": 3, "group_size": 64}
    b.names["labels_file"] = "mxq_config.json"
    return b


def stacked_affine(seed: int, rotated: bool = False) -> JangCheckpoint:
    labels = {**AFFINE_LABELS, "quantization": {"hadamard_rotation": rotated}}
    b, weights = checkpoint(sources.qwen3_moe(hidden=96, inner=64, experts=5), seed, labels)
    for layer, name, w, single in experts(weights):
        bits = {"gate_proj": 4, "up_proj": 2, "down_proj": 3}[name]
        made = of.affine(w, bits, 32, rotated and bits >= 3)
        put_experts(b, single, f"model.layers.{layer}.mlp.switch_mlp.{name}", made)
    put_affine(b, weights, {"self_attn": 8, "embed": 4}, rotated)
    return b


def rotated_affine(seed: int) -> JangCheckpoint:
    return stacked_affine(seed, rotated=True)


def rotated_dense(seed: int) -> JangCheckpoint:
    """With biases on all projections of attention."""
    labels = {**AFFINE_LABELS, "quantization": {"hadamard_rotation": True}}
    b, weights = checkpoint(sources.llama(hidden=96, inner=224, attention_bias=True), seed, labels)
    put_affine(b, weights, {"self_attn": 6, "up_proj": 2, "mlp": 3, "embed": 8}, True)
    return b


def streams(seed: int, zeros: bool = False, maps: bool = False, inner: int = 192) -> JangCheckpoint:
    labels = {"format": "jang", "format_version": "1.0" if maps else "1.1", "quantization": {"block_size": 64}}
    b, weights = checkpoint(sources.qwen3(hidden=128, inner=inner, head=32), seed, labels)
    random = np.random.default_rng(seed)
    for i, (name, w) in enumerate(weights.items()):
        count = -(-w.size // 64)
        widths = random.choice([2, 3, 4, 5, 6, 8], count) if maps else np.full(count, (2, 3, 4, 5, 6, 8)[i % 6])
        put(b, name, of.first_version(w, widths, zeros=zeros, maps=maps))
    b.names = {"shard": "model-00001-of-00001.jang.safetensors", "index": "model.jang.index.json"}
    return b


def streams_of_zeros(seed: int) -> JangCheckpoint:
    return streams(seed, zeros=True)


def streams_with_maps(seed: int) -> JangCheckpoint:
    return streams(seed, zeros=True, maps=True)


def streams_across_rows(seed: int) -> JangCheckpoint:
    return streams(seed, inner=160)  # down_proj has 160 inputs, no multiple of a block


TQ_LABELS = {"weight_format": "mxtq", "profile": "JANGTQ_K", "mxtq_seed": 42, "version": 2}
MINIMAX = ("w1", "w3", "w2")
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def jangtq(seed: int, bits=(2, 2, 4), hidden: int = 96, inner: int = 80, signs: int = 42) -> JangCheckpoint:
    """Prestacked; bits of gate, up and down."""
    b, weights = checkpoint(
        sources.minimax(hidden=hidden, inner=inner, experts=4), seed, {**TQ_LABELS, "mxtq_seed": signs}
    )
    for (layer, name, w, single), width in zip(experts(weights, MINIMAX), bits * 2):
        path = f"model.layers.{layer}.block_sparse_moe.switch_mlp.{PROJECTIONS[name]}"
        put_experts(b, single, path, of.jangtq(w, width, signs))
    put_affine(b, weights, {"": 8})
    b.config |= {"weight_format": "mxtq", "mxtq_seed": signs, "mxtq_bits": {"routed_expert": 2}}
    return b


def jangtq_one_bit(seed: int) -> JangCheckpoint:
    return jangtq(seed, (1, 1, 2), hidden=64, inner=36)


def jangtq_three_bits(seed: int) -> JangCheckpoint:
    return jangtq(seed, (3, 3, 3), hidden=96, inner=52)


def jangtq_eight_bits(seed: int) -> JangCheckpoint:
    return jangtq(seed, (8, 8, 3), hidden=96, inner=44, signs=7)


def jangtq_singly(seed: int, fused: bool = False) -> JangCheckpoint:
    """Expert by expert, as the older converters wrote; labels that say something else, and inside config.json."""
    b, weights = checkpoint(sources.minimax(hidden=96, inner=48, experts=4), seed, None)
    for _, name, w, single in experts(weights, MINIMAX):
        for i, at in enumerate(single):
            put(b, at, of.jangtq(w[i], 4 if name == "w2" else 2))
    put_affine(b, weights, {"": 8})
    b.config |= {"jang_config": {"weight_format": "bf16"}}
    return b


def jangtq_fused(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3_moe(hidden=64, inner=48, experts=3), seed, TQ_LABELS)
    found = list(experts(weights))
    for gate, up, down in zip(found[::3], found[1::3], found[2::3]):
        both = of.jangtq(np.concatenate([gate[2], up[2]], axis=1), 3)
        at = f"model.layers.{gate[0]}.mlp.switch_mlp"
        b.tensors |= {f"{at}.gate_up_proj.{part}": array for part, array in both[0].items()}
        for i, (one, other) in enumerate(zip(gate[3], up[3])):
            b.true[one], b.true[other] = both[1][i, :48], both[1][i, 48:]
        put_experts(b, down[3], f"{at}.down_proj", of.jangtq(down[2], 2))
    put_affine(b, weights, {"": 8})
    return b


def jangtq_dense(seed: int) -> JangCheckpoint:
    """Every matrix of the layers, the head and the embedding."""
    b, weights = checkpoint(sources.qwen3(hidden=96, inner=104, head=24), seed, TQ_LABELS)
    for i, name in enumerate(sorted(weights)):
        put(b, name, of.jangtq(weights[name], (2, 3, 4)[i % 3]))
    return b


def jangtq_with_awq(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3_moe(hidden=64, inner=40, experts=3), seed, TQ_LABELS)
    random = np.random.default_rng(seed)
    for layer, name, w, single in experts(weights):
        by = random.uniform(0.5, 2, w.shape[-1]).astype(np.float16)
        put_experts(b, single, f"model.layers.{layer}.mlp.switch_mlp.{name}", of.jangtq(w, 4, awq=by))
    for name in [n for n in weights if "self_attn" in n]:
        by = random.uniform(0.5, 2, weights[name].shape[-1]).astype(np.float16)
        tensors, true = of.affine(weights[name] * by, 8, 64 if weights[name].shape[-1] % 64 == 0 else 32)
        put(b, name, ({**tensors, "awq_scales": by}, true / by.astype(np.float64)))
        del weights[name]
    put_affine(b, weights, {"": 8})
    return b


def jangtq2(seed: int, rotation: str = "hadamard32") -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3_moe(hidden=96, inner=64, experts=3), seed, {"format": "jangtq2"})
    entries = {}
    for layer, name, w, single in experts(weights):
        path, bits = f"model.layers.{layer}.mlp.switch_mlp.{name}", {"gate_proj": 2, "up_proj": 2, "down_proj": 3}[name]
        put_experts(b, single, path, of.jangh(w, bits, rotation == "hadamard32"))
        entries[path] = {"mode": "jangtq2", "bits": bits, "rotation": rotation}
    for i, name in enumerate([n for n in weights if "self_attn" in n]):
        tensors, true = of.jangh(weights.pop(name), (4, 6, 8)[i % 3], rotation == "hadamard32")
        put(b, name, ({part: a[None] for part, a in tensors.items()}, true))  # a stack of one
        entries[name.removesuffix(".weight")] = {"mode": "jangtq2", "rotation": rotation}
    put_affine(b, weights, {"": 8})
    b.config["quantization"] |= entries
    b.config["jangtq"] = of.jangh_config()
    return b


def jangtq2_unrotated(seed: int) -> JangCheckpoint:
    return jangtq2(seed, "none")


def codebook_files(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(
        sources.qwen3_moe(hidden=64, inner=48, experts=3), seed, {"quantization": {"codebook_vq": True}}
    )
    for layer, name, w, single in experts(weights):
        tensors, true = of.vectors(w, 40, 4 if name == "down_proj" else 8, seed)
        for i, at in enumerate(single):
            b.true[at] = true[i]
        file = f"codebook-layer-{layer:03d}-{name}.safetensors"
        b.extra[file] = {"codebook": tensors["codebook"], "indices": tensors["codes"]}
    put_affine(b, weights, {"": 8})
    return b


def codebook_files_dense(seed: int) -> JangCheckpoint:
    b, weights = checkpoint(sources.qwen3(hidden=64, inner=96, head=16), seed, {"quantization": {"codebook_vq": True}})
    for name in [n for n in weights if ".mlp." in n]:
        tensors, b.true[name] = of.vectors(weights.pop(name), 64, 8, seed)
        file = f"codebook-layer-{int(name.split('.')[2]):03d}-{name.split('.')[4]}.safetensors"
        b.extra[file] = {"codebook": tensors["codebook"], "indices": tensors["codes"]}
    put_affine(b, weights, {"": 8})
    return b


def codebook_list(seed: int) -> JangCheckpoint:
    """codebook_config.json: codes of 8, 16 and 32 bits, flat or not, a codebook for two, vectors across rows."""
    b, weights = checkpoint(sources.llama(hidden=60, inner=84, tied=False, head_dim=16), seed, None)
    items = []
    for i, name in enumerate([n for n in weights if "embed" not in n and "lm_head" not in n]):
        length = 8 if i == 3 else 4  # 8 does not divide 60: runs go on in the next row
        made = of.vectors(weights.pop(name), 30, length, seed, (np.uint8, np.uint16, np.uint32)[i % 3])
        shape, indices = list(made[1].shape), made[0]["codes"]
        item = {"name": name, "shape": shape}
        if i % 2:
            item |= {"codes": f"c{i}", "codebook": f"b{i}"}
        b.tensors[item.get("codes", f"{name}.codes")] = indices.reshape(-1) if i % 4 < 2 else indices
        b.tensors[item.get("codebook", f"{name}.codebook")] = made[0]["codebook"]
        b.true[name] = made[1]
        items.append(item)
    b.tensors |= weights
    document = {
        "type": "codebook",
        "format": "vq",
        "codebook_size": 30,
        "code_dim": 4,
        "index_bits": 8,
        "tensors": items,
    }
    b.files["codebook_config.json"] = json.dumps(document)
    return b


MAKERS: dict[str, Callable[[int], JangCheckpoint]] = {
    f.__name__: f
    for f in (
        mixed, one_bit, wrong_config, legacy_config, stacked_affine, rotated_affine, rotated_dense, streams,
        streams_of_zeros, streams_with_maps, streams_across_rows, jangtq, jangtq_one_bit, jangtq_three_bits,
        jangtq_eight_bits, jangtq_singly, jangtq_fused, jangtq_dense, jangtq_with_awq, jangtq2, jangtq2_unrotated,
        codebook_files, codebook_files_dense, codebook_list,
    )
}  # fmt: skip
