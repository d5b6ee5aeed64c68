"""Rows and columns that llama.cpp's converter moves, moved back. Whole blocks are moved, so packed data stays exact."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import BadCheckpoint
from .reader import GGML_BLOCKS, GGUFTensor

Config = Mapping[str, Any]
LLAMA_QK = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
# Tensors whose rows are one or several numbers for each value head; those of attn_qkv and the convolution end so.
VALUE_ROWS = re.compile(
    r"blk\.\d+\.(attn_qkv|attn_gate|ssm_conv1d|ssm_alpha|ssm_beta|ssm_a|ssm_dt)(?:\.(?:weight|bias))?"
)
VALUE_COLUMNS = re.compile(r"blk\.\d+\.ssm_out\.weight")


def order_llama_rows(tensor: GGUFTensor, config: Config) -> np.ndarray | None:
    """Llama: the rows of q and k, whose RoPE pairs are interleaved."""
    found = LLAMA_QK.fullmatch(tensor.name)
    if not found:
        return None
    check_rows(tensor)
    heads, dim = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"], config["head_dim"]
    if tensor.shape[0] != heads * dim:
        raise BadCheckpoint(f"{tensor.name} has {tensor.shape[0]} rows, expected {heads} heads x {dim}")
    return np.arange(heads * dim).reshape(heads, dim // 2, 2).swapaxes(1, 2).flatten()


def group_value_heads(config: Config, size: int) -> np.ndarray:
    """Where the parts of `size` of each value head are: the files have the first value head of every key head, then
    the second ones; the model the value heads of the first key head, then the second one's."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).flatten()


def order_value_rows(tensor: GGUFTensor, config: Config) -> np.ndarray | None:
    """Qwen3.5: the rows that belong to value heads."""
    found = VALUE_ROWS.fullmatch(tensor.name)
    if not found or config["linear_num_key_heads"] == config["linear_num_value_heads"]:
        return None
    check_rows(tensor)
    wide = found[1] in ("attn_qkv", "attn_gate", "ssm_conv1d")
    order = group_value_heads(config, config["linear_value_head_dim"] if wide else 1)
    before = 0
    if found[1] in ("attn_qkv", "ssm_conv1d"):
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if tensor.shape[0] != before + len(order):
        raise BadCheckpoint(f"{tensor.name} has {tensor.shape[0]} rows, expected {before + len(order)}")
    return np.concatenate([np.arange(before), before + order])


def order_value_columns(tensor: GGUFTensor, config: Config) -> np.ndarray | None:
    """Qwen3.5: the columns of the projection that follows the value heads."""
    if not VALUE_COLUMNS.fullmatch(tensor.name) or config["linear_num_key_heads"] == config["linear_num_value_heads"]:
        return None
    order = group_value_heads(config, config["linear_value_head_dim"])
    if len(tensor.shape) != 2 or tensor.shape[1] != len(order):
        raise BadCheckpoint(f"{tensor.name} is {list(tensor.shape)}, expected {len(order)} columns")
    return order


def check_rows(tensor: GGUFTensor) -> None:
    rank = 2 if tensor.name.endswith(".weight") else 1
    if len(tensor.shape) != rank or (rank == 1 and GGML_BLOCKS[tensor.ggml_type] > 1):
        raise BadCheckpoint(f"{tensor.name} is {tensor.ggml_type} {list(tensor.shape)}, not a matrix or plain bias")


def take_rows(tensor: GGUFTensor, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Stored rows in another order; a vector is one stored row."""
    return rows.reshape(tensor.shape[0], -1)[order].reshape(rows.shape)


def take_columns(tensor: GGUFTensor, rows: np.ndarray, order: np.ndarray) -> np.ndarray | None:
    """Stored rows with their columns in another order; None where that would divide blocks."""
    block = GGML_BLOCKS[tensor.ggml_type]
    if len(order) % block:
        return None
    first = order.reshape(-1, block)
    if (first[:, 0] % block).any() or (first != first[:, :1] + np.arange(block)).any():
        return None
    return rows.reshape(len(rows), len(first), -1)[:, first[:, 0] // block].reshape(rows.shape)
