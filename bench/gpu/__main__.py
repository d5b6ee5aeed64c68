"""Right and fast on this GPU, in one call of under ten minutes.

    python -m bench.gpu OUT [--before FOLDER] [--only tests|speed] [--long] [--limit SECONDS]

First the GPU tests, in parts side by side: most of their time is compiling (modules.py). Then decode and prefill of
four shapes beside mlx-lm, and beside an older checkout of mlxrt with --before. --long measures 32,768 tokens of context
with quantized KV caches instead. Every process writes its own file in OUT. Exit 1 if one failed, by name.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.gpu.modules import ModuleFolders
from mlxrt.kernels import device
from mlxrt.kernels.cuda.module_cache import FOLDER, use_module_folder
from mlxrt.weights.source.cache_dir import cache_root

PARTS = 16  # processes that run tests
SHAPES = ("qwen3-0.6b@4bit", "qwen3-8b@4bit", "qwen3-30b-a3b@4bit", "gemma4-e2b@4bit")
TIME_LIMIT = 560.0  # seconds for everything


def start(out: Path, name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with open(out / f"{name}.txt", "wb") as file:
        command = [sys.executable, "-u", "-m", *arguments]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | (env or {}))


def wait(out: Path, running: dict[str, subprocess.Popen[bytes]], end: float, modules: ModuleFolders | None) -> bool:
    """Whether all succeeded; the last lines of each are printed."""
    good = True
    while any(process.poll() is None for process in running.values()) and time.monotonic() < end:
        if modules is not None:
            modules.share()
        time.sleep(0.5)
    for name, process in running.items():
        failed = process.poll() != 0
        if process.poll() is None:
            process.kill()
            process.wait()
            print(f"{name} was cut off by the time limit")
        print_end(out / f"{name}.txt", name, failed)
        good &= not failed
    return good


def print_end(file: Path, name: str, failed: bool) -> None:
    """Of tests the closing line and what failed, of others the last lines."""
    lines = file.read_text(errors="replace").splitlines()
    if name.startswith("tests"):
        lines = [line for line in lines if re.match(r"FAILED|ERROR|E  ", line)][:8] + lines[-1:]
    print(f"== {name}{': FAILED' * failed}", *(line[:200] for line in lines[-12:]), sep="\n", flush=True)


def print_report(out: Path) -> None:
    """What the parts say of parity, added up."""
    text = "\n".join(file.read_text(errors="replace") for file in out.glob("tests-*.txt"))
    rows = {m[1]: (int(m[2]), int(m[3])) for m in re.finditer(r"(?m)^parity (.+): (\d+) checks, (\d+) wrong", text)}
    checks, wrong = map(sum, zip(*rows.values())) if rows else (0, 0)
    passed = len(re.findall(r"(?m)^tests/\S.* PASSED", text))
    print(f"{passed} tests passed; {len(rows)} rows of logits, {checks} checks, {wrong} wrong", flush=True)


def open_modules(root: Path) -> ModuleFolders | None:
    """Folders of compiled modules for the tests' processes, in `root`; None: this MLX keeps none."""
    if device.backend() != "cuda":
        return None
    source = use_module_folder(cache_root() / "kernels", device.architecture())
    return ModuleFolders(source, root, PARTS)


def start_tests(out: Path, long: bool, modules: ModuleFolders | None) -> dict[str, subprocess.Popen[bytes]]:
    if long:
        test, env = "tests/gpu/test_quantized_kv.py", {"GPU_TOKENS": "32768"}
        return {"quantized-kv": start(out, "quantized-kv", "pytest", "-m", "gpu", test, env=env)}
    running = {}
    for i in range(1, 1 + PARTS):
        env = {"PART": f"{i}/{PARTS}"} | ({FOLDER: str(modules.parts[i - 1])} if modules else {})
        running[f"tests-{i}"] = start(out, f"tests-{i}", "pytest", "-vv", "-rs", "-m", "gpu", "tests/gpu", env=env)
    return running


def decode_runs(out: Path, before: Path | None, long: bool) -> dict[str, list[str]]:
    if long:
        common = ["bench.gpu.decode", "qwen3-8b@4bit", "--warm", "--no-peer", "--tokens", "96", "--rounds", "5"]
        # Three KV caches of 8 x 32,768 tokens would fill the device.
        return {
            "context-1": [*common, "--runs", "1x32768", "--kv", "full,q8,q4", "--json", str(out / "context-1.json")],
            "context-8": [*common, "--runs", "8x32768", "--kv", "full,q8", "--json", str(out / "context-8.json")],
        }
    older = ["--before", str(before)] if before else []
    common = ["bench.gpu.decode", *SHAPES, "--runs", "1x512,32x128,1x4096", *older]
    return {"decode": [*common, "--json", str(out / "decode.json")]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout of mlxrt to compare with")
    parser.add_argument("--only", choices=("tests", "speed"))
    parser.add_argument("--long", action="store_true", help="long contexts with quantized KV caches instead")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT, help="seconds for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, good = time.monotonic() + args.limit, True
    if args.only != "speed":
        with tempfile.TemporaryDirectory(prefix="modules-", ignore_cleanup_errors=True) as root:
            modules = None if args.long else open_modules(Path(root))
            good &= wait(args.out, start_tests(args.out, args.long, modules), end, modules)
        if not args.long:
            print_report(args.out)
    if args.only != "tests":
        for name, command in decode_runs(args.out, args.before, args.long).items():
            good &= wait(args.out, {name: start(args.out, name, *command)}, end, None)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
