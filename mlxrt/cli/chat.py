"""`mlxrt chat`: a conversation, turn by turn, from a terminal or from a pipe (one line, one turn)."""

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import BadRequest, MlxrtError
from .flags import Parser, add_engine_flags, add_model_flag, add_sampling_flags, engine_config, sampling_given
from .outcome import complain
from .prompt import add_template_flags, decoded, read_tools, require_template
from .terminal import note

if TYPE_CHECKING:
    from .conversation import Conversation

PROMPT = "> "


def add_flags(parser: Parser) -> None:
    add_model_flag(parser)
    add_template_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    sampling, config = sampling_given(args), engine_config(args)
    if sampling.get("logprobs"):
        raise BadRequest("--logprobs are shown by `mlxrt generate --json`, not in a chat")
    extra = {"tools": read_tools(args.tools), "enable_thinking": args.enable_thinking}
    from ..engine.load import load
    from ..weights.source.alias import DEFAULT
    from .conversation import Conversation
    from .defaults import settled

    with load(DEFAULT if args.model is None else args.model, config) as engine:
        require_template(engine)
        options = settled(dict(engine.source.generation), sampling)
        options |= {name: value for name, value in extra.items() if value is not None}
        return converse(Conversation(engine, args.system, options))


def converse(conversation: "Conversation") -> int:
    """Turn after turn until the end of the input. A turn that fails is told, and the next one comes.

    From a pipe nobody sees the lines: the exit code is then that of the last failure."""
    failed, asking = 0, sys.stdin.isatty()
    if asking:
        note(f"{conversation.engine.source.name}; /help lists the commands")
        import_line_editing()
    while True:
        try:
            line = read_line(asking)
            if line is None or not conversation.take(line.strip()):
                return 0 if asking else failed
        except MlxrtError as error:
            complain(str(error))
            failed = error.exit_code


def import_line_editing() -> None:
    """Importing readline is what gives input() its editing and history; not every Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401


def read_line(asking: bool) -> str | None:
    """The next turn; None at the end of the input."""
    if not asking:
        raw = sys.stdin.buffer.readline()
        return decoded(raw, "stdin") if raw else None
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as bad:
        raise BadRequest(f"the line is not UTF-8 ({bad.reason}); type it again") from None
