"""`mlxrt info`: what a model is made of, what it needs, and what this machine has. No weights are loaded."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import BadTemplate, BadTokenizer, NoTokenizer
from .flags import Parser, add_engine_flags, engine_config
from .terminal import format_bytes, note, one_line, paint

if TYPE_CHECKING:
    from ..weights import Checkpoint
    from .inspect import ModelReport


def add_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what `generate -m` takes; without it: the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, only=("dtype", "dequantise", "revision", "offline"))


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from .inspect import inspect_machine

    found: dict[str, Any] = {"machine": inspect_machine()}
    if args.model is not None:
        found = {"model": describe(args.model, config, found["machine"]["free_bytes"])} | found
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(format_info(found)))
    return 0


def describe(name: str, config: EngineConfig, free: int) -> dict[str, Any]:
    from ..engine.load import open_checkpoint
    from ..weights.source.resolve import resolve
    from .inspect import inspect_checkpoint, inspect_config, inspect_shape

    resolved = resolve(name, revision=config.revision, offline=config.offline, token=config.token)
    found: dict[str, Any] = {"name": name, "kind": resolved.kind}
    if (shape := resolved.shape) is not None:
        return found | describe_model(inspect_shape(shape, config), shape.config, free) | {"tokenizer": None}
    if resolved.kind == "folder" and (raw := read_config_only(Path(str(resolved.path)))) is not None:
        note(f"{name} holds no weights: the figures are from its config.json")
        return found | describe_model(inspect_config(raw, config), raw, free) | {"tokenizer": None}
    checkpoint = open_checkpoint(resolved)
    found["path"] = str(resolved.path)
    found |= describe_model(inspect_checkpoint(checkpoint, config), checkpoint.config, free)
    return found | {"tokenizer": describe_tokenizer(checkpoint), "answers": describe_answers(checkpoint)}


def read_config_only(folder: Path) -> dict[str, Any] | None:
    """config.json of a folder without weights, for planning before a download."""
    from ..weights.json_object import read_json

    if (folder / "model.safetensors.index.json").exists() or any(folder.glob("*.safetensors")):
        return None
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else None


def describe_model(report: "ModelReport", raw: dict[str, Any], free: int) -> dict[str, Any]:
    c, cost = report.model.config, report.kv_cost
    kv = cost.per_token
    architectures = raw.get("architectures")
    available = max(free - report.resident, 0)
    return {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else c.model_type,
        "model_type": c.model_type,
        "parameters": sum(part.parameters for part in report.parts.values()),
        "weight_bytes": sum(part.nbytes for part in report.parts.values()),
        "weight_bytes_in_memory": report.resident,
        "bits": {name: part.to_dict() for name, part in report.parts.items()},
        "format": report.format,
        "contradictions": list(report.contradictions),
        "compute_dtype": report.dtype,
        "layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "attention_heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rope": {"kind": c.rope.kind, "theta": c.rope.theta} if c.rope is not None else None,
        "windows": {str(w): c.windows.count(w) for w in sorted({w for w in c.windows if w is not None})},
        "context": c.context,
        "kv_bytes_per_token": int(kv) if float(kv).is_integer() else kv,
        "memory": cost.to_list(),
        "longest_context": cost.max_context(available, c.context),  # all free memory for the KV cache
        "longest_context_by_default": cost.max_context(available / 2, c.context),  # kv_memory not given: half of it
        "weight_bytes_on_gpu": report.on_gpu,
        "longest_context_on_macs": report.kv_cost_on_gpu(raw).max_context_on_macs(report.on_gpu, c.context),
    }


def describe_tokenizer(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """The tokenizer; None without one. A broken one is described, so that the rest is still shown."""
    try:
        tokenizer = checkpoint.tokenizer()
    except NoTokenizer:
        return None
    except (BadTokenizer, BadTemplate) as error:
        return {"broken": str(error)}
    from ..weights import GgufCheckpoint

    if isinstance(checkpoint, GgufCheckpoint):
        source = f"GGUF {checkpoint.metadata['tokenizer.ggml.model']}"
    else:
        source = "tokenizer.json" if (checkpoint.path / "tokenizer.json").is_file() else "tokenizer.model"
    return {"source": source, "tokens": tokenizer.vocab_size, "chat_template": tokenizer.has_template}


def describe_answers(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """How the answers of a model with a chat template are read: as its engine does, without flags."""
    from ..engine.load import find_capabilities

    try:
        tokenizer = checkpoint.tokenizer()
    except (NoTokenizer, BadTokenizer, BadTemplate):
        return None
    if not tokenizer.has_template:
        return None
    form = tokenizer.chat_format.output_format(find_capabilities(checkpoint.config))
    return {"reasoning_parser": form.reasoning, "tool_parser": form.calls, "tool_parser_guessed": not form.calls_known}


def format_info(found: dict[str, Any]) -> Iterator[str]:
    if "model" in found:
        yield from format_section(found["model"]["name"], model_rows(found["model"]))
        yield ""
    yield from format_section("this machine", machine_rows(found["machine"]))


def format_section(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield paint(one_line(title), "bold", sys.stdout)
    for name, value in rows:
        yield f"  {name:<18} {one_line(value)}"


def machine_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("device", m["device"] if m["device"] == m["device_name"] else f"{m['device']} ({m['device_name']})"),
        ("memory", f"{format_bytes(m['memory_bytes'])}, {format_bytes(m['free_bytes'])} free"),
        ("software", f"mlxrt {m['mlxrt']}, MLX {m['mlx']}"),
        ("kernels", m["kernels"]),
    ]
    return rows + ([("BLAS", m["blas"])] if "blas" in m else [])


def model_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("architecture", f"{m['architecture']} ({m['model_type']})"),
        *([("format", format_weight_format(m["format"]))] if m["format"] else []),
        *(("contradiction", line) for line in m["contradictions"]),
        ("parameters", f"{m['parameters']:,}"),
        ("weights", f"{format_bytes(m['weight_bytes'])} stored, {format_bytes(m['weight_bytes_in_memory'])} in memory"),
        *((f"  {name}", format_part(part)) for name, part in m["bits"].items()),
        ("computes in", m["compute_dtype"]),
        ("layers", f"{m['layers']}, {m['hidden_size']} wide"),
        ("heads", f"{m['attention_heads']} of {m['head_dim']}, {m['kv_heads']} KV heads"),
        ("attention", format_windows(m)),
        ("rope", f"{m['rope']['kind']}, theta {m['rope']['theta']:g}" if m["rope"] else "as mlx-lm computes it"),
        ("vocabulary", f"{m['vocab_size']:,}"),
        ("tokenizer", format_tokenizer(m["tokenizer"])),
        ("answers", format_answers(m.get("answers"))),
        ("context", f"{m['context']:,} tokens"),
        ("KV cache", f"{m['kv_bytes_per_token']:,.0f} bytes per token"),
        *((f"  {group['kind']}", format_group(group)) for group in m["memory"]),
        ("longest context", format_max_context(m)),
        ("  on Macs of", format_macs(m["longest_context_on_macs"])),
    ]
    return rows if "path" not in m else [("path", m["path"]), *rows]


def format_weight_format(found: dict[str, Any]) -> str:
    profile = f", profile {found['profile']}" if found["profile"] else ""
    labels = f", labelled {found['labels']}" if found["labels"] else ""
    return found["name"] + profile + labels + (", Hadamard-rotated" if found["hadamard"] else "")


def format_part(part: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in part["kinds"].items())
    bits = "unused" if part["bits"] is None else f"{part['bits']:.2f} bits per weight"
    return f"{bits}, {format_bytes(part['bytes'])} ({kinds})"


def format_windows(m: dict[str, Any]) -> str:
    if m["rope"] is None:
        return "as mlx-lm computes it"
    parts = [f"{count} layers see {window} tokens" for window, count in m["windows"].items()]
    full = m["layers"] - sum(m["windows"].values())
    return ", ".join([*([f"{full} layers see everything"] if full else []), *parts])


def format_answers(answers: dict[str, Any] | None) -> str:
    if answers is None:
        return "plain text"
    guessed = " (a guess: the template does not tell)" if answers["tool_parser_guessed"] else ""
    return f"reasoning {answers['reasoning_parser']}, tool calls {answers['tool_parser']}{guessed}"


def format_tokenizer(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none: tokens in, tokens out"
    if "broken" in tokenizer:
        return f"broken: {tokenizer['broken']}"
    template = "with" if tokenizer["chat_template"] else "without"
    return f"{tokenizer['source']}, {tokenizer['tokens']:,} tokens, {template} chat template"


def format_group(group: dict[str, Any]) -> str:
    if "bytes_per_token" in group:
        return f"{group['layers']} layers, {group['bytes_per_token']:,.0f} bytes per token"
    return f"{group['layers']} layers, {format_bytes(group['bytes_per_sequence'])} per sequence and checkpoint"


def format_macs(longest: dict[str, int]) -> str:
    return ", ".join(f"{size}: {tokens:,}" if tokens else f"{size}: does not fit" for size, tokens in longest.items())


def format_max_context(m: dict[str, Any]) -> str:
    longest, usual = m["longest_context"], m["longest_context_by_default"]
    if not longest:
        return "none: the weights do not fit the free memory"
    if usual == m["context"]:
        return f"{longest:,} tokens: the model's own limit fits"
    return f"{longest:,} tokens with all free memory, {usual:,} by default (kv_memory: half)"
