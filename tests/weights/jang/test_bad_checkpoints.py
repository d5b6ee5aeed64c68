"""Bundles with a fault: one line that names the tensor, and nothing loads half."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import mlxrt

from .makers import MAKERS, JangCheckpoint

AT = "model.layers.0.block_sparse_moe.switch_mlp.down_proj"


def spoil(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array.reshape(-1)[array.size // 2] = value
    return array


def set_tensor(name, change):
    def apply(b: JangCheckpoint) -> None:
        b.tensors[name] = change(b.tensors[name])

    return apply


def set_file(name, part, change):
    def apply(b: JangCheckpoint) -> None:
        b.extra[name][part] = change(b.extra[name][part])

    return apply


def drop(name):
    return lambda b: b.tensors.pop(name)


def label(**values):
    return lambda b: b.labels.update(values)


def config(**values):
    return lambda b: b.config.update(values)


BOOK = "codebook-layer-000-up_proj.safetensors"
STREAM = "model.layers.0.mlp.up_proj"
FAULTS = {
    "norms are NaN": ("jangtq", set_tensor(f"{AT}.tq_norms", lambda a: spoil(a, np.nan)), "down_proj.tq_norms"),
    "norms are infinite": ("jangtq", set_tensor(f"{AT}.tq_norms", lambda a: spoil(a, np.inf)), "down_proj.tq_norms"),
    "a layer norm is NaN": ("jangtq", set_tensor("model.norm.weight", lambda a: spoil(a, np.nan)), "model.norm.weight"),
    "scales are NaN": ("mixed", set_tensor("lm_head.scales", lambda a: spoil(a, np.nan)), "lm_head.scales"),
    "no norms": ("jangtq", drop(f"{AT}.tq_norms"), "tq_norms"),
    "no bits": ("jangtq", drop(f"{AT}.tq_bits"), "tq_bits"),
    "no words": ("jangtq", drop(f"{AT}.tq_packed"), "down_proj"),
    "bits of no such width": ("jangtq", set_tensor(f"{AT}.tq_bits", lambda a: a * 0 + 5), "tq_bits = 5"),
    "bits that do not fit": ("jangtq", set_tensor(f"{AT}.tq_bits", lambda a: a * 0 + 2), "tq_packed"),
    "words cut short": ("jangtq", set_tensor(f"{AT}.tq_packed", lambda a: a[..., :-1]), "tq_packed"),
    "words of another kind": ("jangtq", set_tensor(f"{AT}.tq_packed", lambda a: a.astype(np.int32)), "tq_packed"),
    "an expert too few": ("jangtq", set_tensor(f"{AT}.tq_packed", lambda a: a[:-1]), "tq_packed"),
    "one expert is missing": (
        "jangtq_singly",
        lambda b: [b.tensors.pop(n) for n in list(b.tensors) if ".experts.2.w1." in n],
        "expert 2",
    ),
    "experts of two widths": (
        "jangtq_singly",
        set_tensor("model.layers.0.block_sparse_moe.experts.1.w1.tq_bits", lambda a: a * 0 + 4),
        "gate_proj.tq_bits",
    ),
    "a group of tensors without a module": (
        "jangtq",
        lambda b: b.tensors.update({n.replace(AT, "model.layers.0.extra"): a for n, a in b.tensors.items() if AT in n}),
        "model.layers.0.extra",
    ),
    "both coded and affine": (
        "jangtq_dense",
        lambda b: b.tensors.update({"lm_head.weight": np.ones((96, 96), np.float16)}),
        "lm_head is in the checkpoint twice",
    ),
    "a seed of words": ("jangtq", label(mxtq_seed="42"), "mxtq_seed"),
    "two seeds": ("jangtq", label(mxtq_seed=41), "mxtq_seed"),
    "hadamard of words": ("rotated_dense", label(quantization={"hadamard_rotation": "yes"}), "hadamard_rotation"),
    "inputs that do not fit": ("jangtq", config(hidden_size=100), "100 features"),
    "an unknown version": ("jangtq2", lambda b: b.config["jangtq"].update(version=3), "jangtq.version is 3"),
    "no version": ("jangtq2", lambda b: b.config.pop("jangtq"), "jangtq.version"),
    "other levels": ("jangtq2", lambda b: b.config["jangtq"]["codebooks"]["2"]["levels"].reverse(), "levels"),
    "an unknown turning": (
        "jangtq2",
        lambda b: [v.update(rotation="dct") for v in b.config["quantization"].values() if isinstance(v, dict)],
        "rotation",
    ),
    "index beyond the codebook": ("codebook_files", set_file(BOOK, "indices", lambda a: spoil(a, 40)), "up_proj.codes"),
    "codebook with NaN": ("codebook_files", set_file(BOOK, "codebook", lambda a: spoil(a, np.nan)), "up_proj.codebook"),
    "no codebook": ("codebook_files", lambda b: b.extra[BOOK].pop("codebook"), "codebook"),
    "a codebook file is missing": ("codebook_files", lambda b: b.extra.pop(BOOK), "up_proj"),
    "codes cut short": ("codebook_files", set_file(BOOK, "indices", lambda a: a[..., :-1]), "up_proj.codes"),
    "codes of another codebook": ("codebook_list", drop("c1"), "c1"),
    "a stream cut short": ("streams", set_tensor(f"{STREAM}.qweight", lambda a: a[:-1]), "up_proj.qweight"),
    "a stream of no such width": ("streams", set_tensor(f"{STREAM}.bits", lambda a: a * 0 + 7), "up_proj.bits"),
    "a shape of another matrix": ("streams", set_tensor(f"{STREAM}.shape", lambda a: a * 2), "up_proj"),
    "no shape": ("streams", drop(f"{STREAM}.shape"), "up_proj.shape"),
    "blocks elsewhere": (
        "streams_with_maps", set_tensor(f"{STREAM}.block_offsets", lambda a: spoil(a, 1)), "block_offsets"
    ),
    "an awq scale of zero": (
        "jangtq_with_awq",
        set_tensor("model.layers.0.mlp.switch_mlp.up_proj.awq_scale", lambda a: spoil(a, 0)),
        "up_proj.awq_scale",
    ),
    "trellis codes": (
        "jangtq", lambda b: b.tensors.update({f"{AT}.jt_packed": b.tensors.pop(f"{AT}.tq_packed")}), "JANGT"
    ),
    "labels that are a list": ("jangtq", lambda b: b.files.update({"jang_config.json": "[1]"}), "jang_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_line_that_names_it(fault, tmp_path):
    kind, spoiled, expected = FAULTS[fault]
    checkpoint = MAKERS[kind](seed=4)
    spoiled(checkpoint)
    folder = checkpoint.write(tmp_path / "checkpoint")
    for unpack in (False, True):
        with pytest.raises(mlxrt.MlxrtError) as caught:
            mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=unpack))
        assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_missing_shard(tmp_path):
    folder = MAKERS["streams"](seed=4).write(tmp_path)
    index = folder / "model.jang.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = "model-00002-of-00002.jang.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(mlxrt.MlxrtError, match="1 of 2 shards are missing"):
        mlxrt.load(str(folder))


def test_sidecar_is_compared(tmp_path):
    from mlxrt.models.quantized.centroids import lloyd_max
    from mlxrt.models.quantized.rotation import random_signs

    folder = MAKERS["jangtq"](seed=4).write(tmp_path)
    right = {
        "signs.96.42": random_signs(96, 42),
        "codebook.96.2": lloyd_max(96, 2),
        "signs.341.42": random_signs(341, 42),
    }
    for change, expected in ((None, None), ("signs.96.42", "signs.96.42"), ("codebook.96.2", "codebook.96.2")):
        given = {name: spoil(array, 0.5) if name == change else array for name, array in right.items()}
        save_file(given, folder / "jangtq_runtime.safetensors")
        if expected is None:
            mlxrt.load(str(folder)).close()
        else:
            with pytest.raises(mlxrt.MlxrtError, match=expected):
                mlxrt.load(str(folder))
    save_file({"levels": right["codebook.96.2"]}, folder / "jangtq_runtime.safetensors")
    with pytest.raises(mlxrt.MlxrtError, match="levels"):
        mlxrt.load(str(folder))
