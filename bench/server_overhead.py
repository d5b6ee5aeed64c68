"""What HTTP costs: tokens a second, and tokens a second of CPU time, through the server's streams beside the engine
alone, taken in turns. The second is what to trust on a busy machine: the clients' own work is not in it.

    python -m bench.server_overhead --model smollm2 --streams 1 16 --tokens 48 --runs 5
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time

from tests.long.load_server import Answer, Server, read_head, read_stream, send


async def through_http(port: int, streams: int, tokens: int) -> float:
    async def one(i: int) -> None:
        messages = [{"role": "user", "content": f"{i} {random.randrange(10**8):08d} Tell me a long story."}]
        body = {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        reader, writer = await send(port, json.dumps(body).encode())
        await read_head(reader)
        await read_stream(reader, Answer(200))
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(streams)))
    return streams * tokens / (time.perf_counter() - began)


async def alone(engine, streams: int, tokens: int) -> float:
    async def one(i: int) -> None:
        messages = [{"role": "user", "content": f"{i} {random.randrange(10**8):08d} Tell me a long story."}]
        async with engine.stream(messages, max_tokens=tokens, ignore_eos=True) as stream:
            async for _ in stream:
                pass

    began = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(streams)))
    return streams * tokens / (time.perf_counter() - began)


async def compare(args: argparse.Namespace, server: Server) -> None:
    import mlxrt

    engine = await mlxrt.AsyncEngine.load(args.model)
    for streams in args.streams:
        walls, costs = [], []
        for _ in range(args.warm):  # kernels are compiled when a shape first comes, by each process for itself
            await alone(engine, streams, args.tokens)
            await through_http(server.port, streams, args.tokens)
        for _ in range(args.runs):
            before = time.process_time()
            own = await alone(engine, streams, args.tokens)
            own_cpu, before = time.process_time() - before, server.cpu_seconds()
            http = await through_http(server.port, streams, args.tokens)
            walls.append(http / own)
            costs.append(own_cpu / (server.cpu_seconds() - before))
        wall, cpu = statistics.median(walls), statistics.median(costs)
        speed = f"{http:.1f} tokens/s through HTTP, {wall:.2f}x of the engine alone"
        print(f"{streams} streams: {speed}; {cpu:.3f}x per CPU second", flush=True)
    await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="runs of each before the first that counts")
    args = parser.parse_args()
    server = Server(args.model)
    server.start()
    try:
        asyncio.run(compare(args, server))
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
