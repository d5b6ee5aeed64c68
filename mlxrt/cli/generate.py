"""`mlxrt generate`: one prompt, one completion; or a file of prompts (batch.py)."""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest
from .batch import DEFAULT_PARALLEL, add_batch_flags, check_batch_flags, run_batch
from .exit_status import INTERRUPTED
from .flags import Parser, add_engine_flags, add_model_flag, add_sampling_flags, engine_config, sampling_options
from .request import (
    add_prompt_flags,
    add_seed,
    add_template_flags,
    chat_request,
    merge_defaults,
    name_template_flag,
    open_model,
    read_prompt,
    read_template_flags,
    require_tokenizer,
)
from .response_format import add_format_flags, read_format

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..engine.engine import Engine
    from ..engine.load import OpenModel
    from ..engine.request import Request


def add_flags(parser: Parser) -> None:
    add_model_flag(parser)
    add_prompt_flags(parser)
    add_template_flags(parser)
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    add_format_flags(parser)
    add_batch_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_batch_flags(args)
    sampling, config = sampling_options(args), engine_config(args)
    if args.prompts is not None:
        return run_prompts(args, config, sampling)
    if sampling.get("logprobs") and not args.json:
        raise BadRequest("--logprobs are shown with --json only; add --json")
    prompt, template = read_prompt(args), template_options(args)
    template["response_format"] = read_format(args)
    model = open_model(args, config)
    request = make_request(model, args, prompt, template, sampling)
    model.check_prompt(request)
    with model.load() as engine:
        return print_completion(engine, request, args.json, not args.hide_thinking)


def run_prompts(args: argparse.Namespace, config: "EngineConfig", sampling: dict[str, Any]) -> int:
    if (flag := name_template_flag(args)) is not None:
        raise BadRequest(f"{flag} does not apply with --prompts; write it into the lines")
    if read_format(args) is not None:
        raise BadRequest("the form of the answer does not apply with --prompts; write response_format into the lines")
    if args.raw and args.system is not None:
        raise BadRequest("--system goes through the chat template: it does not apply with --raw")
    running = vars(args).get("max_running", args.parallel or DEFAULT_PARALLEL)
    return run_batch(args, replace(config, max_running=running), sampling)


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chat template's options, refused with --raw."""
    flag = "--system" if args.system is not None else name_template_flag(args)
    if args.raw and flag is not None:
        raise BadRequest(f"{flag} goes through the chat template: it does not apply with --raw")
    return read_template_flags(args)


def make_request(
    model: "OpenModel", args: argparse.Namespace, prompt: str, template: dict[str, Any], sampling: dict[str, Any]
) -> "Request":
    from ..engine.request import Request, SamplingParams

    params = SamplingParams(**add_seed(merge_defaults(dict(model.source.generation), sampling)))
    if args.raw:
        require_tokenizer(model)
        return Request(prompt=prompt, params=params, response_format=template["response_format"])
    return chat_request(model, args.system, prompt, params, **template)


def print_completion(engine: "Engine", request: "Request", as_json: bool, show_thinking: bool) -> int:
    from .output import StreamPrinter, completion_to_dict, print_timings

    printer = StreamPrinter(echo=not as_json, show_thinking=show_thinking)
    with engine.stream(request) as stream:
        try:
            finished = printer.consume(stream)
        except KeyboardInterrupt:
            finished = False
    printer.end_line()
    done = printer.completion() if finished else printer.interrupted_completion(stream.prompt_tokens, request.params)
    peak_memory = engine.stats().peak_memory
    if as_json:
        print(json.dumps(completion_to_dict(engine, done, peak_memory), ensure_ascii=False, allow_nan=False))
    else:
        print_timings(done, peak_memory, request.params.max_tokens)
    return 0 if finished else INTERRUPTED
