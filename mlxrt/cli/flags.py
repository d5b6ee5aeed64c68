"""Flags generated from `EngineConfig` and `SamplingParams`, so that an option has one name in Python and in the shell.

A flag that was not given sets no attribute, so that the model's own defaults apply. Imports no MLX.
"""

import argparse
import math
import types
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, NoReturn, Union, get_args, get_origin

from ..config import EngineConfig
from ..engine.request import SamplingParams
from ..errors import BadRequest

ALIASES = {"max_tokens": ("-n",), "temperature": ("--temp",)}
METAVARS = {
    "kv": "KIND", "kernels": "auto|strict|reference", "dtype": "float32|bfloat16|float16",
    "cpu_activations": "float32|int8",
} | dict.fromkeys(("memory", "kv_memory", "disk_cache_bytes"), "SIZE")  # fmt: skip
SWITCHES = {"on": True, "off": False}
FLAG_HELP = {
    "max_tokens": "most tokens to generate; -1: to the end of the context",
    "temperature": "randomness; 0 takes the likeliest token",
    "top_k": "choose among the K likeliest tokens (0: off)",
    "top_p": "choose among the likeliest tokens that sum to this probability, in (0, 1]",
    "min_p": "drop tokens less likely than this share of the likeliest, in [0, 1]",
    "repetition_penalty": "divide the logits of tokens seen in prompt or answer (1: off)",
    "presence_penalty": "subtract from the logits of tokens in the answer (0: off)",
    "frequency_penalty": "subtract for every time a token is in the answer (0: off)",
    "logit_bias": "add VALUE to a token's logit; may repeat",
    "suppress": "token ids never to generate; may repeat",
    "stop": "end the answer before this text; may repeat",
    "stop_token_ids": "token ids that end the answer; may repeat",
    "seed": "seed of the sampling (default: drawn and reported)",
    "logprobs": "log probabilities of the N likeliest tokens at each step (with --json)",
    "ignore_eos": "do not stop at the model's end token",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises BadRequest: one line, no usage text, no abbreviations."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise BadRequest(f"{message}; see {self.prog} --help")


MODEL_HELP = "alias, folder, .gguf file, hub id or shape:NAME[@4bit] (default: smollm2, downloaded on first use)"


def add_model_flag(parser: Parser) -> None:
    parser.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)


def add_sampling_flags(parser: Parser, max_tokens: int | None = None) -> None:
    """`max_tokens`: the command's own default."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json, else greedy)")
    for option in fields(SamplingParams):
        default = max_tokens if option.name == "max_tokens" and max_tokens is not None else option.default
        add_flag(group, option, FLAG_HELP[option.name], default)


def add_engine_flags(
    parser: Parser, only: tuple[str, ...] | None = None, defaults: Mapping[str, object] | None = None
) -> None:
    """`defaults`: the command's own, to be told in its help."""
    group = parser.add_argument_group("engine")
    for option in EngineConfig.options():
        if only is None or option.name in only:
            default = (defaults or {}).get(option.name, option.default)
            add_flag(group, option, option.metadata["help"], default)


def add_flag(group: argparse._ArgumentGroup, option: Field, text: str, default: object) -> None:
    names = (*ALIASES.get(option.name, ()), f"--{option.name.replace('_', '-')}")
    if type(default) is int and default:  # the others are off, or chosen at load and described so
        text += f" (default: {default})"
    kind = argument_type(option.type)
    if option.name in METAVARS:
        kind["metavar"] = METAVARS[option.name]
    group.add_argument(*names, dest=option.name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **kind)


def argument_type(annotation: Any) -> dict[str, Any]:
    """The arguments of `add_argument` that parse this type."""
    choices = set(get_args(annotation)) if get_origin(annotation) in (types.UnionType, Union) else {annotation}
    choices.discard(type(None))
    if choices == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if choices == {int}:
        return {"type": parse_int, "metavar": "N"}
    if choices == {float}:
        return {"type": parse_float, "metavar": "X"}
    if str in choices:
        return {"metavar": "TEXT"}
    [kind] = choices
    if get_origin(kind) is tuple:
        ids = get_args(kind)[0] is int
        return {"action": Extend, "type": parse_int_list if ids else str, "metavar": "ID,..." if ids else "TEXT"}
    if get_origin(kind) in (Mapping, dict):
        return {"action": Extend, "type": parse_bias, "metavar": "ID=VALUE"}
    raise AssertionError(f"no flag can be made for {annotation}")


class Extend(argparse.Action):
    """A flag that may repeat. argparse's own "extend" would split a string into letters."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = vars(namespace).get(self.dest, ())
        setattr(namespace, self.dest, (*before, *(values if isinstance(values, tuple) else (values,))))


def parse_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
    if abs(value) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is beyond 64 bits")
    return value


def parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a finite number")
    return value


def parse_int_list(text: str) -> tuple[int, ...]:
    return tuple(parse_int(part) for part in text.split(","))


def parse_bias(text: str) -> tuple[tuple[int, float], ...]:
    token, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not ID=VALUE, like 42=-1.5")
    return ((parse_int(token), parse_float(value)),)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options on the command line, validated before a model is loaded."""
    given = select_given(args, (option.name for option in fields(SamplingParams)))
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    SamplingParams(**given)
    return given


def parse_sampling_option(name: str, text: str) -> tuple[str, Any]:
    """A sampling option by its name in Python or in the shell, its value parsed as its flag would parse it."""
    known = {option.name: option for option in fields(SamplingParams)}
    name = {flag.lstrip("-"): option for option, flags in ALIASES.items() for flag in flags}.get(name, name)
    name = name.replace("-", "_")
    if name not in known:
        raise BadRequest(f"there is no option {name}; options: {', '.join(known)}")
    kind = argument_type(known[name].type)
    if kind.get("action") is argparse.BooleanOptionalAction:
        if text not in SWITCHES:
            raise BadRequest(f"{name} is {' or '.join(SWITCHES)}, not {text[:40]!r}")
        return name, SWITCHES[text]
    try:
        value = kind.get("type", str)(text)
    except argparse.ArgumentTypeError as error:
        raise BadRequest(f"{name}: {error}") from None
    if kind.get("action") is Extend and not isinstance(value, tuple):
        value = (value,)
    value = dict(value) if name == "logit_bias" else value
    option: dict[str, Any] = {name: value}
    SamplingParams(**option)
    return name, value


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**select_given(args, (option.name for option in EngineConfig.options())))


def select_given(args: argparse.Namespace, names) -> dict[str, Any]:
    found = vars(args)
    return {name: found[name] for name in names if name in found}
