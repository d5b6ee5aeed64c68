"""Random calls of the public API with odd arguments: typed errors only, and a plain request is answered afterwards.

    python -m tests.long.odd_calls [--seeds 20] [--calls 250] [--seed 1]

Exit code 1 where anything else happened.
"""

import argparse

from tests.support.odd_calls import play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    tally, wrong = play(iter(range(asked.seed, asked.seed + asked.seeds)), asked.calls)
    print(", ".join(f"{count} {name}" for name, count in tally.items()))
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
