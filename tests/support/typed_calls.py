"""Every public name and call, for a type checker to read (tests/engine/test_options.py); nobody runs it."""

import asyncio

import mlx.core as mx

import mlxrt


def generate(engine: mlxrt.Engine) -> None:
    one: mlxrt.Completion = engine.generate("hi", max_tokens=3, temperature=0.5, stop="x", logit_bias={1: 2.0})
    tokens: mlxrt.Completion = engine.generate([1, 2, 3], top_k=4)
    chat: mlxrt.Completion = engine.generate([{"role": "user", "content": "hi"}], seed=1, tools=None)
    some: list[mlxrt.Completion] = engine.generate(["hi", "there"], max_tokens=3)
    more: list[mlxrt.Completion] = engine.generate([mlxrt.Request(prompt="hi")])
    ids: list[mlxrt.Completion] = engine.generate([[1, 2], [3]], logprobs=2)
    talks: list[mlxrt.Completion] = engine.generate([[{"role": "user", "content": "hi"}]], priority=1)
    form: mlxrt.Completion = engine.generate("hi", response_format={"type": "choice", "choices": ["a", "b"]})
    timings: mlxrt.Timings = one.timings
    calls: tuple[mlxrt.ToolCall, ...] = chat.tool_calls
    print(one.text, one.tokens, one.finish_reason is mlxrt.Finish.STOP, one.cached_tokens, one.logprobs, one.raw)
    print(timings.prefill_tps, timings.decode_tps, timings.first_token_s, timings.total_s, timings.seed)
    print([(c.id, c.name, c.arguments) for c in calls], chat.reasoning, chat.to_message(), form)
    print(tokens.text, len(some), len(more), len(ids), len(talks))


def stream(engine: mlxrt.Engine) -> None:
    with engine.stream("hi", stop=("a", "b"), deadline_s=2.0) as events:
        event: mlxrt.Event
        for event in events:
            print(event.id, event.text, event.token, event.kind, event.finish_reason, event.logprobs)
            piece: mlxrt.ToolCallDelta | None = event.tool_call
            if piece is not None:
                print(piece.index, piece.id, piece.name, piece.arguments, piece.complete)
        whole: mlxrt.Completion = events.completion
        print(events.text, whole.text, events.prompt_tokens)
    request = mlxrt.Request(tokens=(1, 2), params=mlxrt.SamplingParams(max_tokens=5, min_p=0.1))
    id: int = engine.submit(request)
    other = engine.stream_of([id])
    other.add(engine.submit(mlxrt.Request.of("hi", max_tokens=2)))
    print({i: len(found) for i, found in other.read_all().items()})
    other.close()
    while engine.step():
        print(engine.take(id))
    engine.cancel(id)


def converse(engine: mlxrt.Engine) -> None:
    session: mlxrt.Session = engine.session(system="Be brief.", on_overflow="drop-oldest", temperature=0.7)
    other = session.fork()
    other.rewind(1)
    session.save("talk", name="one")
    restored = mlxrt.Session.restore(engine, "talk", name="one", temperature=0.1)
    print(restored.messages, restored.summary, other.tokens)
    reply: mlxrt.Reply = session.say([{"role": "tool", "content": "3"}], thinking="off", thinking_budget=None)
    for event in reply:
        print(event.text, reply.events, reply.dropped_turns, reply.prompt_tokens)
    reply.stop()
    reply.close()
    done: mlxrt.Completion = session.say("hi", max_tokens=5).completion
    print(session.say("hi", template_options={"date": "today"}).text, done)


def inspect(engine: mlxrt.Engine) -> None:
    logits: mx.array = engine.score([1, 2], chunk=1)
    cost: mlxrt.Cost = engine.cost("hi", max_tokens=3)
    stats: mlxrt.Stats = engine.stats()
    config: mlxrt.EngineConfig = engine.config
    print(logits.shape, cost.total, stats.running, config.kv, engine.context, engine.vocab_size)
    tokenizer = engine.tokenizer
    print(tokenizer.encode("hi"), tokenizer.decode([1]), engine.encode(mlxrt.Request(prompt="hi")))
    print(engine.source.name, engine.model)


def change(row: mlxrt.LogitsRow) -> None:
    best: list[tuple[int, float]] = row.top(3)
    row.ban([best[0][0]])
    row.allow([1, 2])
    row.add({3: 1.5})
    row.edit(row.logits * 2)
    print(row.logprobs, row.tokens, row.prompt_tokens, row.output_tokens)


def read(view: mlxrt.LogitsView) -> mlxrt.LogitsRow:
    return view.row(0)


def print_event(event: mlxrt.EngineEvent) -> None:
    print(event.kind, event.id, event.at, event.prompt_tokens, event.generated_tokens, event.finish_reason)


async def wait() -> None:
    async with await mlxrt.AsyncEngine.load("smollm2", mlxrt.EngineConfig(), on_event=print_event, kv="q8") as engine:
        done: mlxrt.Completion = await engine.generate("hi", max_tokens=3)
        some: list[mlxrt.Completion] = await engine.generate(["hi", "there"])
        async with engine.stream("hi", top_p=0.9) as events:
            async for event in events:
                print(event.text, done.text, len(some))
        stream: mlxrt.AsyncStream = engine.stream("hi")
        print(await stream.wait_submitted(), await stream.read(timeout=0.1), await stream.read_all())
        session: mlxrt.AsyncSession = engine.session(system="Be brief.", max_tokens=9)
        reply: mlxrt.AsyncReply = await session.say("hi", min_p=0.1)
        first: mlxrt.Event = await anext(reply)
        print(first.text, reply.events, reply.dropped_turns)
        await reply.stop()
        whole: mlxrt.Completion = await reply.completion()
        print(await (await session.fork().say("hi")).text(), whole, session.messages, session.tokens)
        session.rewind(1)
        await session.save("talk")
        session = await mlxrt.AsyncSession.restore(engine, "talk", max_tokens=9)
        await reply.aclose()
        print((await engine.stats()).running, (await engine.score([1, 2])).shape)
        await engine.cancel(3)
        await engine.close(finish=True)
    engine = mlxrt.AsyncEngine(mlxrt.load("smollm2"), buffer=8)


def main() -> None:
    with mlxrt.load("smollm2", kv="q8", memory="4G", on_event=print_event) as engine:
        for use in (generate, stream, converse, inspect):
            use(engine)
        engine.generate("hi", on_logits=change)
    try:
        mlxrt.load("smollm2", mlxrt.EngineConfig(max_context=100)).close()
    except (mlxrt.ContextOverflow, mlxrt.WontFit) as error:
        print(error)
    except mlxrt.MlxrtError as other:
        print(other.exit_code)
    asyncio.run(wait())
