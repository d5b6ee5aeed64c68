"""Token vectors of llama.cpp against our GGUF vocabularies.

    python tests/text/token_vectors.py

Fetches the sdist that carries them once (77 MB, through pip's own index settings) into the cache folder, checks its
sha256, compares every set whose vocabulary mlxrt claims, prints a table and exits 1 on any difference.
"""

import hashlib
import io
import os
import struct
import sys
import tarfile
from pathlib import Path

NAME, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxrt-tests"
ARCHIVE = CACHE / f"llama_cpp_python-{VERSION}.tar.gz"
MODELS = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models/"
BETWEEN = "\n__ggml_vocab_test__\n"
MUST_AGREE = ("llama-bpe", "llama-spm", "qwen2", "gpt-2", "phi-3")
REFUSED = ("bert-bge",)  # WordPiece: refused by name


def fetch() -> Path:
    """The sdist, from the index pip is set up with. `pip download` would build its metadata: minutes of compiling."""
    if ARCHIVE.exists() and hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() == SHA256:
        return ARCHIVE
    from pip._internal.commands import create_command

    command = create_command("index")
    options, _ = command.parse_args(["versions", NAME])
    with command.main_context():
        session = command._build_session(options)
        links = command._build_package_finder(options, session).find_all_candidates(NAME)
        link = next(c.link for c in links if str(c.version) == VERSION and not c.link.is_wheel)
        data = session.get(link.url_without_fragment).content
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        raise SystemExit(f"{NAME} {VERSION} has sha256 {found}, expected {SHA256}")
    CACHE.mkdir(parents=True, exist_ok=True)
    part = ARCHIVE.with_suffix(".part")
    part.write_bytes(data)
    part.replace(ARCHIVE)
    return ARCHIVE


def vocabularies(archive: Path) -> dict[str, dict[str, bytes]]:
    """The files of every set that has vectors: {"qwen2": {"gguf": ..., "inp": ..., "out": ...}}."""
    sets: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(MODELS)
            if name.startswith("ggml-vocab-") and ".gguf" in name:
                stem, _, kind = name.removeprefix("ggml-vocab-").partition(".gguf")
                sets.setdefault(stem, {})[kind.strip(".") or "gguf"] = tar.extractfile(member).read()
    return {name: files for name, files in sorted(sets.items()) if {"inp", "out"} <= files.keys()}


def metadata(data: bytes) -> dict:
    """The key-value part of a GGUF file; the gguf package takes 15 s for a large vocabulary."""
    kinds = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
    at = 0

    def take(code: str, count: int = 1) -> tuple:
        nonlocal at
        row = struct.unpack_from(f"<{count}{code}", data, at)
        at += struct.calcsize(f"<{count}{code}")
        return row

    def text() -> str:
        nonlocal at
        [size] = take("Q")
        at += size
        return data[at - size : at].decode()

    def value(kind: int):
        if kind == 8:
            return text()
        if kind != 9:
            return take(kinds[kind])[0]
        inner, count = take("I")[0], take("Q")[0]
        return [text() for _ in range(count)] if inner == 8 else list(take(kinds[inner], count))

    if take("I") != (0x46554747,):
        raise SystemExit("not a GGUF file")
    _, _, count = take("I")[0], take("Q")[0], take("Q")[0]
    return {text(): value(take("I")[0]) for _ in range(count)}


def compare(files: dict[str, bytes], values: dict) -> tuple[int, list[tuple[str, list[int], list[int]]]]:
    """How many vectors there are, and those that differ: (text, expected, found)."""
    from mlxrt.text import Tokenizer

    tokenizer = Tokenizer.from_gguf(values)
    samples = files["inp"].decode().removesuffix(BETWEEN).split(BETWEEN)
    wanted = [[int(i) for i in line.split()] for line in files["out"].decode().splitlines()]
    if len(samples) != len(wanted):
        raise SystemExit(f"{len(samples)} samples for {len(wanted)} rows of ids")
    found = [tokenizer.encode(text, special=False) for text in samples]
    return len(samples), [row for row in zip(samples, wanted, found) if row[1] != row[2]]


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    failed, agreed = 0, set()
    print(f"{'vocabulary':16} {'model':8} {'pre':16} {'agree':>9}")
    for name, files in vocabularies(fetch()).items():
        values = metadata(files["gguf"])
        label = f"{name:16} {values['tokenizer.ggml.model']:8} {values.get('tokenizer.ggml.pre', '-'):16}"
        if name in REFUSED:
            print(label, "refused by name")
            continue
        count, wrong = compare(files, values)
        print(label, f"{count - len(wrong):4}/{count}")
        for text, wanted, found in wrong[:3]:
            print(f"    {text!r}\n      expected {wanted}\n      found    {found}")
        failed += bool(wrong)
        agreed |= set() if wrong else {name}
    return 1 if failed or not agreed.issuperset(MUST_AGREE) else 0


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
    raise SystemExit(main())
