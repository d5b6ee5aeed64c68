"""Models of published shapes with random weights: the same ones in every script and GPU test."""

import mlx.core as mx

from mlxrt import Request, SamplingParams
from mlxrt.kernels import Kernels, backend, make_gpu
from mlxrt.models import find
from mlxrt.weights.random_models import Shape, random_weights
from mlxrt.weights.source.cache_dir import cache_root


def random_model(shape, dtype=mx.bfloat16, layers=None, kernels="auto", exact=False):
    """A fused model of a shape such as qwen3-8b@4bit; `layers`: a smaller number, or "few" that show every kind.

    `exact`: the same weights, but computed with in float32."""
    gpu, asked = open_gpu(), Shape.parse(f"shape:{shape}")
    config = asked.config
    if layers is not None:
        config = keep_few_layers(config) if layers == "few" else {**config, "num_hidden_layers": layers}
    family = find(config)
    model = family(family.parse(config))
    random_weights(model, asked.bits, dtype, mode=asked.mode, group_size=asked.group_size)
    if exact:
        model.set_dtype(mx.float32)
    model.fuse(Kernels(kernels, gpu))
    mx.eval(model.parameters())
    return model


def keep_few_layers(config):
    """The config with its first layers only: at least two, and one of every kind, as many again where some share KV."""
    if "text_config" in config:
        return {**config, "text_config": keep_few_layers(config["text_config"])}
    kinds = config.get("layer_types") or ["full_attention"]
    count = max(2, config.get("sliding_window_pattern") or 0, *(kinds.index(kind) + 1 for kind in set(kinds)))
    changes = {"num_hidden_layers": count}
    if config.get("num_kv_shared_layers"):
        changes = {"num_hidden_layers": 2 * count, "num_kv_shared_layers": count}
    if config.get("layer_types"):
        changes["layer_types"] = kinds[: changes["num_hidden_layers"]]
    return config | changes


def open_gpu():
    return make_gpu(backend(), folder=cache_root() / "kernels")


def make_prompts(vocab, batch, length):
    return [[(i * 131 + j * 7 + (j * j) % 11) % (vocab - 10) for j in range(length)] for i in range(batch)]


def make_request(tokens, max_tokens):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
