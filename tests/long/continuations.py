"""The text of an answer is what follows the prompt, to the space: for real vocabularies.

    python -m tests.long.continuations FOLDER_WITH_TOKENIZER_JSON ... [--seed 0]

Texts are cut at every token; the streamed text after the cut must be decode(all) without decode(prompt). The same with
rows of random tokens, long prompts, and stop strings that begin with a space. Exit code 0: no difference.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, too

from mlxrt.errors import BadTokenizer
from mlxrt.text import StopMatcher, Tokenizer
from tests.text.conftest import SAMPLES


def stream_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    stream = tokenizer.detokenizer(prompt=prompt)
    return "".join([*map(stream.push, answer), stream.finish()])


def cuts(tokenizer: Tokenizer, rng: random.Random):
    for text in (*SAMPLES, "Once upon a time there was 🦙日本é a llama"):
        ids = tokenizer.encode(text)
        yield from ((ids[:at], ids[at:]) for at in range(len(ids) + 1))
    for _ in range(400):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(2, 12))]
        at = rng.randrange(len(ids))
        yield ids[:at], ids[at:]
    for text in ("日本語🦙" * 300, "a b " * 300):  # prompts longer than what the stream looks back at
        ids = tokenizer.encode(text)
        yield from ((ids[:-at], ids[-at:]) for at in range(1, 9))


def check(folder: Path, seed: int) -> tuple[int, int, int, int]:
    """Continuations that agree, that differ, whose prompt's text changes, and stop strings that did not match."""
    ours = Tokenizer.from_folder(folder)
    agree = differ = changed = unmatched = 0
    for prompt, answer in cuts(ours, random.Random(seed)):
        before, whole = ours.decode(prompt), ours.decode(prompt + answer)
        text = stream_text(ours, prompt, answer)
        if not whole.startswith(before):
            changed += 1
        elif text == whole.removeprefix(before):
            agree += 1
        else:
            differ += 1
            print(f"    {before!r} + {text!r}, expected {whole!r}")
        if text.startswith(" ") and text.strip():
            unmatched += not StopMatcher((text[:3],)).push(text)[1]
    return agree, differ, changed, unmatched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = 0
    for folder in asked.folders:
        try:
            Tokenizer.from_folder(folder)
        except BadTokenizer as error:
            print(f"refused: {error}  {folder}")
            continue
        agree, differ, changed, unmatched = check(folder, asked.seed)
        failed += differ + unmatched
        print(f"{agree:5} agree, {differ} differ, {changed:3} change their prompt's end, {unmatched} stops  {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
