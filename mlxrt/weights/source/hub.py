"""A model's files from the hub, through huggingface_hub: its cache, its resuming, its environment variables.

Only the files a model is built from are asked for. It does not know what is inside them.
"""

import glob
import hashlib
import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ...errors import BadCheckpoint, HubError, ModelNotFound, UnsupportedModel
from .hub_errors import check_endpoint, translated

log = logging.getLogger("mlxrt")


WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# Folders hold other formats (onnx/, original/); consolidated* is a second copy of the same weights in another spelling.
UNWANTED = ("*/*", "consolidated*")
NAME = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^:\s]+))?([:/](?P<file>[^:@]+\.gguf))?", re.ASCII)


@dataclass(frozen=True)
class Repository:
    """A model on the hub: all of it, or one GGUF file of it."""

    id: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> "Repository | None":
        found = NAME.fullmatch(name)
        return cls(**found.groupdict()) if found else None

    def __str__(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")

    @property
    def allowed(self) -> list[str]:
        return [glob.escape(self.file)] if self.file else list(WANTED)

    @property
    def ignored(self) -> list[str]:
        return [] if self.file else list(UNWANTED)


def download(repo: Repository, *, offline: bool, token: str | None, refresh: bool = False) -> Path:
    """The folder of the snapshot, or the GGUF file in it. What is cached whole is used as it is unless `refresh`."""
    check_endpoint()
    with translated(repo.id, str(repo)):
        folder = cached(repo) if offline or not refresh else None
        if folder is not None:
            log.info(f"{repo}: from the cache, commit {folder.name[:12]} (`mlxrt pull {repo}` looks for a newer one)")
        elif offline:
            raise HubError(f"{repo} is not (all) in the cache and mlxrt is offline; run `mlxrt pull {repo}` online")
        else:
            announce(repo, *listing(repo, token))
            folder = snapshot(repo, token=token)
    return folder / repo.file if repo.file else folder


def snapshot(repo: Repository, *, token: str | None = None, local: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """The library draws one of its bars even where nobody watches."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **(options | ({} if sys.stderr.isatty() else {"disable": True})))

    folder = snapshot_download(
        repo.id,
        revision=repo.revision,
        token=token,
        local_files_only=local,
        allow_patterns=repo.allowed,
        ignore_patterns=repo.ignored,
        tqdm_class=Bar,
    )
    return Path(folder)


def cached(repo: Repository) -> Path | None:
    """The snapshot's folder when everything needed is on the disk."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot(repo, local=True)
    except LocalEntryNotFoundError:
        return None
    return folder if whole(folder, repo.file) else None


def whole(folder: Path, file: str | None) -> bool:
    """Older versions of huggingface_hub answer with a snapshot of which only a part arrived."""
    if file:
        return (folder / file).is_file()
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True  # complete, but damaged: the reader of the folder says so with its own words
    return all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)


def listing(repo: Repository, token: str | None) -> tuple[str, dict[str, int]]:
    """The hub's address and the needed files with their sizes. Asked for by itself: an error here is exact,
    while snapshot_download answers some of them with whatever it has on the disk."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import filter_repo_objects

    try:
        asked = HfApi(token=token).model_info(
            repo.id, revision=repo.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        files = {file.rfilename: file.size or 0 for file in asked.siblings or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError):
            raise  # an answer with a status, which happens to be a ValueError too
        raise HubError(f"{constants.ENDPOINT} does not answer like the hub ({error!r}); check HF_ENDPOINT") from error
    chosen = filter_repo_objects(files, allow_patterns=repo.allowed, ignore_patterns=repo.ignored)
    needed = {name: files[name] for name in chosen}
    check_weights(repo, files, needed)
    return constants.ENDPOINT, needed


def check_weights(repo: Repository, files: dict[str, int], needed: dict[str, int]) -> None:
    """Before anything is downloaded: does the repository hold weights we can read?"""
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if repo.file:
        if repo.file not in files:
            raise ModelNotFound(f"{repo.id} has no file {repo.file}; its GGUF files: {some(ggufs)}")
        return
    if any(name.endswith(".safetensors") for name in needed):
        return
    if ggufs:
        raise ModelNotFound(f"{repo} holds GGUF files; name one as {repo}:FILE, FILE one of: {some(ggufs)}")
    raise UnsupportedModel(f"{repo} has neither .safetensors nor .gguf, but {some(sorted(files))}; convert it first")


def some(names: list[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + rest


def announce(repo: Repository, endpoint: str, files: dict[str, int]) -> None:
    log.info(f"{repo}: fetching {len(files)} files, {sum(files.values()) / 1e6:.1f} MB in all, from {endpoint}")


def verify(path: Path) -> None:
    """Read every file again. The cache names a file's content by its digest: sha256, or git's sha1 for small ones."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        expected = file.resolve().name
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected) is None:
            log.info(f"{file}: the cache kept no digest of it; not verified")
        elif content_digest(file, expected) != expected:
            raise BadCheckpoint(f"{file} is damaged: not what the hub sent; delete {file.resolve()} and pull again")


def content_digest(file: Path, like: str) -> str:
    with open(file, "rb") as stream:
        if len(like) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        seen = hashlib.sha1(b"blob %d\0" % os.fstat(stream.fileno()).st_size, usedforsecurity=False)
        while chunk := stream.read(1 << 20):
            seen.update(chunk)
        return seen.hexdigest()
