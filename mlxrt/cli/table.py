"""The facts of `mlxrt info` as lines for people."""

import sys
from collections.abc import Iterator
from typing import Any

from .terminal import amount, one_line, paint


def lines(found: dict[str, Any]) -> Iterator[str]:
    if "model" in found:
        yield from titled(found["model"]["name"], model_rows(found["model"]))
        yield ""
    yield from titled("this machine", machine_rows(found["machine"]))


def titled(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield paint(one_line(title), "bold", sys.stdout)
    for name, value in rows:
        yield f"  {name:<18} {one_line(value)}"


def machine_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("device", m["device"] if m["device"] == m["device_name"] else f"{m['device']} ({m['device_name']})"),
        ("memory", f"{amount(m['memory_bytes'])}, {amount(m['free_bytes'])} free"),
        ("software", f"mlxrt {m['mlxrt']}, MLX {m['mlx']}"),
        ("kernels", m["kernels"]),
    ]
    return rows + ([("BLAS", m["blas"])] if "blas" in m else [])


def model_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("architecture", f"{m['architecture']} ({m['model_type']})"),
        *([("format", format_text(m["format"]))] if m["format"] else []),
        *(("contradiction", line) for line in m["contradictions"]),
        ("parameters", f"{m['parameters']:,}"),
        ("weights", f"{amount(m['weight_bytes'])} stored, {amount(m['weight_bytes_in_memory'])} in memory"),
        *((f"  {name}", part_text(part)) for name, part in m["bits"].items()),
        ("computes in", m["compute_dtype"]),
        ("layers", f"{m['layers']}, {m['hidden_size']} wide"),
        ("heads", f"{m['attention_heads']} of {m['head_dim']}, {m['kv_heads']} for keys and values"),
        ("attention", windows_text(m)),
        ("rope", f"{m['rope']['kind']}, theta {m['rope']['theta']:g}" if m["rope"] else "as mlx-lm computes it"),
        ("vocabulary", f"{m['vocab_size']:,}"),
        ("tokenizer", tokenizer_text(m["tokenizer"])),
        ("context", f"{m['context']:,} tokens"),
        ("keys and values", f"{m['kv_bytes_per_token']:,.0f} bytes per token"),
        *((f"  {group['kind']}", group_text(group)) for group in m["memory"]),
        ("longest context", longest_text(m)),
        ("  on Macs of", macs_text(m["longest_context_on_macs"])),
    ]
    return rows if "path" not in m else [("path", m["path"]), *rows]


def format_text(found: dict[str, Any]) -> str:
    profile = f", profile {found['profile']}" if found["profile"] else ""
    labels = f", labelled {found['labels']}" if found["labels"] else ""
    return found["name"] + profile + labels + (", rows turned (hadamard)" if found["hadamard"] else "")


def part_text(part: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in part["kinds"].items())
    bits = "unused" if part["bits"] is None else f"{part['bits']:.2f} bits per weight"
    return f"{bits}, {amount(part['bytes'])} ({kinds})"


def windows_text(m: dict[str, Any]) -> str:
    if m["rope"] is None:
        return "as mlx-lm computes it"
    parts = [f"{count} layers see {window} tokens" for window, count in m["windows"].items()]
    full = m["layers"] - sum(m["windows"].values())
    return ", ".join([*([f"{full} layers see everything"] if full else []), *parts])


def tokenizer_text(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none: tokens in, tokens out"
    if "broken" in tokenizer:
        return f"broken: {tokenizer['broken']}"
    template = "with" if tokenizer["chat_template"] else "without"
    return f"{tokenizer['source']}, {tokenizer['tokens']:,} tokens, {template} chat template"


def group_text(group: dict[str, Any]) -> str:
    if "bytes_per_token" in group:
        return f"{group['layers']} layers, {group['bytes_per_token']:,.0f} bytes per token"
    return f"{group['layers']} layers, {amount(group['bytes_per_sequence'])} per sequence and checkpoint"


def macs_text(longest: dict[str, int]) -> str:
    return ", ".join(f"{size}: {tokens:,}" if tokens else f"{size}: does not fit" for size, tokens in longest.items())


def longest_text(m: dict[str, Any]) -> str:
    longest, usual = m["longest_context"], m["longest_context_by_default"]
    if not longest:
        return "none: the weights do not fit the free memory"
    if usual == m["context"]:
        return f"{longest:,} tokens: the model's own limit fits"
    return f"{longest:,} tokens with all free memory, {usual:,} by default (kv_memory: half)"
