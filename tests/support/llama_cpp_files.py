"""GGUF files as llama.cpp's converter writes them from a Hugging Face folder, with its names, keys and reorderings.

Names come from the `gguf` package's own map, so that a mistake in mlxrt's tables is not made twice. What the converter
leaves out because llama.cpp has it in its source is written where the model differs from that.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from mlxrt.weights.formats.fp8 import has_fp8, unpack_fp8
from tests.support.tiny_files import permuted

ARCHS = {
    "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "mixtral": "llama", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe", "qwen3_5_moe_text": "qwen35moe", "gemma4": "gemma4", "gemma4_text": "gemma4",
    "minimax_m2": "minimax-m2", "phi3": "phi3",
}  # fmt: skip
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
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


def convert(folder: Path, path: Path, *, kind: str = "F32", extra=None, layers=None, encode=None) -> Path:
    """The folder's model as one GGUF file: `kind` for the matrices, `extra(writer)` adds anything else, `layers` of it
    too. `encode(name, matrix)`: what is stored instead, and its kind."""
    config = json.loads((folder / "config.json").read_text())
    given, writer = read(config), gguf.GGUFWriter(path, ARCHS[config["model_type"]])
    add_keys(writer, given, layers)
    if extra:
        extra(writer)
    loaded = mx.load(str(folder / "model.safetensors"))
    if has_fp8(loaded):  # the converter unpacks it too
        loaded = unpack_fp8(loaded, config, mx.float32)
    arrays = {name: np.array(array) for name, array in loaded.items()}
    for name, array in [*tensors(given, arrays), *rope_tensors(given)]:
        add(writer, gguf_name(name, given), array, kind, encode)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, given: Given) -> str:
    """By the package's map of the architecture; llama's has the dense layers that Qwen3-MoE may have too."""
    if name.startswith(("rope_f", "blk.")):  # where the converter has no Hugging Face name
        return name
    if name.endswith(".A_log"):
        return gguf_name(f"{name}.x", given).removesuffix(".x")
    stem, suffix = name.rsplit(".", 1)
    archs = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}
    for arch in (given.arch, "llama"):
        if found := gguf.get_tensor_name_map(archs[arch], given.text["num_hidden_layers"]).get_name(stem):
            return f"{found}.{suffix}"
    raise AssertionError(f"llama.cpp has no name for {name}")


def add(writer, name: str, array: np.ndarray, kind: str, encode=None) -> None:
    if array.dtype == np.uint8:  # already the blocks of MXFP4
        return writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    matrix = array.ndim > 1 and name.endswith("weight") and "ffn_gate_inp" not in name
    if matrix and encode is not None:
        stored, type_ = encode(name, np.ascontiguousarray(array))
        return writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[type_])
    whole = matrix and (array.shape[-1] % 32 == 0 or kind == "F16")
    type_ = gguf.GGMLQuantizationType[kind if whole else "F32"]
    return writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), type_), raw_dtype=type_)


def add_keys(writer, given: Given, layers: int | None) -> None:
    text = given.text
    writer.add_block_count(layers or text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    if given.arch != "gemma4":
        add_sizes(writer, text)
    writer.add_head_count(text["num_attention_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if given.arch == "llama":
        writer.add_rope_dimension_count(text["head_dim"])
    writer.add_vocab_size(text["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_rope(writer, given)
    add_windows(writer, given)
    if given.arch == "gemma4":
        add_gemma4(writer, given)
    elif given.arch.startswith("gemma"):
        add_gemma(writer, text)
    elif text.get("num_experts", text.get("num_local_experts")):
        add_experts(writer, given.arch, text)
    if given.arch in HYBRIDS:
        add_delta_net(writer, given)
    if given.arch == "minimax-m2":
        writer.add_rope_dimension_count(text["rotary_dim"])
    if given.arch == "phi3":
        add_phi3(writer, given)


def add_phi3(writer, given: Given) -> None:
    text, context = given.text, given.text["max_position_embeddings"]
    original = text["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(text["head_dim"] * text.get("partial_rotary_factor", 1.0)))
    if not any(given.slides):
        writer.add_sliding_window(0)
    if "short_factor" in given.rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        scale = context / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def add_sizes(writer, text: dict[str, Any]) -> None:
    if "intermediate_size" in text:
        writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])


def add_delta_net(writer, given: Given) -> None:
    text = given.text
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
    writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])
    writer.add_full_attention_interval(text.get("full_attention_interval", 4))
    share = given.rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(int(text["head_dim"] * share))
    if given.arch != "qwen3next":
        writer.add_rope_dimension_sections([*given.rope.get("mrope_section", [11, 11, 10]), 0])


def global_sizes(text: dict[str, Any]) -> tuple[int, int]:
    """Head size and key-value heads of Gemma 4's full layers."""
    own = next(iter((text.get("per_layer_config") or {}).values()), {})
    heads = own.get("num_key_value_heads", text.get("num_global_key_value_heads"))
    return own.get("head_dim") or text["global_head_dim"], heads or text["num_key_value_heads"]


