"""What a request is made of on the command line: prompt, chat template options, sampling parameters.

generation_config.json supplies sampling defaults, logged, and a flag always wins over it. `do_sample: false` means
greedy; where it is absent, a temperature means sampling.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..engine.generation_defaults import APPLIED_KEYS, read_defaults
from ..engine.request import Request, SamplingParams
from ..errors import BadRequest, NoTokenizer
from .flags import Parser

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..engine.load import OpenModel
    from ..text import Tokenizer

log = logging.getLogger("mlxrt")

IGNORED_KEYS = frozenset(
    (
        "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
        "_from_model_config", "use_cache", "cache_implementation", "return_dict_in_generate", "output_attentions",
        "output_hidden_states", "output_scores", "trust_remote_code",
    )
)  # fmt: skip  # do_sample and the end tokens are honoured elsewhere; the others do not change what is generated


def add_prompt_flags(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="the prompt; - or none reads it from a pipe")
    parser.add_argument("-p", "--prompt", metavar="PROMPT", help="the prompt")


def add_template_flags(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--tools", metavar="FILE", help="tools the model may call: a JSON list, or a .py file of functions"
    )
    parser.add_argument(
        "--thinking", "--enable-thinking", dest="enable_thinking", action=argparse.BooleanOptionalAction,
        help="turn a model's thinking on or off (default: the template's own)",
    )  # fmt: skip
    parser.add_argument(
        "--think-budget", "--thinking-budget", dest="thinking_budget", type=int, metavar="N",
        help="end the model's thinking after N tokens of it",
    )  # fmt: skip
    parser.add_argument("--hide-thinking", action="store_true", help="do not show the model's thinking")
    parser.add_argument("--reasoning-effort", metavar="LEVEL", help="for templates that know it: low, medium, high")
    parser.add_argument(
        "--template-option", dest="template_options", action="append", metavar="NAME=VALUE",
        help="set a variable of the chat template; VALUE is JSON, or else text",
    )  # fmt: skip


def read_template_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a Request that the flags of the chat template name; those that are given."""
    variables = dict(parse_template_option(text) for text in args.template_options or ())
    if args.reasoning_effort is not None:
        variables["reasoning_effort"] = args.reasoning_effort
    found = {
        "tools": read_tools(args.tools),
        "enable_thinking": args.enable_thinking,
        "thinking_budget": args.thinking_budget,
        "template_options": variables or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def parse_template_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadRequest(f"--template-option takes NAME=VALUE, not {text[:40]!r}")
    try:
        return name.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return name.strip(), value


def name_template_flag(args: argparse.Namespace) -> str | None:
    """A flag of the chat template that is given, for those who cannot use any."""
    names = ("tools", "thinking", "think-budget", "hide-thinking", "reasoning-effort", "template-option")
    fields = ("tools", "enable_thinking", "thinking_budget", "hide_thinking", "reasoning_effort", "template_options")
    return next((f"--{n}" for n, field in zip(names, fields) if vars(args)[field] not in (None, False)), None)


def read_prompt(args: argparse.Namespace) -> str:
    if args.words and args.prompt is not None:
        raise BadRequest("two prompts are given, one with -p and one without; give one")
    if len(args.words) > 1:
        refuse_words(args.words)
    text = args.prompt if args.prompt is not None else args.words[0] if args.words else None
    if text == "-" or text is None:
        if text is None and sys.stdin.isatty():
            raise BadRequest("there is no prompt; give it as an argument, with -p or through a pipe")
        text = decode_utf8(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    if not text:
        raise BadRequest("the prompt is empty; give at least one character")
    return text


def refuse_words(words: list[str]) -> NoReturn:
    from ..weights.source.alias import ALIASES
    from ..weights.source.hub import HUB_ALIASES

    first, rest = words[0], " ".join(words[1:])
    if first in ALIASES or first in HUB_ALIASES or Path(first).exists():
        raise BadRequest(f'the model goes with -m: mlxrt generate -m {first} "{rest}", or mlxrt run {first} "{rest}"')
    raise BadRequest(f'the prompt has {len(words)} words; quote it: mlxrt generate "{first} {rest}"')


def decode_utf8(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise BadRequest(f"{source} is not UTF-8: byte {raw[at]:#04x} at {at}; convert it first") from None


def read_tools(path: str | None) -> tuple[Any, ...] | None:
    if path is None:
        return None
    if path.endswith(".py"):
        from .chat_tools import load_functions

        return tuple(load_functions(Path(path)))
    try:
        tools = json.loads(decode_utf8(Path(path).read_bytes(), path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"--tools {path}: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest(f"--tools {path}: expected a JSON list of objects")
    return tuple(tools)


def open_model(args: argparse.Namespace, config: "EngineConfig") -> "OpenModel":
    """The model of --model, its weights not loaded yet: what can be refused without them is refused first."""
    from ..engine.load import open_model
    from ..weights.source.alias import DEFAULT

    return open_model(DEFAULT if args.model is None else args.model, config)


def chat_request(
    model: "OpenModel | Engine", system: str | None, prompt: str, params: SamplingParams, **options: Any
) -> Request:
    require_template(model)
    first = ({"role": "system", "content": system},) if system is not None else ()
    return Request(messages=(*first, {"role": "user", "content": prompt}), params=params, **options)


def require_tokenizer(model: "OpenModel | Engine") -> "Tokenizer":
    if model.tokenizer is None:
        raise NoTokenizer(f"{model.source.name} came without a tokenizer: give and take tokens (--prompts, --json)")
    return model.tokenizer


def require_template(model: "OpenModel | Engine") -> None:
    if not require_tokenizer(model).has_template:
        raise BadRequest(f"{model.source.name} has no chat template; `mlxrt generate --raw` continues plain text")


def merge_defaults(generation: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The sampling options of a run: the flags, else the model's defaults; notes which came from the model."""
    defaults = {key: value for key, value in read_defaults(generation).items() if key not in given}
    if defaults:
        listed = " ".join(f"{key}={value}" for key, value in defaults.items())
        log.info(f"from generation_config.json: {listed} (flags win)")
    known = {*IGNORED_KEYS, *APPLIED_KEYS}
    if left := sorted(key for key, value in generation.items() if value is not None and key not in known):
        log.info(f"generation_config.json: not applied: {', '.join(left)}")
    options = defaults | given
    if not options.get("temperature") and (
        unused := [name for name in ("top_k", "top_p", "min_p", "seed") if given.get(name)]
    ):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        log.warning(f"{flags}: no effect at temperature 0, which takes the likeliest token; add --temperature 0.7")
    return options


def add_seed(options: dict[str, Any]) -> dict[str, Any]:
    """Draw the seed here, so that an answer that is interrupted can be repeated too."""
    if options.get("temperature", 0) > 0 and options.get("seed") is None:
        from ..engine.sampler import draw_seed

        return options | {"seed": draw_seed()}
    return options
