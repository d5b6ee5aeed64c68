"""Compares logits with those stored from Hugging Face, by a checker beside the repository (its fixtures are large).

python -m tests.long.check_parity [--shared FOLDER]
"""

import argparse
import subprocess
import sys
from pathlib import Path


def check(shared: Path, adapter: str, *more: str) -> int:
    protocols = [f"{adapter}:logits", "--stepper", f"{adapter}:Stepper", "--batch", f"{adapter}:batch"]
    script, fixtures = shared / "tools/parity/check_parity.py", shared / "fixtures/parity"
    return subprocess.run([sys.executable, str(script), str(fixtures), *protocols, *more]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).resolve().parents[3] / "shared")
    shared = parser.parse_args().shared
    if not (shared / "fixtures/parity").is_dir():
        print(f"check_parity: {shared} is not here; parity with the stored logits was not checked")
        return 0
    return check(shared, "tests.parity_adapter") or check(shared, "tests.gguf_parity_adapter")


if __name__ == "__main__":
    sys.exit(main())