def add_gemma4(writer, given: Given) -> None:
    text, (size, heads) = given.text, global_sizes(given.text)
    layers, shared = text["num_hidden_layers"], text.get("num_kv_shared_layers", 0)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(text.get("hidden_size_per_layer_input") or 0)
    for length, suffix in ((size, ""), (text["head_dim"], "_swa")):
        getattr(writer, f"add_key_length{suffix}")(length)
        getattr(writer, f"add_value_length{suffix}")(length)
        getattr(writer, f"add_rope_dimension_count{suffix}")(length)
    wide = [text["intermediate_size"] * (2 if i >= layers - shared else 1) for i in range(layers)]
    writer.add_feed_forward_length(wide if text.get("use_double_wide_mlp") else text["intermediate_size"])
    if heads != text["num_key_value_heads"]:
        writer.add_head_count_kv([text["num_key_value_heads"] if s else heads for s in given.slides])
    else:
        writer.add_head_count_kv(heads)
    if text.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(text["final_logit_softcapping"])
    if text.get("enable_moe_block"):
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["top_k_experts"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])


def rope_tensors(given: Given):
    """What the converter writes of RoPE as a tensor: llama3's scaling, and pairs of Gemma 4 that do not rotate."""
    if given.rope.get("rope_type", given.rope.get("type")) == "llama3":
        yield "rope_freqs.weight", llama3_factors(given.rope, given.text["head_dim"])
    if "short_factor" in given.rope:
        yield "rope_factors_long.weight", np.array(given.rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(given.rope["short_factor"], np.float32)
    if given.arch == "gemma4":
        pairs = global_sizes(given.text)[0] // 2
        rotated = int(pairs * given.rope["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)


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


def llama3_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def add_windows(writer, given: Given) -> None:
    """A period where there is one, as llama.cpp has it for these; else layer by layer."""
    if not any(given.slides):
        return
    writer.add_sliding_window(given.text["sliding_window"])
    if given.arch == "gemma4":
        return writer.add_sliding_window_pattern(given.slides)
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
    if arch == "minimax-m2":
        writer.add_expert_feed_forward_length(text["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "moe_intermediate_size" in text:
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
        if text.get("norm_topk_prob", True) == (arch == "qwen2moe"):  # not what llama.cpp has in its source
            writer.add_expert_weights_norm(text.get("norm_topk_prob", True))
    if "shared_expert_intermediate_size" in text:
        writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(text["intermediate_size"])
        assert text.get("swiglu_alpha", 1.702) == 1.702, "GGUF has no key for it"
        if text.get("swiglu_limit", 7.0) != 7.0:
            writer.add_swiglu_clamp_exp([text["swiglu_limit"]] * text["num_hidden_layers"])


def vocabulary_values(size: int) -> dict[str, Any]:
    """Made-up words: enough for llama.cpp to open the file; prompts are token ids."""
    values = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "<0x0A>"] + [f"w{i}" for i in range(4, size)],
        "scores": [0.0] * size,
        "token_type": [2, 3, 3, 6] + [1] * (size - 4),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def tensors(given: Given, arrays: dict[str, np.ndarray]):
    """(name, array) of what is written, still under Hugging Face names; experts stacked, norms and rows as theirs."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name).replace("model.lm_head", "lm_head")
        if re.search(r"vision|visual|multi_modal|embed_audio|^mtp\.", name):
            continue
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(found[3], found[3])
            stacks.setdefault(f"{found[1].replace('block_sparse_moe', 'mlp')}.{part}.weight", {})[int(found[2])] = array
        elif given.arch == "gpt-oss" and ".experts." in name:
            yield from published_experts(name, array, arrays)
        elif given.arch in HYBRIDS:
            yield from hybrid_tensors(given, name, array)
        else:
            yield changed(given, name, array)
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def changed(given: Given, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if given.arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return name, array + 1
    if given.arch == "llama" and ("q_proj" in name or "k_proj" in name):
        return name, permuted(array, given.text["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
        return f"blk.{found[1]}.{'ffn_gate_inp' if found[2] == 'scale' else 'ffn_down_exps'}.scale", array
    if name.endswith(("sinks", "layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        return f"{name}.weight", array
    if name.endswith("e_score_correction_bias"):
        return name.replace("e_score_correction_bias", "e_score_correction.bias"), array
    return name, array


def hybrid_tensors(given: Given, name: str, array: np.ndarray):
    """Qwen3-Next and Qwen3.5: decays as they are used, norms with their 1, projections part by part, value heads of
    Qwen3.5 in the order in which ggml repeats key heads."""
    text, (stem, _, part) = given.text, name.rpartition(".")
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    if part == "A_log":
        array = -np.exp(array)
    elif part == "dt_bias":
        name = f"{stem}.dt_proj.bias"
    elif "conv1d" in name:
        array = array[:, 0]
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + 1
    elif name.endswith("experts.down_proj"):
        name += ".weight"
    elif name.endswith("experts.gate_up_proj"):
        for half, rows in zip(("gate", "up"), np.split(array, 2, axis=1)):
            yield name.replace("gate_up", half) + ".weight", rows
        return
    elif "in_proj_qkvz" in name:
        yield from ungrouped_qkvz(text, name, array)
        return
    if given.arch != "qwen3next" and "linear_attn" in name and keys != values:
        array = tiled(text, name, array)
    yield name, array


def ungrouped_qkvz(text: dict[str, Any], name: str, array: np.ndarray):
    """The file lists q, k, v and z of one key head after the other; llama.cpp all q, all k, all v; all z."""
    keys, size = text["linear_num_key_heads"], text["linear_key_head_dim"]
    wide = text["linear_num_value_heads"] // keys * text["linear_value_head_dim"]
    heads = array.reshape(keys, -1, array.shape[1])
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in np.split(heads, np.cumsum([size, size, wide]), axis=1))
    layer = re.search(r"layers\.(\d+)\.", name)[1]
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
    yield f"blk.{layer}.attn_gate.weight", z


def tiled(text: dict[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """Value heads 0, r, 2r, ..., then 1, r + 1, ...: r of them share a key head."""
    keys, values, size = text["linear_num_key_heads"], text["linear_num_value_heads"], text["linear_value_head_dim"]
    skipped = 2 * keys * text["linear_key_head_dim"] if "in_proj_qkv" in name or "conv1d" in name else 0
    if name.endswith("linear_attn.norm.weight"):
        return array
    axis = 1 if "out_proj" in name else 0
    each = (array.shape[axis] - skipped) // values
    assert each in (1, size)
    order = [g * (values // keys) + i for i in range(values // keys) for g in range(keys)]
    index = [skipped + h * each + d for h in order for d in range(each)]
    return np.take(array, [*range(skipped), *index], axis=axis)


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
