"""Resolves a model name to a folder, a GGUF file or a random model of a published shape, downloading if needed."""

import logging
import os
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from ...errors import BadRequest, ModelNotFound, show
from ..formats.gguf.splits import first_split
from ..random_models import Shape
from . import hub
from .alias import ALIASES, fetch_alias
from .hub import HUB_ALIASES, Repository

log = logging.getLogger("mlxrt")

FORMS = (
    "a folder, a .gguf file, owner/name[@revision], owner/name:Q4_K_M or owner/name:FILE.gguf on the hub, "
    "shape:NAME[@4bit]"
)


@dataclass(frozen=True)
class ResolvedModel:
    """`name` is what the user gave; `path` is None exactly for a shape."""

    name: str
    kind: Literal["folder", "gguf", "shape"]
    path: Path | None = None
    shape: Shape | None = None


@dataclass(frozen=True)
class FetchOptions:
    revision: str | None = None
    offline: bool = False
    token: str | None = None
    refresh: bool = False  # ask the hub even when the model is cached
    verify: bool = False  # check all digests


def resolve(
    name: str, *, revision: str | None = None, offline: bool = False, token: str | None = None
) -> ResolvedModel:
    """Resolve a model, downloading it if it is not cached. A cached model needs no network."""
    return resolve_with(name, FetchOptions(revision, offline or offline_by_environment(), token))


def fetch(
    name: str, *, revision: str | None = None, offline: bool = False, token: str | None = None, verify: bool = False
) -> tuple[Path, int]:
    """`mlxrt pull`: the newest version into the cache, with `verify` all digests checked; its path and size."""
    options = FetchOptions(revision, offline or offline_by_environment(), token, refresh=True, verify=verify)
    model = resolve_with(name, options)
    if model.path is None:
        raise BadRequest(f"{name} has random weights made at load time; there is nothing to pull")
    path = model.path
    if model.kind == "folder" and not (path / "config.json").exists():
        raise ModelNotFound(f"{name} is a folder without config.json and without a .gguf file: it holds no model")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return path, sum(file.stat().st_size for file in files)


def offline_by_environment() -> bool:
    """As huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def resolve_with(name: str, options: FetchOptions) -> ResolvedModel:
    if not isinstance(name, str) or not name.strip():
        raise ModelNotFound(f"the model's name is {show(name)}; {name_help()}")
    repo = Repository.parse(name)
    path = Path(os.path.expanduser(name))
    # os.path returns False for impossible names (too long, a NUL); pathlib raises.
    if os.path.isdir(path) or os.path.isfile(path):
        return resolve_local(name, path, options)
    if name in ALIASES:
        refuse_hub_options(name, options)
        path = fetch_alias(ALIASES[name], offline=options.offline, verify=options.verify)
        return ResolvedModel(name, "gguf", path)
    if name.startswith("shape:"):
        refuse_hub_options(name, options)
        return ResolvedModel(name, "shape", shape=Shape.parse(name))
    if name in HUB_ALIASES:
        log.info(f"{name} is {HUB_ALIASES[name]} on the hub")
        return resolve_hub(name, Repository(HUB_ALIASES[name]), options)
    if repo is None or name.startswith((".", "~")):
        near = get_close_matches(name, [*ALIASES, *HUB_ALIASES], n=1)
        hint = f"did you mean {near[0]}?; " if near else ""
        raise ModelNotFound(f"no model goes by {name!r}; {hint}{name_help()}")
    return resolve_hub(name, repo, options)


def name_help() -> str:
    return f"give an alias ({', '.join([*ALIASES, *HUB_ALIASES])}), {FORMS}"


def resolve_local(name: str, path: Path, options: FetchOptions) -> ResolvedModel:
    refuse_hub_options(name, options)
    if name in ALIASES or name in HUB_ALIASES:
        log.warning(f"{name} is a file or folder here and an alias; using {path.absolute()}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{name} is a file, but not a .gguf; for safetensors give the folder with config.json")
        return ResolvedModel(name, "gguf", path)
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not ggufs:
        return ResolvedModel(name, "folder", path)
    if len(ggufs) > 1 and (first := first_split(ggufs)) is not None:
        return ResolvedModel(name, "gguf", first)
    if len(ggufs) > 1:
        raise ModelNotFound(f"{name} holds several GGUF files; give one: {hub.list_some(list(map(str, ggufs)))}")
    return ResolvedModel(name, "gguf", ggufs[0])


def resolve_hub(name: str, repo: Repository, options: FetchOptions) -> ResolvedModel:
    if options.revision and repo.revision and options.revision != repo.revision:
        raise BadRequest(f"{name} names revision {repo.revision}, but {options.revision} was given too; give one")
    repo = replace(repo, revision=repo.revision or options.revision)
    path = hub.download(repo, offline=options.offline, token=options.token, refresh=options.refresh)
    if options.verify:
        hub.verify(path)
    return ResolvedModel(name, "gguf" if repo.file or repo.kind else "folder", path)


def refuse_hub_options(name: str, options: FetchOptions) -> None:
    for option, value in (("revision", options.revision), ("token", options.token)):
        if value is not None:
            raise BadRequest(f"{name} does not come from the hub: {option} does not apply; leave it out")
