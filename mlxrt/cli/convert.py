"""`mlxrt convert`: writes a model in another format and compares the logits with the source's."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DTYPES
from ..errors import BadRequest, NoTokenizer
from .flags import Parser, add_engine_flags, engine_config
from .progress import show_progress
from .terminal import format_bytes, mute_log, note, print_warning

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..weights.convert.calibration import Importance
    from ..weights.convert.convert import Converted
    from ..weights.convert.recipe import Recipe
    from ..weights.formats.checkpoint import Checkpoint

FORMATS = ("mlx", "jang", "jangtq", "codebook", "gguf")
GGUF_TYPES = (
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s",
    "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl",
)  # fmt: skip
# Flags that mean nothing to a GGUF file, and their values when they are not given.
FOLDER_FLAGS = {
    "--bits": None, "--group-size": None, "--profile": None, "--rules": None, "--hadamard": False, "--codes": None,
    "--length": None, "--shard-size": None, "--dtype": None,
}  # fmt: skip
SHARD_GB = 4.0
MIN_SAME_CHOICE = 0.8  # of the tokens of the sample
SAMPLE = (
    "The harbour was quiet that morning. A few boats lay against the wall, and an old man mended his nets in the sun. "
    "He had been a teacher once, far from the sea, and when children came by he still asked them how much seven times "
    "eight is. Most of them knew. In 1987 the town counted 4,312 people; today it is perhaps half of that."
)


def add_flags(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="what `generate -m` takes")
    parser.add_argument("folder", metavar="DST", type=Path, help="the folder or .gguf file to create; must not exist")
    parser.add_argument("--format", choices=FORMATS, help="how matrices are stored; gguf where DST ends in .gguf")
    parser.add_argument("--type", metavar="TYPE", help=f"of gguf: {', '.join(GGUF_TYPES)}")
    text = (
        "of mlx: 1 to 8, 16 for floats (default: 4; what is in MLX's formats already is copied); of jangtq: default 4"
    )
    parser.add_argument("--bits", type=int, help=text)
    parser.add_argument("--group-size", type=int, dest="group", help="weights per scale (default 64)")
    parser.add_argument("--profile", help="of jang (default JANG_4M) or jangtq (like JANGTQ2, JANGTQ_K)")
    text = 'JSON, for mlx: {"regex on names": {"bits": 6, "group_size": 32} or null, ...}; the first match counts'
    parser.add_argument("--rules", metavar="FILE|JSON", help=text)
    parser.add_argument("--hadamard", action="store_true", help="of jang: Hadamard-rotate rows before quantising")
    text = "codebook size, at most (default 16384)"
    parser.add_argument("--codes", type=int, dest="codebook_size", help=text)
    parser.add_argument("--length", type=int, help="weights per codebook vector (default 8)")
    text = "of mlx: the type of floats and scales in the files (default: the source's)"
    parser.add_argument("--dtype", metavar="|".join(DTYPES), dest="stored_dtype", help=text)
    parser.add_argument("--shard-size", type=float, metavar="GB", help="of one file (default 4)")
    parser.add_argument("--sample", default=SAMPLE, help="text to compare logits on, and to calibrate a codebook on")
    parser.add_argument("--no-tokenizer", action="store_true", help="write weights and config only")
    parser.add_argument("--no-check", action="store_true", help="do not load both models to compare their logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, only=("revision", "offline"))


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    choose_format(args)
    if args.shard_size is not None and not args.shard_size > 0:
        raise BadRequest(f"--shard-size must be more than 0, not {args.shard_size}")
    from ..engine.load import open_checkpoint
    from ..weights.source.resolve import resolve

    recipe = None if args.format == "gguf" else read_recipe(args)
    resolved = resolve(args.source, revision=config.revision, offline=config.offline, token=config.token)
    if resolved.shape is not None:
        raise BadRequest(f"{args.source} has no weights to convert; give an alias, a folder, a .gguf file or a hub id")
    checkpoint = open_checkpoint(resolved)
    done = write_gguf(args, checkpoint) if recipe is None else write_folder(args, config, checkpoint, recipe)
    where = "file" if args.format == "gguf" else "folder"
    result: dict[str, Any] = {where: str(done.folder), "bytes": done.nbytes, "parameters": done.parameters}
    result["bits_per_weight"] = round(done.bits_per_weight, 4)
    if not args.no_check:
        result |= compare(args.source, done.folder, config, args.sample)
        warn_if_poor(args, result)
    print(json.dumps(result) if args.json else "\n".join(format_result(result)))
    return 0


def choose_format(args: argparse.Namespace) -> None:
    """Complete --format from the name of DST; refuse flags that do not apply to it."""
    is_file = args.folder.suffix == ".gguf"
    if args.format is None and not is_file:
        raise BadRequest(f"--format is missing: one of {', '.join(FORMATS)}; a DST that ends in .gguf is gguf")
    args.format = args.format or "gguf"
    if args.format != "gguf":
        if args.type is not None:
            raise BadRequest(f"--type applies to gguf, not to {args.format}; see --bits")
        return
    if not is_file:
        raise BadRequest(f"{args.folder}: the name of a GGUF file must end in .gguf")
    if args.type is None or args.type.lower() not in GGUF_TYPES:
        problem = "is missing: give" if args.type is None else f"{args.type} is unknown; give"
        raise BadRequest(f"--type {problem} one of {', '.join(GGUF_TYPES)}")
    given = {"--group-size": "group", "--codes": "codebook_size", "--dtype": "stored_dtype"}
    for flag, default in FOLDER_FLAGS.items():
        if getattr(args, given.get(flag, flag.lstrip("-").replace("-", "_"))) != default:
            raise BadRequest(f"{flag} does not apply to gguf; see --type")


def write_gguf(args: argparse.Namespace, checkpoint: "Checkpoint") -> "Converted":
    from ..weights.convert.gguf import convert_to_gguf

    with show_progress("converting") as on_tensor:
        return convert_to_gguf(
            checkpoint, args.folder, args.type.lower(), tokenizer=not args.no_tokenizer, on_tensor=on_tensor
        )


def write_folder(
    args: argparse.Namespace, config: "EngineConfig", checkpoint: "Checkpoint", recipe: "Recipe"
) -> "Converted":
    from ..weights.convert.convert import convert

    size = int((args.shard_size or SHARD_GB) * 1e9)
    with show_progress("converting") as on_tensor:
        return convert(
            checkpoint,
            args.folder,
            recipe,
            size,
            calibrate=lambda: measure_importance(args, config),
            tokenizer=not args.no_tokenizer,
            on_tensor=on_tensor,
        )


def read_recipe(args: argparse.Namespace) -> "Recipe":
    from ..weights.convert.recipe import Recipe, read_rules

    rules = read_rules(read_given_rules(args.rules)) if args.rules else ()
    names = ("format", "bits", "group", "profile", "hadamard", "codebook_size", "length")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return Recipe(**given, rules=rules, dtype=args.stored_dtype)


def read_given_rules(given: str) -> dict[str, Any]:
    """From a file, or written out on the command line."""
    from ..weights.json_object import parse_object, read_json

    if not given.lstrip().startswith("{"):
        return read_json(Path(given))
    try:
        return parse_object(given.encode())
    except ValueError as error:
        raise BadRequest(f"--rules {given}: {error}") from None


def warn_if_poor(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if result["same_choice"] >= MIN_SAME_CHOICE:
        return
    others = {"mlx": "--bits 8", "jang": "--profile JANG_6M", "jangtq": "--bits 8", "gguf": "--type q8_0"}
    better = others.get(args.format, "--format mlx")
    print_warning(
        f"warning: this is poor: the first choice is the source's for {100 * result['same_choice']:.0f} % of the "
        f"tokens only (good: over {100 * MIN_SAME_CHOICE:.0f} %); small models need more bits: try {better}"
    )


def measure_importance(args: argparse.Namespace, config: "EngineConfig") -> "Importance":
    """Calibration: how much each input matters, from the source model on the sample."""
    from ..engine.load import load
    from ..weights.convert.calibration import Importance, calibrate

    if args.no_check:
        note("--no-check: no calibration, all inputs count equally, which costs accuracy")
        return Importance()
    with mute_log(), load(args.source, replace(config, kernels="reference")) as engine:
        return calibrate(engine.model, engine.score, sample_tokens(engine, args.sample))


def compare(source: str, folder: Path, config: "EngineConfig", text: str) -> dict[str, Any]:
    """KL divergence, top-1 agreement and largest difference of both models' logits on one text."""
    import mlx.core as mx

    from ..engine.load import load

    with mute_log(), load(source, config) as engine:
        tokens = sample_tokens(engine, text)
        expected = engine.score(tokens)
        mx.eval(expected)
    with mute_log(), load(str(folder), config) as engine:
        actual = engine.score(tokens)
        p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (expected, actual))  # log probabilities
        kl = (mx.exp(p) * (p - q)).sum(axis=-1).mean()
        same = (mx.argmax(expected, axis=-1) == mx.argmax(actual, axis=-1)).astype(mx.float32).mean()
        largest = mx.abs(actual - expected).max() / mx.maximum(mx.abs(expected).max(), 1.0)
        found = {"kl": kl, "same_choice": same, "largest_difference": largest}
        return {"tokens": len(tokens)} | {name: value.item() for name, value in found.items()}


def sample_tokens(engine: "Engine", text: str) -> list[int]:
    limits = engine.model.config
    try:
        tokens = engine.tokenizer.encode(text)
    except NoTokenizer:
        note("the model has no tokenizer: it runs on arbitrary tokens instead of the sample")
        tokens = [(7919 * i) % limits.vocab_size for i in range(64)]
    if not tokens:
        raise BadRequest("--sample holds no text")
    return tokens[: limits.context]


def format_result(result: dict[str, Any]) -> list[str]:
    where = result.get("folder", result.get("file"))
    lines = [f"{where}: {format_bytes(result['bytes'])}, {result['bits_per_weight']:.3f} bits per weight"]
    if "kl" in result:
        lines.append(
            f"logits on {result['tokens']} tokens against the source: KL {result['kl']:.4g}, "
            f"same first choice {100 * result['same_choice']:.0f} %, "
            f"largest difference {100 * result['largest_difference']:.2g} % of the largest logit"
        )
    return lines
