"""What HTTP costs: tokens a second, and tokens a second of CPU time, through the server's streams beside the engine
alone, taken in turns; and the CPU time of the server's event loop for each token.

On a busy machine trust the CPU times: the clients' own work is not in them. Both engines use as many threads, all cores
unless OMP_NUM_THREADS says otherwise, whatever the load is when each of them is loaded.

    python -m bench.server_overhead --model smollm2 --streams 1 16 --tokens 48 --runs 5
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.long.load_server import Server, read_head, send


@dataclass(frozen=True)
class Run:
    """One turn: tokens a second by the clock, and seconds of CPU time."""

    speed: float
    cpu: float
    loop: float = 0.0  # of the CPU time, the event loop's


def ask(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{i} {random.randrange(10**8):08d} Tell me a long story."}]


async def through_http(server: Server, streams: int, tokens: int) -> Run:
    async def one(i: int) -> bytes:
        body = {"messages": ask(i), "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        reader, writer = await send(server.port, json.dumps(body).encode())
        await read_head(reader)
        frames = await reader.read()  # parsed when the clock has stopped: the client is not what is measured
        writer.close()
        return frames

    began, cpu, loop = time.perf_counter(), server.cpu_seconds(), loop_seconds(server)
    answers = await asyncio.gather(*map(one, range(streams)))
    seconds = time.perf_counter() - began
    cpu, loop = server.cpu_seconds() - cpu, loop_seconds(server) - loop
    for answer in answers:
        check(answer)
    return Run(streams * tokens / seconds, cpu, loop)


def check(answer: bytes) -> None:
    """A stream must have come whole: text, a reason, the mark of its end."""
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines.pop() != b"[DONE]":
        raise SystemExit("a stream has no end")
    choices = [json.loads(line)["choices"][0] for line in lines]
    if choices[-1]["finish_reason"] != "length" or not any(c["delta"].get("content") for c in choices):
        raise SystemExit(f"a stream ended with {choices[-1]}")


def loop_seconds(server: Server) -> float:
    """CPU time of the server's first thread, which is the event loop's."""
    assert server.process is not None
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def alone(engine, streams: int, tokens: int) -> Run:
    async def one(i: int) -> None:
        async with engine.stream(ask(i), max_tokens=tokens, ignore_eos=True) as stream:
            async for _ in stream:
                pass

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(i) for i in range(streams)))
    return Run(streams * tokens / (time.perf_counter() - began), time.process_time() - cpu)


async def compare(args: argparse.Namespace, server: Server) -> None:
    import mlxrt

    engine = await mlxrt.AsyncEngine.load(args.model)
    for streams in args.streams:
        pairs: list[tuple[Run, Run]] = []
        for i in range(args.warm + args.runs):
            if i % 2:  # neither goes first always
                http, own = await through_http(server, streams, args.tokens), await alone(engine, streams, args.tokens)
            else:
                own, http = await alone(engine, streams, args.tokens), await through_http(server, streams, args.tokens)
            if i >= args.warm:  # kernels are compiled when a shape first comes, by each process for itself
                pairs.append((own, http))
        speed, wall = middle([http.speed for _, http in pairs]), [http.speed / own.speed for own, http in pairs]
        text = f"{streams} streams: {speed:.1f} tokens/s through HTTP, {middle(wall):.3f}x of the engine alone"
        text += f" ({min(wall):.3f} to {max(wall):.3f}); {middle([own.cpu / http.cpu for own, http in pairs]):.3f}x"
        loop = middle([http.loop / streams / args.tokens for _, http in pairs])
        print(f"{text} per CPU second; {1e6 * loop:.0f} us of the event loop a token", flush=True)
    await engine.close()


def middle(values: list[float]) -> float:
    return statistics.median(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="runs of each before the first that counts")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    server = Server(args.model)
    server.start()
    try:
        asyncio.run(compare(args, server))
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
