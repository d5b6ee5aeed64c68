"""How long a client waits for its first token: `mlxrt serve` beside mlx_lm.server and llama.cpp's server.

    python -m bench.server_peers --model smollm2 --clients 16 --requests 32 --threads 2

Every server has the same weights (mlx-lm unpacked to float32, its fastest form on a CPU, with our BLAS) and gets the
same prompts of 64 to 512 tokens at the same moments, 32 tokens out. They take turns, one computes at a time. Requests
arrive at half of what `mlxrt serve` can do with all clients asking at once, which is measured first. llama.cpp comes
with `pip install xllamacpp`.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from mlxrt.bench.corpus import read_corpus
from mlxrt.bench.export import export
from mlxrt.engine.load import open_checkpoint, open_tokenizer
from mlxrt.weights.source.resolve import resolve
from tests.long.load_server import Server, read_head, send

SHORTEST, LONGEST, OUT = 64, 512, 32
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx, params.verbosity, params.warmup = 1024 * params.n_parallel, 0, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
time.sleep(1e6)
"""
MLX_LM = """
from mlxrt import _openblas
from mlx_lm.server import main
main()
"""


@dataclass
class Waits:
    """Seconds to the first token and to the end of each request."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_ready(port: int, path: str, child: subprocess.Popen) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until and child.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server at port {port} did not start")


@contextmanager
def start_peer(command: list[str], port: int, path: str) -> Iterator[int]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, path, child)
        yield port
    finally:
        child.kill()
        child.wait()


@contextmanager
def start_ours(model: str, flags: list[str]) -> Iterator[int]:
    server = Server(model, None, tuple(flags))
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def make_prompts(model: str, count: int, seed: int) -> list[str]:
    """Texts of a known number of tokens, no two with the same beginning."""
    tokenizer = open_tokenizer(open_checkpoint(resolve(model)))
    assert tokenizer is not None
    tokens, draw = tokenizer.encode(read_corpus(), special=False), random.Random(seed)
    found = []
    for _ in range(count):
        length = draw.randint(SHORTEST, LONGEST)
        start = draw.randrange(len(tokens) - length)
        found.append(tokenizer.decode(tokens[start : start + length]))
    return found


async def ask(port: int, model: str, prompt: str, waits: Waits) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": OUT, "temperature": 0, "stream": True}
    began, first = time.perf_counter(), None
    reader, writer = await send(port, json.dumps(body).encode(), path="/v1/completions")
    if (status := await read_head(reader)) != 200:
        raise SystemExit(f"port {port} answered {status}: {(await reader.read(300)).decode(errors='replace')}")
    while line := await reader.readline():
        if (
            first is None
            and line.startswith(b"data: {")
            and any(c.get("text") for c in json.loads(line[6:])["choices"])
        ):
            first = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    end = time.perf_counter()
    waits.first.append((first or end) - began)
    waits.whole.append(end - began)


async def ask_at(port: int, model: str, prompts: list[str], times: list[float], clients: int) -> Waits:
    """Requests at these moments; a client that is still waiting sends its next one late, as a person would."""
    waits, free = Waits(), asyncio.Semaphore(clients)

    async def one(prompt: str, at: float) -> None:
        await asyncio.sleep(at)
        async with free:
            await ask(port, model, prompt, waits)

    await asyncio.gather(*(one(*pair) for pair in zip(prompts, times, strict=True)))
    return waits


def measure_capacity(port: int, args: argparse.Namespace) -> float:
    """Requests a second with all clients asking at once."""
    prompts = make_prompts(args.model, args.clients, args.seed + 1)
    began = time.perf_counter()
    asyncio.run(ask_at(port, "m", prompts, [0.0] * len(prompts), args.clients))
    return len(prompts) / (time.perf_counter() - began)


def describe(waits: Waits) -> str:
    first, whole = np.array(waits.first), np.array(waits.whole)
    return (
        f"first token p50 {np.percentile(first, 50):.2f} s, p99 {np.percentile(first, 99):.2f} s; "
        f"whole answer p50 {np.percentile(whole, 50):.2f} s, p99 {np.percentile(whole, 99):.2f} s"
    )


def run(args: argparse.Namespace) -> None:
    python, resolved = sys.executable, resolve(args.model)
    peers = {
        "mlx_lm.server": ([python, "-c", MLX_LM, "--model", str(export("plain", resolved)), "--port"], "/health"),
        "llama.cpp": ([python, "-c", LLAMA, str(resolved.path)], "/health"),
    }
    with ExitStack() as stack:
        ports = {"mlxrt serve": stack.enter_context(start_ours(args.model, args.flag))}
        for name in args.peer:
            command, path = peers[name]
            port = free_port()
            more = [str(port)] + ([str(args.clients), str(args.threads)] if name == "llama.cpp" else [])
            ports[name] = stack.enter_context(start_peer([*command, *more], port, path))
        for name, port in ports.items():  # each has computed something before it is measured
            asyncio.run(ask_at(port, model_name(name), make_prompts(args.model, 1, 99), [0.0], 1))
        capacity = measure_capacity(ports["mlxrt serve"], args)
        print(
            f"capacity of mlxrt serve: {capacity:.3f} requests/s; arrivals at half of it; load {os.getloadavg()[0]:.1f}"
        )
        draw = random.Random(args.seed)
        times = np.cumsum([draw.expovariate(capacity / 2) for _ in range(args.requests)]).tolist()
        prompts = make_prompts(args.model, args.requests, args.seed)
        for name, port in ports.items():
            waits = asyncio.run(ask_at(port, model_name(name), prompts, times, args.clients))
            print(f"{name}: {describe(waits)}; load {os.getloadavg()[0]:.1f}", flush=True)


def model_name(server: str) -> str:
    return "default_model" if server == "mlx_lm.server" else "m"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", nargs="*", default=["mlx_lm.server", "llama.cpp"])
    parser.add_argument("--flag", action="append", default=[], help="of mlxrt serve: --flag=--no-dequantise")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
