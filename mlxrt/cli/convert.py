"""`mlxrt convert`: a model written again in another format, and what that cost it."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, NoTokenizer
from .flags import Parser, add_engine_flags, engine_config
from .logs import hidden_log
from .terminal import amount, note

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..weights.convert.convert import Converted
    from ..weights.convert.importance import Importance
    from ..weights.convert.recipe import Recipe

FORMATS = ("mlx", "jang", "jangtq", "codebook")
SAMPLE = (
    "The harbour was quiet that morning. A few boats lay against the wall, and an old man mended his nets in the sun. "
    "He had been a teacher once, far from the sea, and when children came by he still asked them how much seven times "
    "eight is. Most of them knew. In 1987 the town counted 4,312 people; today it is perhaps half of that."
)


def add_flags(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="what `generate -m` takes")
    parser.add_argument("folder", metavar="DST", type=Path, help="the folder to make; must not exist")
    parser.add_argument("--format", required=True, choices=FORMATS, help="how matrices are stored")
    parser.add_argument("--bits", type=int, help="of mlx (default 4) and jangtq (default 4)")
    parser.add_argument("--group-size", type=int, dest="group", help="weights that share a scale (default 64)")
    parser.add_argument("--profile", help="of jang (default JANG_4M) or jangtq (like JANGTQ2, JANGTQ_K)")
    text = 'JSON, for mlx: {"regex on names": {"bits": 6, "group_size": 32} or null, ...}; the first that fits counts'
    parser.add_argument("--rules", type=Path, help=text)
    parser.add_argument("--hadamard", action="store_true", help="of jang: turn rows before quantising")
    parser.add_argument("--codes", type=int, default=1 << 14, help="most vectors in a codebook (default 16384)")
    parser.add_argument("--length", type=int, default=8, help="weights in a codebook's vector (default 8)")
    parser.add_argument("--shard-size", type=float, default=4.0, metavar="GB", help="of one file (default 4)")
    parser.add_argument(
        "--sample", default=SAMPLE, help="text to compare logits on, and to weigh a codebook's errors by"
    )
    parser.add_argument("--no-check", action="store_true", help="do not load both models to compare their logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, only=("revision", "offline", "dtype"))


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    if not args.shard_size > 0:
        raise BadRequest(f"--shard-size must be more than 0, not {args.shard_size}")
    from ..engine.load import open_checkpoint
    from ..weights.convert.convert import convert
    from ..weights.source.resolve import locate

    recipe = read_recipe(args)
    located = locate(args.source, revision=config.revision, offline=config.offline, token=config.token)
    if located.shape is not None:
        raise BadRequest(f"{args.source} has no weights to convert; give an alias, a folder, a .gguf file or a hub id")
    size = int(args.shard_size * 1e9)
    done = convert(open_checkpoint(located), args.folder, recipe, size, lambda: weighed(args, config))
    told = facts(done, {} if args.no_check else compare(args.source, done.folder, config, args.sample))
    print(json.dumps(told) if args.json else "\n".join(lines(told)))
    return 0


def read_recipe(args: argparse.Namespace) -> "Recipe":
    from ..weights.convert.recipe import Recipe, read_rules
    from ..weights.formats.folder import read_json

    rules = read_rules(read_json(args.rules)) if args.rules else ()
    same = {name: getattr(args, name) for name in ("format", "bits", "group", "profile", "hadamard", "codes", "length")}
    return Recipe(**same, rules=rules)


def weighed(args: argparse.Namespace, config: "EngineConfig") -> "Importance":
    """How much each input counts, from the source model on the sample."""
    from ..engine.load import load
    from ..weights.convert.calibration import importance
    from ..weights.convert.importance import Importance

    if args.no_check:
        note("with --no-check no model is loaded to see its inputs: all weights count alike, which costs accuracy")
        return Importance()
    with hidden_log(), load(args.source, replace(config, kernels="reference")) as engine:
        return importance(engine, sample_tokens(engine, args.sample))


def facts(done: "Converted", checked: dict[str, Any]) -> dict[str, Any]:
    bits = round(done.bits_per_weight, 4)
    return {
        "folder": str(done.folder),
        "bytes": done.nbytes,
        "parameters": done.parameters,
        "bits_per_weight": bits,
        **checked,
    }


def compare(source: str, folder: Path, config: "EngineConfig", text: str) -> dict[str, Any]:
    """The logits of both models on one text."""
    import mlx.core as mx

    from ..engine.load import load

    with hidden_log(), load(source, config) as engine:
        tokens = sample_tokens(engine, text)
        true = engine.score(tokens)
        mx.eval(true)
    with hidden_log(), load(str(folder), config) as engine:
        got = engine.score(tokens)
        share, other = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (true, got))
        kl = (mx.exp(share) * (share - other)).sum(axis=-1).mean()
        same = (mx.argmax(true, axis=-1) == mx.argmax(got, axis=-1)).astype(mx.float32).mean()
        most = mx.abs(got - true).max() / mx.maximum(mx.abs(true).max(), 1.0)
        return {"tokens": len(tokens), "kl": kl.item(), "same_choice": same.item(), "largest_difference": most.item()}


def sample_tokens(engine: "Engine", text: str) -> list[int]:
    limits = engine.model.config
    try:
        tokens = engine.tokenizer.encode(text)
    except NoTokenizer:
        note("the model has no tokenizer: it is run on tokens of no meaning instead of the sample")
        tokens = [(7919 * i) % limits.vocab_size for i in range(64)]
    if not tokens:
        raise BadRequest("--sample holds no text")
    return tokens[: limits.context]


def lines(told: dict[str, Any]) -> list[str]:
    made = [f"{told['folder']}: {amount(told['bytes'])}, {told['bits_per_weight']:.3f} bits per weight"]
    if "kl" in told:
        made.append(
            f"logits on {told['tokens']} tokens against the source: KL {told['kl']:.4g}, "
            f"same first choice {100 * told['same_choice']:.0f} %, "
            f"largest difference {100 * told['largest_difference']:.2g} % of the largest logit"
        )
    return made
