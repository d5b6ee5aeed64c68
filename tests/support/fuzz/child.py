"""What runs in a child process: load a model from a path, all the way, and say how it ended."""

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

MEMORY = 6 << 30  # a damaged size must fail here, not take the machine down
PROMPT = "the quick Ünïcode 日本 <s> 12 </s>"


def serve(pipe: Connection, log: str) -> None:
    """Answer paths with (outcome, details) until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)  # Rust panics print there even when they are caught
    limit_memory()
    import mlxrt  # noqa: F401  before the first watch starts

    pipe.send(("ready", ""))
    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        pipe.send(load_all(Path(path)))


def limit_memory() -> None:
    if sys.platform == "linux" and "libasan" not in os.environ.get("LD_PRELOAD", ""):  # it reserves terabytes
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def load_all(path: Path) -> tuple[str, str]:
    """ok, refused (typed errors only) or failed, with the messages."""
    from mlxrt.errors import MlxrtError

    errors = []
    for stage in (weights, text, whole):
        try:
            stage(path)
        except MlxrtError as error:
            line = str(error)
            if not line.strip() or "\n" in line or len(line) > 2000:
                return "failed", f"{stage.__name__}: {type(error).__name__} is not one line: {line[:3000]!r}"
            errors.append(f"{stage.__name__}: {type(error).__name__}: {line}")
        except BaseException:  # the purpose of the test: anything that is not ours is a failure
            return "failed", f"{stage.__name__}: {traceback.format_exc()[-4000:]}"
    return ("refused" if errors else "ok"), "\n".join(errors)


def opened(path: Path):
    from mlxrt.weights import FolderCheckpoint, GgufCheckpoint

    return GgufCheckpoint(path) if path.suffix == ".gguf" else FolderCheckpoint(path)


def weights(path: Path) -> None:
    from mlxrt.weights import build

    checkpoint = opened(path)
    checkpoint.sizes()
    checkpoint.files()
    build(checkpoint)


def text(path: Path) -> None:
    tokenizer = opened(path).tokenizer()
    tokenizer.decode(tokenizer.encode(PROMPT))
    if tokenizer.has_template:
        tokenizer.chat([{"role": "user", "content": "hi"}])


def whole(path: Path) -> None:
    """The door users come through; two tokens are enough to run every kernel."""
    import mlxrt

    with mlxrt.load(str(path), mlxrt.EngineConfig(kv_memory="64M")) as engine:
        engine.score([1, 2, 3]).tolist()
        engine.generate("the dog", max_tokens=2)
