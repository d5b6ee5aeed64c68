"""`mlxrt info`: what a model is made of, what it needs here, and what this machine has. No weights are loaded."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import BadTemplate, BadTokenizer, NoTokenizer
from .flags import Parser, add_engine_flags, engine_config
from .terminal import note

if TYPE_CHECKING:
    from ..weights import Checkpoint
    from .anatomy import Anatomy


def add_flags(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what `generate -m` takes; without it: the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, only=("dtype", "dequantise", "revision", "offline"))


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from .machine import machine

    found: dict[str, Any] = {"machine": machine()}
    if args.model is not None:
        found = {"model": describe(args.model, config, found["machine"]["free_bytes"])} | found
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        from .table import lines

        print("\n".join(lines(found)))
    return 0


def describe(name: str, config: EngineConfig, free: int) -> dict[str, Any]:
    from ..engine.load import open_checkpoint
    from ..weights.source.resolve import locate
    from .anatomy import of_checkpoint, of_config, of_shape

    located = locate(name, revision=config.revision, offline=config.offline, token=config.token)
    told: dict[str, Any] = {"name": name, "kind": located.kind}
    if located.shape is not None:
        return told | facts(of_shape(located.shape, config), located.shape.config, free) | {"tokenizer": None}
    if located.kind == "folder" and (raw := config_alone(Path(str(located.path)))) is not None:
        note(f"{name} holds no weights: figures are for those its config.json describes")
        return told | facts(of_config(raw, config), raw, free) | {"tokenizer": None}
    checkpoint = open_checkpoint(located)
    told["path"] = str(located.path)
    told |= facts(of_checkpoint(checkpoint, config), checkpoint.config, free)
    return told | {"tokenizer": tokenizer_facts(checkpoint)}


def config_alone(folder: Path) -> dict[str, Any] | None:
    """config.json of a folder without any weights, for planning before a download."""
    from ..weights.formats.folder import read_json

    if (folder / "model.safetensors.index.json").exists() or any(folder.glob("*.safetensors")):
        return None
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else None


def facts(anatomy: "Anatomy", raw: dict[str, Any], free: int) -> dict[str, Any]:
    c, cost = anatomy.model.config, anatomy.cost
    kv = cost.per_token
    named = raw.get("architectures")
    room = max(free - anatomy.resident, 0)
    return {
        "architecture": named[0] if isinstance(named, list) and named else c.model_type,
        "model_type": c.model_type,
        "parameters": sum(part.parameters for part in anatomy.parts.values()),
        "weight_bytes": sum(part.nbytes for part in anatomy.parts.values()),
        "weight_bytes_in_memory": anatomy.resident,
        "bits": {name: part.told() for name, part in anatomy.parts.items()},
        "format": anatomy.format,
        "contradictions": list(anatomy.contradictions),
        "compute_dtype": anatomy.dtype,
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
        "memory": cost.told(),
        "longest_context": cost.longest(room, c.context),  # with all free memory for keys and values
        "longest_context_by_default": cost.longest(room / 2, c.context),  # kv_memory not given: half of it
        "weight_bytes_on_gpu": anatomy.on_gpu,
        "longest_context_on_macs": anatomy.cost_on_gpu(raw).on_macs(anatomy.on_gpu, c.context),
    }


def tokenizer_facts(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """What turns text into tokens; None without one. A broken one does not hide what is known of the model."""
    try:
        tokenizer = checkpoint.tokenizer()
    except NoTokenizer:
        return None
    except (BadTokenizer, BadTemplate) as error:
        return {"broken": str(error)}
    source, template = tokenizer_source(checkpoint), tokenizer.has_template
    return {"source": source, "tokens": tokenizer.vocab_size, "chat_template": template}


def tokenizer_source(checkpoint: "Checkpoint") -> str:
    from ..weights import GgufCheckpoint

    if isinstance(checkpoint, GgufCheckpoint):
        return f"GGUF {checkpoint.metadata['tokenizer.ggml.model']}"
    return "tokenizer.json" if (checkpoint.path / "tokenizer.json").is_file() else "tokenizer.model"
