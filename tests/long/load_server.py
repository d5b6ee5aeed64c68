"""Load: many clients at once, some of which leave, read slowly, cancel or send nonsense; then a kill and a restart.

    python -m tests.long.load_server --model smollm2 --clients 64 --requests 2000

Exit code 0: no answer lost, every finished one equal to the same request alone (or apart only where two tokens tie), no
request or block left behind, memory flat, a short question not held up by long prompts, and after `kill -9` the second
turn of a conversation resumes from the disk cache.
"""

# ruff: noqa: E501  long messages
import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrt.cache.prefix_cache import common_prefix

TIE = 0.05  # two tokens whose log probabilities are closer may change places with the batch
RSS_GROWTH = 1.05  # of the last quarter over the third one: the first half fills caches
ACTS = {"stream": 50, "plain": 18, "leave": 8, "leave at once": 5, "read slowly": 5, "nonsense": 8, "cancel": 6}
PREFIX = "You are asked by one of many people at once. Answer in a few words. "
QUESTIONS = [f"Question {i}: what comes after the number {i * 7}, and why is that so?" for i in range(12)]
NONSENSE = [b"{", b"\xff\xfe", b'{"messages": 5}', b'{"model": "x"}', b'{"messages": [], "n": 1e99}', b"[" * 2000]


@dataclass
class Answer:
    status: int
    text: str = ""
    finished: bool = False


