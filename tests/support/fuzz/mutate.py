"""Ways to damage a file, as hypothesis strategies: bytes without understanding, trees with."""

import copy
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.support.fuzz.seeds import Gguf

# Marks that stand for nesting: beyond every parser, near the interpreter's limit, and below it.
DEPTHS = {"\x01deep\x01": 100_000, "\x01near\x01": 960, "\x01below\x01": 900, "\x01some\x01": 100}
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    31,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
ODD = (
    None,
    True,
    False,
    "",
    " ",
    "x",
    "None",
    "0",
    "x" * 10_000,
    "\x00",
    "\ud800",
    "../..",
    "a.b",
    [],
    {},
    [[]],
    [None],
    [1],
    {"": 0},
    *NUMBERS,
    10**400,
    -(10**400),
    0.0,
    -0.0,
    0.5,
    -1.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    *DEPTHS,
)
FIELDS = (
    0,
    1,
    2,
    8,
    9,
    12,
    13,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64 - 8,
    2**64 - 1,
)

# Words that mean something somewhere, and keys the sound files lack.
WORDS = """llama mistral qwen2 qwen3 gpt2 yarn linear llama3 dynamic default longrope affine mxfp4 nvfp4 full_attention
    sliding_attention F32 F16 BF16 U32 U8 I64 F8_E4M3 BPE Unigram WordPiece WordLevel ByteLevel Metaspace Sequence"""
KEYS = """sliding_window layer_types use_sliding_window max_window_layers rope_parameters rope_freq_factors
    attention_bias mlp_bias partial_rotary_factor quantization_config quant_method mode bits group_size factor
    low_freq_factor type high_freq_factor attention_factor mscale truncate beta_fast text_config lm_head chat_template
    added_tokens eos_token unk_token byte_fallback ignore_merges dropout normalizer pre_tokenizer post_processor decoder
    general.alignment split.count llama.attention.sliding_window llama.rope.scaling.type llama.rope.scaling.factor
    llama.expert_count tokenizer.ggml.scores tokenizer.ggml.eot_token_id
    tokenizer.ggml.add_bos_token tokenizer.ggml.pre"""

Draw = Callable[[st.SearchStrategy], Any]
Maker = Callable[[Draw], bytes]  # draws one damaged file

# Copied: an edit after this one may write into a list that was put in.
odd_values = (
    st.sampled_from(ODD) | st.sampled_from(WORDS.split()) | st.integers() | st.floats() | st.text(max_size=12)
).map(copy.deepcopy)


@dataclass(frozen=True)
class Case:
    """One input: which file was damaged, and what it holds now."""

    target: str
    blob: bytes


def edited(draw: Draw, tree: Any) -> Any:
    """A tree with one to three edits, each at a node found by walking down at random."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        parent, key = place(draw, tree)
        if parent is None:
            return draw(odd_values)
        edit(draw, parent, key)
    return tree


def place(draw: Draw, tree: Any) -> tuple[Any, Any]:
    parent, key, node = None, None, tree
    while isinstance(node, dict | list) and node and (parent is None or draw(st.integers(0, 3))):
        parent, key = node, draw(st.sampled_from(keys_of(node)))
        node = parent[key]
    return parent, key


def keys_of(node: dict | list) -> list:
    return list(node) if isinstance(node, dict) else list(range(len(node)))


def edit(draw: Draw, parent: Any, key: Any) -> None:
    """Change one entry of a container in place."""
    action = draw(st.sampled_from(("replace", "replace", "delete", "rename", "wrap", "empty", "copy", "scale", "add")))
    value = parent[key]
    if action == "delete":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[draw(st.text(max_size=8))] = parent.pop(key)
    elif action == "add" and isinstance(parent, dict):
        parent[draw(st.sampled_from(KEYS.split()))] = draw(odd_values)
    elif action == "copy":  # another entry's value, of another type as often as not
        parent[key] = copy.deepcopy(parent[draw(st.sampled_from(keys_of(parent)))])
    elif action == "wrap":
        parent[key] = draw(
            st.sampled_from(([value], {"value": value}, str(value)[:200], [value, copy.deepcopy(value)]))
        )
    elif action == "empty" and isinstance(value, dict | list | str):
        parent[key] = type(value)()
    elif action == "scale" and type(value) is int:
        parent[key] = draw(st.sampled_from((value - 1, value + 1, -value, value * 2, value // 2, value << 20)))
    else:
        parent[key] = draw(odd_values)


def damaged(draw: Draw, blob: bytes, head: int) -> bytes:
    """Bytes with one to three blind changes within the first `head`, at places as likely as each other."""
    out, chance = bytearray(blob), Random(draw(st.integers(0, 2**64 - 1)))  # hypothesis' own integers crowd at the ends
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(max(1, min(head, len(out))))
        action = chance.choice(("flip", "flip", "set", "set", "u32", "u64", "cut", "drop", "insert"))
        if action == "flip":
            out[at : at + 1] = bytes(b ^ (1 << chance.randrange(8)) for b in out[at : at + 1])
        elif action == "set":
            out[at : at + 1] = bytes([chance.randrange(256)])
        elif action in ("u32", "u64"):
            number = struct.pack("<Q", chance.choice(FIELDS))[: 4 if action == "u32" else 8]
            out[at : at + len(number)] = number
        elif action == "cut":
            del out[chance.randrange(len(out) + 1) :]
        elif action == "drop":
            del out[at : at + chance.randrange(1, 64)]
        else:
            out[at:at] = chance.randbytes(chance.randrange(1, 16))
    return bytes(out)


def to_json(tree: Any) -> bytes:
    text = json.dumps(tree)
    for mark, depth in DEPTHS.items():
        text = text.replace(json.dumps(mark), "[" * depth + "]" * depth)
    return text.encode()


def mostly_edited(tree: Any, encode: Callable[[Any], bytes], blob: bytes, head: int) -> Maker:
    """Edited trees get past the parser and reach what lies behind it, so most damage is of that kind."""

    def make(draw: Draw) -> bytes:
        return damaged(draw, blob, head) if draw(st.integers(0, 3)) == 0 else encode(edited(draw, tree))

    return make


def json_file(blob: bytes) -> Maker:
    return mostly_edited(json.loads(blob), to_json, blob, len(blob))


def safetensors_file(blob: bytes) -> Maker:
    [length] = struct.unpack("<Q", blob[:8])
    data = blob[8 + length :]

    def encode(tree: Any) -> bytes:
        made = to_json(tree)
        return struct.pack("<Q", len(made)) + made + data

    return mostly_edited(json.loads(blob[8 : 8 + length]), encode, blob, 8 + length)


def gguf_file(blob: bytes) -> Maker:
    seed = Gguf(blob)
    return mostly_edited(seed.tree, seed.encode, blob, seed.start)


def cases(seeds: dict[str, bytes], only: str | None = None) -> st.SearchStrategy[Case]:
    """Damaged inputs; every file as often as its weight in the list says."""
    kinds = {"json": json_file, "safetensors": safetensors_file, "gguf": gguf_file}
    makers = {name: kinds[name.rsplit(".", 1)[1]](blob) for name, blob in seeds.items() if only in (None, name)}
    rare = ("generation_config.json", "model.safetensors.index.json", "tokenizer_config.json")
    weighted = [name for name in makers for _ in range(1 if name in rare else 3)]

    @st.composite
    def case(draw) -> Case:  # no arguments: hypothesis would print them, megabytes of seeds
        target = draw(st.sampled_from(weighted))
        return Case(target, makers[target](draw))

    return case()
