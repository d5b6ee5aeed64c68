"""GGUF files as llama.cpp's converter writes them from a Hugging Face folder, with its names, keys and reorderings.

Names come from the `gguf` package's own map, so that a mistake in mlxrt's tables is not made twice. What the converter
leaves out because llama.cpp has it in its source is written where the model differs from that.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from tests.support.tiny_files import permuted

ARCHS = {
    "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "mixtral": "llama",
}  # fmt: skip
PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
LOCAL_BASE = 10000.0


@dataclass(frozen=True)
class Given:
    """A config in one spelling."""

    arch: str
    text: dict[str, Any]  # the language model's part
    rope: dict[str, Any]  # of layers that see everything
    local_base: float | None  # theta of layers with a window, where it is another
    slides: list[bool]


def read(config: dict[str, Any]) -> Given:
    text = dict(config.get("text_config", config))
    text["head_dim"] = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    arch = ARCHS[config["model_type"]]
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    local = text.get("rope_local_base_freq")
    if "full_attention" in rope:
        local, rope = rope["sliding_attention"]["rope_theta"], dict(rope["full_attention"])
    rope.setdefault("rope_theta", text.get("rope_theta"))
    return Given(arch, text, rope, local, slides(arch, text))


def slides(arch: str, text: dict[str, Any]) -> list[bool]:
    n = text["num_hidden_layers"]
    if text.get("layer_types"):
        return [kind == "sliding_attention" for kind in text["layer_types"]]
    if arch in PERIODS:
        every = text.get("sliding_window_pattern", PERIODS[arch])
        return [(i + 1) % every != 0 for i in range(n)]
    return [bool(text.get("sliding_window")) and text.get("use_sliding_window", True)] * n


def convert(folder: Path, path: Path, *, kind: str = "F32", tokens: bool = False, extra=None) -> Path:
    """The folder's model as one GGUF file: `kind` for the matrices, `tokens` adds a vocabulary llama.cpp can load,
    `extra(writer)` anything else."""
    config = json.loads((folder / "config.json").read_text())
    given, writer = read(config), gguf.GGUFWriter(path, ARCHS[config["model_type"]])
    add_keys(writer, given)
    if tokens:
        add_vocabulary(writer, given.text["vocab_size"])
    if extra:
        extra(writer)
    arrays = {name: np.array(array) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    for name, array in tensors(given, arrays):
        add(writer, gguf_name(name, given), array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, given: Given) -> str:
    """By the package's map of the architecture; llama's has the dense layers that Qwen3-MoE may have too."""
    stem, suffix = name.rsplit(".", 1)
    archs = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}
    for arch in (given.arch, "llama"):
        if found := gguf.get_tensor_name_map(archs[arch], given.text["num_hidden_layers"]).get_name(stem):
            return f"{found}.{suffix}"
    raise AssertionError(f"llama.cpp has no name for {name}")


def add(writer, name: str, array: np.ndarray, kind: str) -> None:
    if array.dtype == np.uint8:  # already the blocks of MXFP4
        return writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    matrix = array.ndim > 1 and name.endswith("weight") and "ffn_gate_inp" not in name
    whole = matrix and (array.shape[-1] % 32 == 0 or kind == "F16")
    type_ = gguf.GGMLQuantizationType[kind if whole else "F32"]
    return writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), type_), raw_dtype=type_)


def add_keys(writer, given: Given) -> None:
    text = given.text
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    if given.arch == "llama":
        writer.add_rope_dimension_count(text["head_dim"])
    writer.add_vocab_size(text["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_rope(writer, given)
    add_windows(writer, given)
    if given.arch.startswith("gemma"):
        add_gemma(writer, text)
    else:
        add_experts(writer, given.arch, text)


def add_rope(writer, given: Given) -> None:
    rope = given.rope
    if given.arch != "gemma2" or rope["rope_theta"] != 10000.0:
        writer.add_rope_freq_base(rope["rope_theta"])
    if given.local_base not in (None, LOCAL_BASE):
        writer.add_rope_freq_base_swa(given.local_base)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(rope[key])


def add_windows(writer, given: Given) -> None:
    """A period where there is one, as llama.cpp has it for these; else layer by layer."""
    if not any(given.slides):
        return
    writer.add_sliding_window(given.text["sliding_window"])
    n = len(given.slides)
    periods = [p for p in range(n + 2) if given.slides == [p == 0 or (i + 1) % p != 0 for i in range(n)]]
    if PERIODS.get(given.arch) not in periods:
        writer.add_sliding_window_pattern(periods[0] if periods else given.slides)


def add_gemma(writer, text: dict[str, Any]) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if text.get(key) is not None:
            getattr(writer, f"add_{key}")(text[key])
    if text["query_pre_attn_scalar"] != text["head_dim"]:
        writer.add_attention_scale(text["query_pre_attn_scalar"] ** -0.5)


def add_experts(writer, arch: str, text: dict[str, Any]) -> None:
    writer.add_expert_count(text.get("num_experts", text.get("num_local_experts")))
    writer.add_expert_used_count(text["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
        if not text["norm_topk_prob"]:
            writer.add_expert_weights_norm(False)
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(text["intermediate_size"])
        assert text.get("swiglu_alpha", 1.702) == 1.702, "GGUF has no key for it"
        if text.get("swiglu_limit", 7.0) != 7.0:
            writer.add_swiglu_clamp_exp([text["swiglu_limit"]] * text["num_hidden_layers"])


def add_vocabulary(writer, size: int) -> None:
    """Made-up words: enough for llama.cpp to open the file; prompts are token ids."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>"] + [f"w{i}" for i in range(4, size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, 6] + [1] * (size - 4))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def tensors(given: Given, arrays: dict[str, np.ndarray]):
    """(name, array) of what is written, still under Hugging Face names; experts stacked, norms and rows as theirs."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name).replace("model.lm_head", "lm_head")
        if "vision" in name or "multi_modal" in name:
            continue
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(found[3], found[3])
            stacks.setdefault(f"{found[1].replace('block_sparse_moe', 'mlp')}.{part}.weight", {})[int(found[2])] = array
        elif given.arch == "gpt-oss" and ".experts." in name:
            yield from published_experts(name, array, arrays)
        else:
            yield changed(given, name, array)
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def changed(given: Given, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if given.arch.startswith("gemma") and name.endswith("norm.weight"):
        return name, array + 1
    if given.arch == "llama" and ("q_proj" in name or "k_proj" in name):
        return name, permuted(array, given.text["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return (f"{name}.weight" if name.endswith("sinks") else name), array


def published_experts(name: str, array: np.ndarray, arrays: dict[str, np.ndarray]):
    """gpt-oss: gate and up rows take turns; blocks of two numbers in a byte become halves of 16."""
    if name.endswith("_scales"):
        return
    path, matrix = name.rsplit(".", 1)
    part = "bias" if matrix.endswith("_bias") else "weight"
    if matrix.endswith("_blocks"):
        array = mxfp4(array, arrays[name.replace("_blocks", "_scales")])
    elif part == "weight":
        array = array.swapaxes(1, 2)
    if matrix.startswith("gate_up_proj"):
        yield f"{path}.gate_proj.{part}", array[:, ::2]
        yield f"{path}.up_proj.{part}", array[:, 1::2]
    else:
        yield f"{path}.down_proj.{part}", array


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, rows, G, 16] and [E, rows, G] as ggml's bytes [E, rows, 17 G]."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    halves = nibbles[..., :16] | nibbles[..., 16:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(*scales.shape[:2], -1)
