"""`mlxrt serve`: the HTTP server."""

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import check_number
from ..errors import BadRequest
from .flags import Parser, add_engine_flags, engine_config
from .terminal import note

if TYPE_CHECKING:
    from ..server.run import ServeOptions

MIN_KEY = 8
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # a scheme and a host, no path
DEFAULT_QUEUE = 64  # for a person's machine: who waits longer is told to come back


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        metavar="[NAME=]MODEL",
        help="model to serve, under a name; may repeat: the first is loaded at once, others when asked for",
    )
    parser.add_argument(
        "--alias", action="append", default=[], metavar="NAME", help="another name of the first model; may repeat"
    )
    parser.add_argument(
        "--any-model", action="store_true", help="answer requests for unknown models with the first one"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port (default: 8080; 0: any free one)")
    parser.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of host and port")
    parser.add_argument("--api-key-file", metavar="FILE", help="file of keys, one a line; or set MLXRT_API_KEY")
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="pages that may call; may repeat"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="further Host names; may repeat; where given, Host is checked on every address",
    )
    parser.add_argument("--open-metrics", action="store_true", help="/metrics without a key")
    parser.add_argument(
        "--isolate", action="store_true", help="clients with different keys share no prefix of the cache"
    )
    parser.add_argument("--log-prompts", action="store_true", help="write what clients ask into the log, too")
    parser.add_argument("--max-body", type=int, default=32 << 20, metavar="BYTES", help="largest body (default: 32 MB)")
    parser.add_argument("--max-models", type=int, default=1, metavar="N", help="models loaded at a time (default: 1)")
    parser.add_argument(
        "--idle-unload", type=float, metavar="SECONDS", help="unload a model that was not used for so long"
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="time for running answers at shutdown"
    )
    parser.add_argument("--restart", action="store_true", help="load a failed engine again instead of ending")
    add_engine_flags(parser, defaults={"max_queue": DEFAULT_QUEUE})


def run(args: argparse.Namespace) -> int:
    try:
        from ..server.run import serve
        from ..server.served_models import ServedModels
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11"):
            raise
        raise BadRequest(f"{error.name} is not installed; the server needs: pip install 'mlxrt[server]'") from None
    from dataclasses import replace

    from ..engine.async_engine import AsyncEngine
    from ..engine.load import load

    config, options = engine_config(args), read_options(args)
    if "max_queue" not in vars(args):
        config = replace(config, max_queue=DEFAULT_QUEUE)
    models = ServedModels(
        read_models(args.model),
        config,
        lambda source, config: AsyncEngine(load(source, config)),
        tuple(args.alias),
        args.any_model,
        args.max_models,
        args.idle_unload,
    )
    return serve(models, options, note)


def read_models(given: list[str] | None) -> dict[str, str]:
    from ..weights.source.alias import DEFAULT

    found: dict[str, str] = {}
    for text in given or [DEFAULT]:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = default_name(text), text
        if not name or not source:
            raise BadRequest(f"--model {text!r}: expected MODEL or NAME=MODEL")
        if name in found:
            raise BadRequest(f"--model: {name!r} is given twice")
        found[name] = source
    return found


def default_name(source: str) -> str:
    """A folder's or file's own name; aliases and hub ids as they are."""
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else source


LIMITS: dict[str, tuple[type, float, float, str]] = {
    "port": (int, 0, 65535, "in 0..65535"),
    "max_body": (int, 1, 2**62, "a whole number >= 1"),
    "max_models": (int, 1, 2**31, "a whole number >= 1"),
    "idle_unload": (float, 1e-3, 1e9, "seconds > 0"),
    "grace": (float, 0, 1e9, "seconds >= 0"),
}


def check_limits(args: argparse.Namespace) -> None:
    for name, (kind, low, high, text) in LIMITS.items():
        if (value := getattr(args, name)) is not None:
            check_number(f"--{name.replace('_', '-')}", value, kind, low, high, text)


def read_options(args: argparse.Namespace) -> "ServeOptions":
    from ..server.access import AccessRules
    from ..server.run import Address, ServeOptions

    check_limits(args)
    given = {name: value for name in ("host", "port") if (value := getattr(args, name)) is not None}
    if args.uds is not None and given:
        flags = " and ".join(f"--{name}" for name in given)
        raise BadRequest(f"--uds listens on a socket and on no address: leave out {flags}, or --uds")
    address = Address(path=args.uds, **given)
    keys = read_keys(args.api_key_file)
    if not address.loopback and not keys and not args.insecure:
        raise BadRequest(
            f"--host {address.host} can be reached from other machines: give --api-key-file, or allow all by --insecure"
        )
    if "*" in args.allow_origin:
        raise BadRequest("--allow-origin '*' would let every web page use this server; name the origins")
    if wrong := next((text for text in args.allow_origin if not ORIGIN.fullmatch(text)), None):
        raise BadRequest(f"--allow-origin {wrong!r}: expected what browsers send, like https://app.example:3000")
    hosts = tuple(name.lower() for name in (*args.allow_host, address.host))
    check_host = address.loopback or bool(args.allow_host)
    if args.isolate and not keys:
        raise BadRequest("--isolate separates clients by their keys: give --api-key-file with one for each")
    rules = AccessRules(
        keys, tuple(args.allow_origin), hosts, check_host, args.max_body, args.open_metrics, args.isolate
    )
    return ServeOptions(address, rules, args.grace, args.restart, args.log_prompts)


def read_keys(path: str | None) -> tuple[str, ...]:
    """From the file or from MLXRT_API_KEY: never from the command line, which other users can read."""
    text = os.environ.get("MLXRT_API_KEY", "")
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"--api-key-file {path}: {error}") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if path is not None and not keys:
        raise BadRequest(f"--api-key-file {path} holds no key")
    if short := [key for key in keys if len(key) < MIN_KEY]:
        raise BadRequest(f"an API key has {len(short[0])} characters; at least {MIN_KEY} are needed")
    return keys
