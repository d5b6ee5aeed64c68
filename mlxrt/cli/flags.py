"""Flags made from the dataclasses they fill: one name for an option, in Python and here.

A flag that was not given leaves no trace, so that a model's own defaults can step in for it. Imports no MLX.
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

SHORT = {"max_tokens": ("-n",), "temperature": ("--temp",)}
MEANING = {
    "max_tokens": "most tokens to generate",
    "temperature": "randomness; 0 takes the likeliest token",
    "top_k": "choose among the K likeliest tokens (0: off)",
    "top_p": "choose among the likeliest tokens that hold this probability, in (0, 1]",
    "min_p": "drop tokens less likely than this part of the likeliest, in [0, 1]",
    "repetition_penalty": "divide the logits of tokens seen in prompt or answer (1: off)",
    "presence_penalty": "subtract from the logits of tokens in the answer (0: off)",
    "frequency_penalty": "subtract for every time a token is in the answer (0: off)",
    "logit_bias": "add VALUE to a token's logit; may repeat",
    "suppress": "token ids never to generate; may repeat",
    "stop": "end the answer before this text; may repeat",
    "stop_token_ids": "token ids that end the answer; may repeat",
    "seed": "seed of the sampling (default: drawn and shown)",
    "logprobs": "log probabilities of the N likeliest tokens at each step (with --json)",
    "ignore_eos": "go on after the model's end token",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, no usage text."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise BadRequest(f"{message}; see {self.prog} --help")


def add_model_flag(parser: Parser) -> None:
    text = "alias, folder, .gguf file, hub id or shape:NAME[@4bit] (default: smollm2, fetched when first used)"
    parser.add_argument("-m", "--model", metavar="MODEL", help=text)


def add_sampling_flags(parser: Parser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json, else greedy)")
    for option in fields(SamplingParams):
        add_flag(group, option, MEANING[option.name])


def add_engine_flags(parser: Parser, only: tuple[str, ...] | None = None) -> None:
    group = parser.add_argument_group("engine")
    for option in EngineConfig.options():
        if only is None or option.name in only:
            add_flag(group, option, option.metadata["help"])


def add_flag(group: argparse._ArgumentGroup, option: Field, text: str) -> None:
    names = (*SHORT.get(option.name, ()), f"--{option.name.replace('_', '-')}")
    if type(option.default) is int and option.default:  # the others are off, or chosen at load and described so
        text += f" (default: {option.default})"
    group.add_argument(
        *names, dest=option.name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **reading(option.type)
    )


def reading(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    choices = set(get_args(annotation)) if get_origin(annotation) in (types.UnionType, Union) else {annotation}
    choices.discard(type(None))
    if choices == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if choices == {int}:
        return {"type": whole, "metavar": "N"}
    if choices == {float}:
        return {"type": real, "metavar": "X"}
    if str in choices:
        return {"metavar": "TEXT"}
    [kind] = choices
    if get_origin(kind) is tuple:
        ids = get_args(kind)[0] is int
        return {"action": Extend, "type": whole_list if ids else str, "metavar": "ID,..." if ids else "TEXT"}
    if get_origin(kind) in (Mapping, dict):
        return {"action": Extend, "type": bias, "metavar": "ID=VALUE"}
    raise AssertionError(f"no flag can be made for {annotation}")


class Extend(argparse.Action):
    """A flag that may repeat. argparse's own "extend" would take a text apart into letters."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = vars(namespace).get(self.dest, ())
        setattr(namespace, self.dest, (*before, *(values if isinstance(values, tuple) else (values,))))


def whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from None
    if abs(value) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is beyond 64 bits")
    return value


def real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no finite number")
    return value


def whole_list(text: str) -> tuple[int, ...]:
    return tuple(whole(part) for part in text.split(","))


def bias(text: str) -> tuple[tuple[int, float], ...]:
    token, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not ID=VALUE, like 42=-1.5")
    return ((whole(token), real(value)),)


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options on the command line, each checked alone: a bad one is answered before a model is loaded."""
    given = taken(args, (option.name for option in fields(SamplingParams)))
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    SamplingParams(**given)
    return given


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**taken(args, (option.name for option in EngineConfig.options())))


def taken(args: argparse.Namespace, names) -> dict[str, Any]:
    found = vars(args)
    return {name: found[name] for name in names if name in found}
