"""A chat on a terminal with a tiny model that writes given answers: python -m tests.support.scripted_chat FILE.json

The file names the folder of a tokenizer, the context, what to do on overflow, and the answers in order. While there is
a file `hold` in that folder, an answer waits inside a step after as many tokens as it says, or with "prompt" at the
first chunk of the prompt: what is pressed then comes at a known moment. `held` tells that it waits, and counts the
presses of Ctrl-C.
"""

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

from mlxrt import Engine, EngineConfig, EngineEvent
from mlxrt.cli.chat import Chat, run_terminal
from mlxrt.cli.terminal import configure_logging
from mlxrt.engine.engine import Source
from mlxrt.text import Tokenizer

from . import toy_models as toy


class Script:
    """Lets each answer be the next of a list: the one that is not used up stays for the next question."""

    def __init__(self, tokenizer: Tokenizer, answers: list[str], folder: Path):
        self._hold, self._held = folder / "hold", folder / "held"
        end = min(tokenizer.eos_ids)
        self._answers = [[*tokenizer.encode(text, special=False), end] for text in answers]
        self._at = -1

    def __call__(self, row) -> None:
        written = len(row.output_tokens)
        self._at += not written
        if self._hold.exists() and written >= int(self._hold.read_text()):
            self._wait()
        answer = self._answers[self._at % len(self._answers)]
        row.add({answer[min(written, len(answer) - 1)]: 1e6})

    def on_engine_event(self, event: EngineEvent) -> None:
        if event.kind == "started" and self._hold.exists() and self._hold.read_text() == "prompt":
            self._wait()

    def _wait(self) -> None:
        before, presses = signal.getsignal(signal.SIGINT), 0

        def count(number, frame) -> None:
            nonlocal presses
            presses += 1
            try:
                before(number, frame)  # type: ignore[operator]
            finally:
                self._write_held(presses)

        signal.signal(signal.SIGINT, count)
        self._write_held(0)
        try:
            while self._hold.exists():
                time.sleep(0.005)
        finally:
            signal.signal(signal.SIGINT, before)

    def _write_held(self, presses: int) -> None:
        new = self._held.with_suffix(".new")
        new.write_text(str(presses))
        new.replace(self._held)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    configure_logging(False, False)
    folder = Path(settings["tokenizer"])
    tokenizer = Tokenizer.from_folder(folder)
    mx.random.seed(3)
    shape = dataclasses.replace(toy.CONFIG, vocab_size=tokenizer.vocab_size)
    model = type("Toy", (toy.Toy,), {"kinds": "f"})(shape)
    model.fuse()
    mx.eval(model.parameters())
    source = Source("scripted", eos=frozenset(tokenizer.eos_ids))
    script = Script(tokenizer, settings["answers"], folder)
    config = EngineConfig(kv_memory="16M", max_context=settings["context"], chunk=settings["chunk"])
    with Engine(model, config, tokenizer, source, script.on_engine_event) as engine:
        options = {"max_tokens": settings["max_tokens"], "on_logits": script}
        sys.exit(run_terminal(Chat(engine, None, options, settings["on_overflow"]), None))


if __name__ == "__main__":
    main()