@dataclass
class Server:
    """`mlxrt serve` in a process of its own."""

    model: str
    disk: str | None = None
    flags: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen | None = field(default=None)

    def start(self) -> None:
        disk = ["--disk-cache", self.disk] if self.disk is not None else []
        command = [sys.executable, "-m", "mlxrt", "serve", "-m", f"m={self.model}", "--port", "0"]
        self.process = subprocess.Popen([*command, *disk, *self.flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "http://" in line:
                self.port = int(line.split("http://")[1].split()[0].rsplit(":", 1)[1])
                break
        else:
            raise SystemExit("the server did not start")
        threading_drain(self.process.stderr)

    def rss(self) -> int:
        assert self.process is not None
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    def cpu_seconds(self) -> float:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, signal_: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(signal_)
        return self.process.wait(120)


def threading_drain(stream) -> None:
    import threading

    threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()


async def send(port: int, body: bytes, id: str = "", method: str = "POST", path: str = "/v1/chat/completions"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    writer.write((head + (f"x-request-id: {id}\r\n" if id else "") + "\r\n").encode() + body)
    await writer.drain()
    return reader, writer


async def read_head(reader) -> int:
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status


async def call(port: int, method: str, path: str, body: Any = None) -> Any:
    reader, writer = await send(port, json.dumps(body).encode() if body is not None else b"", "", method, path)
    status = await read_head(reader)
    text = (await reader.read()).decode()
    writer.close()
    return (status, json.loads(text)) if text.startswith("{") else (status, text)


def write_body(question: str, tokens: int, stream: bool, **more: Any) -> bytes:
    messages = [{"role": "user", "content": PREFIX + question}]
    return json.dumps({"messages": messages, "max_tokens": tokens, "stream": stream, "temperature": 0, **more}).encode()


async def read_stream(reader, answer: Answer, pause: float = 0.0, stop_after: int = 1 << 30) -> None:
    count = 0
    while line := await reader.readline():
        line = line.strip()
        if line.startswith(b"data: {"):
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(data["error"])
            choice = data["choices"][0]
            answer.text += choice["delta"].get("content") or ""
            answer.finished = answer.finished or choice["finish_reason"] is not None
            count += 1
        if count >= stop_after:
            return
        if pause:
            await asyncio.sleep(pause)


class Load:
    def __init__(self, server: Server, clients: int, requests: int, seed: int):
        self.server, self.clients, self.left, self.rng = server, clients, requests, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.finished: list[tuple[str, int, str]] = []
        self.rss: list[int] = []

    async def run(self) -> None:
        sampling = asyncio.create_task(self._sample_memory())
        await asyncio.gather(*(self._client(i) for i in range(self.clients)))
        sampling.cancel()

    async def _sample_memory(self) -> None:
        while True:
            self.rss.append(self.server.rss())
            await asyncio.sleep(1)

    async def _client(self, number: int) -> None:
        while self.left > 0:
            self.left -= 1
            act = self.rng.choices(list(ACTS), list(ACTS.values()))[0]
            question, tokens = self.rng.choice(QUESTIONS), self.rng.choice((4, 12))
            id = f"c{number}-{self.left}"
            try:
                async with asyncio.timeout(600):
                    await self._act(act, question, tokens, id)
                self.counts[act] += 1
            except (OSError, RuntimeError, ValueError, LookupError) as error:  # whatever it was, it is a lost request
                self.wrong.append(f"{act} {id}: {error!r}")

    async def _act(self, act: str, question: str, tokens: int, id: str) -> None:
        if act == "nonsense":
            reader, writer = await send(self.server.port, self.rng.choice(NONSENSE), id)
            if (status := await read_head(reader)) not in (400, 404):
                self.wrong.append(f"{id}: nonsense is answered with {status}")
            writer.close()
            return
        stream = act != "plain"
        long = act in ("leave", "leave at once", "cancel")
        reader, writer = await send(self.server.port, write_body(question, 200 if long else tokens, stream), id)
        if act == "leave at once":
            writer.close()
            return
        status = await read_head(reader)
        while status == 429:
            writer.close()
            self.counts["429"] += 1
            await asyncio.sleep(1)
            reader, writer = await send(self.server.port, write_body(question, 200 if long else tokens, stream), id)
            status = await read_head(reader)
        if status != 200:
            self.wrong.append(f"{id}: {status}")
        answer = Answer(status)
        if act == "plain":
            choice = json.loads(await reader.read())["choices"][0]
            answer.text, answer.finished = choice["message"]["content"], choice["finish_reason"] is not None
        elif act == "leave":
            await read_stream(reader, answer, stop_after=self.rng.randint(1, 5))
        elif act == "cancel":
            await read_stream(reader, answer, stop_after=2)
            await call(self.server.port, "DELETE", f"/v1/requests/{id}")
            await read_stream(reader, answer)
            if not answer.finished:
                self.wrong.append(f"{id}: cancelled, and the stream has no end")
        else:
            await read_stream(reader, answer, pause=0.05 if act == "read slowly" else 0.0)
        if act in ("stream", "plain", "read slowly"):
            if not answer.finished:
                self.wrong.append(f"{id}: no finish reason")
            self.finished.append((question, tokens, answer.text))
        writer.close()


async def check_alone(port: int, load: Load) -> int:
    """Every different finished answer against the same request alone; how many differ by a tie."""
    ties = 0
    found: dict[tuple[str, int], set[str]] = {}
    for question, tokens, text in load.finished:
        found.setdefault((question, tokens), set()).add(text)
    for (question, tokens), texts in found.items():
        body = json.loads(write_body(question, tokens, False, logprobs=True, top_logprobs=2))
        _, alone = await call(port, "POST", "/v1/chat/completions", body)
        choice = alone["choices"][0]
        steps = choice["logprobs"]["content"]
        gaps = [s["top_logprobs"][0]["logprob"] - s["top_logprobs"][1]["logprob"] for s in steps]
        for text in texts - {choice["message"]["content"]}:
            ties += 1
            same = common_prefix(text, choice["message"]["content"])
            reached = 0
            for step, gap in zip(steps, gaps):
                if reached + len(step["token"]) > same:
                    if gap > TIE:
                        load.wrong.append(
                            f"{question!r}: {text!r} differs from {choice['message']['content']!r}, gap {gap:.3f}"
                        )
                    break
                reached += len(step["token"])
    return ties


async def check_idle(port: int, load: Load) -> None:
    for _ in range(600):
        _, text = await call(port, "GET", "/metrics")
        state = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "model_name" in line
        }
        if not state["vllm:num_requests_running"] and not state["vllm:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        load.wrong.append(f"requests are left behind: {state}")
    await call(port, "DELETE", "/v1/cache")
    _, cache = await call(port, "GET", "/v1/cache")
    if cache["models"]["m"]["nodes"] or cache["models"]["m"]["bytes"]:
        load.wrong.append(f"blocks are left behind: {cache}")


async def time_first_token(open_stream, long: list[Any], short: Any) -> float:
    """Seconds until the first token of a short request while long prompts run."""
    holding = [asyncio.create_task(open_stream(request)) for request in long]
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    await open_stream(short)
    spent = time.perf_counter() - began
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    return spent


async def compare_first_token(server: Server, runs: int) -> tuple[float, float]:
    """Medians through the server and of the engine alone, taken in turns."""
    import mlxrt

    words = " ".join(f"word{i}" for i in range(1500))
    engine = await mlxrt.AsyncEngine.load(server.model)

    def asked(i: int, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"{i} {random.random()} {text}"}], "max_tokens": 2}

    async def over_http(body) -> None:
        reader, writer = await send(server.port, json.dumps(body | {"stream": True, "temperature": 0}).encode())
        try:
            await read_head(reader)
            await read_stream(reader, Answer(200), stop_after=2)  # the role, then the first token
        finally:
            writer.close()

    async def alone(body) -> None:
        async with engine.stream(body["messages"], max_tokens=2) as stream:
            await anext(stream)

    http, own = [], []
    try:
        for i in range(runs):
            for into, how in ((http, over_http), (own, alone)):
                into.append(await time_first_token(how, [asked(i, words), asked(i + 100, words)], asked(i, "hi")))
    finally:
        await engine.close()
    return statistics.median(http), statistics.median(own)


async def count_records(port: int) -> int:
    _, cache = await call(port, "GET", "/v1/cache")
    return cache["models"]["m"]["disk"]["records"]


async def check_restart(server: Server, load: Load) -> int:
    """The second turn after a kill: its cached tokens."""
    first = {"messages": [{"role": "user", "content": PREFIX * 6 + "Who are you?"}], "max_tokens": 8, "temperature": 0}
    before = await count_records(server.port)
    _, answer = await call(server.port, "POST", "/v1/chat/completions", first)
    while await count_records(server.port) == before:  # an answer is sent before it is stored
        await asyncio.sleep(0.1)
    server.stop(signal.SIGKILL)
    server.start()
    said = answer["choices"][0]["message"]
    more = [*first["messages"], {"role": said["role"], "content": said["content"]}, {"role": "user", "content": "And?"}]
    _, second = await call(server.port, "POST", "/v1/chat/completions", first | {"messages": more})
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    if cached < answer["usage"]["prompt_tokens"] // 2:
        load.wrong.append(f"after kill -9 only {cached} tokens are resumed")
    return cached


async def measure(args: argparse.Namespace, server: Server) -> int:
    load = Load(server, args.clients, args.requests, args.seed)
    began = time.monotonic()
    await load.run()
    print(
        f"{args.requests} requests of {args.clients} clients in {time.monotonic() - began:.0f} s: {dict(load.counts)}"
    )
    ties = await check_alone(server.port, load)
    print(f"{len(load.finished)} answers compared with the same request alone; {ties} differ, by a tie")
    quarter = max(1, len(load.rss) // 4)
    third, last = statistics.mean(load.rss[-2 * quarter : -quarter]), statistics.mean(load.rss[-quarter:])
    print(f"resident memory: {third / 1024:.0f} MB in the third quarter, {last / 1024:.0f} MB in the last")
    if last > third * RSS_GROWTH:
        load.wrong.append(f"memory grew from {third:.0f} to {last:.0f} KB")
    await check_idle(server.port, load)
    http, own = await compare_first_token(server, args.first_tokens)
    print(
        f"first token of a short request beside two long prompts: {http:.3f} s, engine alone {own:.3f} s: {http / own:.2f}x"
    )
    print(f"kill -9 and restart: the second turn resumes {await check_restart(server, load)} tokens")
    print("\n".join(load.wrong[:50]) or "nothing lost, nothing wrong")
    return 1 if load.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--first-tokens", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.model, folder)
        server.start()
        try:
            failed = asyncio.run(measure(args, server))
        finally:
            code = server.stop()
        if code != 0:
            print(f"asked to end, the server ended with {code}")
        return failed or code != 0


if __name__ == "__main__":
    sys.exit(main())
