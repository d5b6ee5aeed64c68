"""A chat on a terminal with a tiny model that writes given answers: python -m tests.support.scripted_chat FILE.json

The file names the folder of a tokenizer, the context, what to do on overflow, and the answers in order.
"""

import dataclasses
import json
import sys
from pathlib import Path

import mlx.core as mx

from mlxrt import Engine, EngineConfig
from mlxrt.cli.chat import Chat, run_terminal
from mlxrt.cli.terminal import configure_logging
from mlxrt.engine.engine import Source
from mlxrt.text import Tokenizer

from . import toy_models as toy


class Script:
    """Lets each answer be the next of a list: the one that is not used up stays for the next question."""

    def __init__(self, tokenizer: Tokenizer, answers: list[str]):
        end = min(tokenizer.eos_ids)
        self._answers = [[*tokenizer.encode(text, special=False), end] for text in answers]
        self._at = -1

    def __call__(self, row) -> None:
        written = len(row.output_tokens)
        self._at += not written
        answer = self._answers[self._at % len(self._answers)]
        row.add({answer[min(written, len(answer) - 1)]: 1e6})


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    configure_logging(False, False)
    tokenizer = Tokenizer.from_folder(Path(settings["tokenizer"]))
    mx.random.seed(3)
    config = dataclasses.replace(toy.CONFIG, vocab_size=tokenizer.vocab_size)
    model = type("Toy", (toy.Toy,), {"kinds": "f"})(config)
    model.fuse()
    mx.eval(model.parameters())
    source = Source("scripted", eos=frozenset(tokenizer.eos_ids))
    with Engine(model, EngineConfig(kv_memory="16M", max_context=settings["context"]), tokenizer, source) as engine:
        options = {"max_tokens": settings["max_tokens"], "on_logits": Script(tokenizer, settings["answers"])}
        sys.exit(run_terminal(Chat(engine, None, options, settings["on_overflow"]), None))


if __name__ == "__main__":
    main()
