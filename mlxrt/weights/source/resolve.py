"""From the name a user types to something that can be opened: a folder, a GGUF file or a published shape.

It knows the forms a name can take and in which order they are tried; it opens nothing.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import BadRequest, ModelNotFound
from ..random_models import Shape
from . import hub, pinned
from .alias import ALIASES
from .hub import Repository

log = logging.getLogger("mlxrt")

FORMS = "a folder, a .gguf file, owner/name[@revision] or owner/name:FILE.gguf on the hub, shape:NAME[@4bit]"


@dataclass(frozen=True)
class Located:
    """Where a model is. `name` is what the user typed; `path` is None exactly for a shape."""

    name: str
    kind: Literal["folder", "gguf", "shape"]
    path: Path | None = None
    shape: Shape | None = None


@dataclass(frozen=True)
class Terms:
    """How a name may be turned into files."""

    revision: str | None = None
    offline: bool = False
    token: str | None = None
    refresh: bool = False  # ask the hub even when the cache has an answer
    verify: bool = False  # read every byte again


def locate(
    name: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    token: str | None = None,
) -> Located:
    """Find a model, fetching it when it is not here. What the cache holds is used without asking anybody."""
    return find(name, Terms(revision, offline or offline_by_environment(), token))


def fetch(
    name: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    token: str | None = None,
    verify: bool = False,
) -> tuple[Path, int]:
    """What `mlxrt pull` does: the newest version into the cache, if wanted every byte verified; its path and bytes."""
    terms = Terms(revision, offline or offline_by_environment(), token, refresh=True, verify=verify)
    located = find(name, terms)
    if located.path is None:
        raise BadRequest(f"{name} is made from random numbers when it is loaded; there is nothing to pull")
    path = located.path
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return path, sum(file.stat().st_size for file in files)


def offline_by_environment() -> bool:
    """As huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def find(name: str, terms: Terms) -> Located:
    if not isinstance(name, str) or not name.strip():
        raise ModelNotFound(f"the model's name is {name!r}; {known()}")
    repo = Repository.parse(name)
    path = Path(os.path.expanduser(name))
    # os.path answers False for names no file system takes (too long, a NUL); pathlib raises.
    if os.path.isdir(path) or os.path.isfile(path):
        return local(name, path, terms)
    if name in ALIASES:
        refuse_hub_options(name, terms)
        found = pinned.obtain(ALIASES[name], offline=terms.offline, verify=terms.verify)
        return Located(name, "gguf", found)
    if name.startswith("shape:"):
        refuse_hub_options(name, terms)
        return Located(name, "shape", shape=Shape.parse(name))
    if repo is None or name.startswith((".", "~")):
        raise ModelNotFound(f"no model goes by {name!r}; {known()}")
    return remote(name, repo, terms)


def known() -> str:
    return f"give an alias ({', '.join(sorted(ALIASES))}), {FORMS}"


def local(name: str, path: Path, terms: Terms) -> Located:
    refuse_hub_options(name, terms)
    if name in ALIASES:
        log.warning(f"{name} is a file or folder here and an alias; taking {path.absolute()}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{name} is a file, but no .gguf; for safetensors give the folder with config.json")
        return Located(name, "gguf", path)
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not ggufs:
        return Located(name, "folder", path)
    if len(ggufs) > 1:
        raise ModelNotFound(f"{name} holds several GGUF files; give one: {hub.some([str(file) for file in ggufs])}")
    return Located(name, "gguf", ggufs[0])


def remote(name: str, repo: Repository, terms: Terms) -> Located:
    if terms.revision and repo.revision and terms.revision != repo.revision:
        raise BadRequest(f"{name} names revision {repo.revision}, but {terms.revision} was given too; give one")
    repo = Repository(repo.id, repo.revision or terms.revision, repo.file)
    path = hub.download(repo, offline=terms.offline, token=terms.token, refresh=terms.refresh)
    if terms.verify:
        hub.verify(path)
    return Located(name, "gguf" if repo.file else "folder", path)


def refuse_hub_options(name: str, terms: Terms) -> None:
    for option, value in (("revision", terms.revision), ("token", terms.token)):
        if value is not None:
            raise BadRequest(f"{name} does not come from the hub: {option} does not apply; leave it out")
