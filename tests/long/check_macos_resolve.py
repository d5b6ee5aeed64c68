"""Are our dependencies, and theirs, there as wheels for Apple Silicon? Asks the index; run by hand, not by pytest.

    python tests/long/check_macos_resolve.py [3.11 3.12 3.13]

pip chooses wheels for another platform but evaluates markers for the machine it runs on: on Linux it would leave out
mlx-metal. So the markers of every chosen package are evaluated again for macOS, and what was left out is added.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
PLATFORM = "macosx_14_0_arm64"


def environment(version: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": "arm64",
        "platform_python_implementation": "CPython",
        "platform_release": "23.0.0",
        "platform_system": "Darwin",
        "platform_version": "",
        "python_full_version": f"{version}.0",
        "python_version": version,
        "sys_platform": "darwin",
    }


def resolve(wanted: list[str], version: str) -> list[dict]:
    """pip's own answer: the packages it would install, each with its metadata."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--target", folder, "--platform", PLATFORM, "--python-version", version, "--implementation", "cp"]
        rules = [
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            "--quiet",
            "--report",
            f"{folder}/report.json",
        ]
        command = [sys.executable, "-m", "pip", "install", *where, *rules, "--report", f"{folder}/report.json", *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"python {version}: pip cannot resolve {' '.join(wanted)}\n{done.stderr.strip()}")
        return json.loads(Path(folder, "report.json").read_text())["install"]


def left_out(chosen: list[dict], version: str) -> set[str]:
    """Requirements that hold on macOS and that pip, looking at this machine, did not follow."""
    names = {canonicalize_name(package["metadata"]["name"]) for package in chosen}
    found = set()
    for package in chosen:
        extras = ["", *package.get("requested_extras", [])]
        for line in package["metadata"].get("requires_dist", []):
            need = Requirement(line)
            holds = need.marker is None or any(
                need.marker.evaluate(environment(version) | {"extra": e}) for e in extras
            )
            if holds and canonicalize_name(need.name) not in names:
                extra = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
                found.add(f"{need.name}{extra}{need.specifier}")
    return found


def main() -> None:
    direct = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    for version in sys.argv[1:] or ["3.11", "3.12", "3.13"]:
        wanted = list(direct)
        chosen = resolve(wanted, version)
        while missing := left_out(chosen, version):
            wanted += sorted(missing)
            chosen = resolve(wanted, version)
        wheels = [package["download_info"]["url"].rpartition("/")[2] for package in chosen]
        native = [name for name in wheels if "macosx" in name]
        assert all(name.endswith(".whl") for name in wheels), wheels
        counts = f"{len(direct)} dependencies resolve to {len(wheels)} wheels, {len(native)} of them native"
        print(f"python {version}, {PLATFORM}: {counts}")
        print("  added by macOS markers:", ", ".join(sorted(set(wanted) - set(direct))) or "none")
        print("  " + "\n  ".join(sorted(native)))


if __name__ == "__main__":
    main()
