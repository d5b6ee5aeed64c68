"""Serve coroutines from one engine: python examples/async_engine.py [MODEL]"""

import asyncio
import sys

from mlxrt import AsyncEngine

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


async def stream(engine: AsyncEngine, prompt: str) -> str:
    text = ""
    async for event in engine.stream(prompt, max_tokens=12):  # cancelling the task cancels the request
        text += event.text
    return text


async def main() -> None:
    async with await AsyncEngine.load(MODEL) as engine:  # one thread makes the steps for all coroutines
        prompts = ["One, two, three,", "Monday, Tuesday,", "The sky is"]
        for prompt, text in zip(prompts, await asyncio.gather(*(stream(engine, prompt) for prompt in prompts))):
            print(f"{prompt!r} -> {text!r}")
        reply = await engine.session().say("Say hello.", max_tokens=12)
        print(await reply.text())


asyncio.run(main())
