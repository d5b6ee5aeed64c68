"""Models of published shapes with random weights: the same ones in every script and GPU test."""

import mlx.core as mx

from mlxrt import Request, SamplingParams
from mlxrt.kernels import Kernels, backend, make_gpu
from mlxrt.models import find
from mlxrt.weights.random_models import Shape, random_weights
from mlxrt.weights.source.cache_dir import cache_root


def random_model(shape, dtype=mx.bfloat16, layers=None, kernels="auto"):
    """A fused model of a shape such as qwen3-8b@4bit, with fewer layers if asked for."""
    asked = Shape.parse(f"shape:{shape}")
    config = asked.config if layers is None else {**asked.config, "num_hidden_layers": layers}
    family = find(config)
    model = family(family.parse(config))
    random_weights(model, asked.bits, dtype, mode=asked.mode, group_size=asked.group_size)
    model.fuse(Kernels(kernels, open_gpu()))
    mx.eval(model.parameters())
    return model


def open_gpu():
    return make_gpu(backend(), folder=cache_root() / "kernels")


def make_prompts(vocab, batch, length):
    return [[(i * 131 + j * 7 + (j * j) % 11) % (vocab - 10) for j in range(length)] for i in range(batch)]


def make_request(tokens, max_tokens):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
