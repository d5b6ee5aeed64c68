"""Downloads a model's files from the hub through huggingface_hub: its cache, its resuming, its environment variables.

Errors of the hub, the network and the disk become one typed line that says what to do.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import BadCheckpoint, HubError, MlxrtError, ModelNotFound, UnsupportedModel
from ..formats.gguf.splits import split_names

log = logging.getLogger("mlxrt")


ALLOWED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# Folders hold other formats (onnx/, original/); consolidated* is a second copy of the same weights.
IGNORED_FILES = ("*/*", "consolidated*")
NAME = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^:\s]+))?([:/](?P<file>[^:@]+\.gguf)|:(?P<kind>[\w-]+))?", re.ASCII
)

PROJECTOR = re.compile(r"(^|/)mmproj[^/]*$", re.IGNORECASE)  # of a vision model's images: no model of its own

MAX_LISTED = 12  # file names in a message

# Names that other tools know, each for a 4-bit repository in MLX's format; of a family alone, its usual size.
HUB_ALIASES = {
    "llama3.1": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.1:8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.2": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.2:1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2:3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "qwen3": "mlx-community/Qwen3-8B-4bit",
    "qwen3:0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3:1.7b": "mlx-community/Qwen3-1.7B-4bit",
    "qwen3:4b": "mlx-community/Qwen3-4B-4bit",
    "qwen3:8b": "mlx-community/Qwen3-8B-4bit",
    "qwen3:30b-a3b": "mlx-community/Qwen3-30B-A3B-4bit",
    "gemma3:1b": "mlx-community/gemma-3-1b-it-4bit",
    "mistral:7b": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
}


@dataclass(frozen=True)
class Repository:
    """A model on the hub: all of it, or one GGUF file of it, given by its name or by its quantisation."""

    id: str
    revision: str | None = None
    file: str | None = None
    kind: str | None = None  # such as Q4_K_M: until a listing has said which file that is

    @classmethod
    def parse(cls, name: str) -> "Repository | None":
        found = NAME.fullmatch(name)
        return cls(**found.groupdict()) if found else None

    def __str__(self) -> str:
        chosen = self.file or self.kind
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{chosen}" if chosen else "")

    @property
    def allow_patterns(self) -> list[str]:
        if self.kind:
            return []  # which one is not known yet
        return [glob.escape(name) for name in split_names(self.file)] if self.file else list(ALLOWED_FILES)

    @property
    def ignore_patterns(self) -> list[str]:
        return [] if self.file or self.kind else list(IGNORED_FILES)

    def choose_file(self, names: Iterable[str]) -> "Repository | None":
        """The same with the file of its quantisation, of these names; None where there is none of it."""
        assert self.kind is not None
        ends = re.compile(rf"(.*[-._/])?{re.escape(self.kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE | re.DOTALL)
        found = sorted(name for name in names if ends.fullmatch(name) and not PROJECTOR.search(name))
        if len(found) > 1:
            raise ModelNotFound(f"{self} is several files; name one as {self.id}:FILE, FILE one of: {list_some(found)}")
        return replace(self, file=found[0], kind=None) if found else None


def download(repo: Repository, *, offline: bool, token: str | None, refresh: bool = False) -> Path:
    """The snapshot's folder, or the GGUF file in it. A complete cached snapshot is used as it is unless `refresh`."""
    check_endpoint()
    with translate_errors(repo.id, str(repo)):
        if repo.kind:
            repo = find_file(repo, offline=offline, token=token, refresh=refresh)
        folder = find_cached(repo) if offline or not refresh else None
        if folder is not None:
            log.info(f"{repo}: from the cache, commit {folder.name[:12]} (`mlxrt pull {repo}` looks for a newer one)")
        elif offline:
            raise HubError(f"{repo} is not complete in the cache and mlxrt is offline; run `mlxrt pull {repo}` online")
        else:
            endpoint, files = list_files(repo, token)
            log.info(f"{repo}: fetching {len(files)} files, {sum(files.values()) / 1e6:.1f} MB in all, from {endpoint}")
            folder = snapshot(repo, token=token)
    return folder / repo.file if repo.file else folder


def find_file(repo: Repository, *, offline: bool, token: str | None, refresh: bool) -> Repository:
    """The file of its quantisation: of those in the cache, unless `refresh`; else of all."""
    folder = cached_folder(repo) if offline or not refresh else None
    if folder is not None:
        cached = repo.choose_file(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
        if cached is not None:
            return cached
    if offline:
        raise HubError(f"{repo} is not in the cache and mlxrt is offline; run `mlxrt pull {repo}` online")
    files = list_repository(repo, token)
    if (chosen := repo.choose_file(files)) is None:
        ggufs = sorted(name for name in files if name.endswith(".gguf"))
        raise ModelNotFound(f"{repo.id} has no GGUF file of {repo.kind}; its GGUF files: {list_some(ggufs)}")
    return chosen


def snapshot(repo: Repository, *, token: str | None = None, local: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """A progress bar on terminals only; the library shows one of its bars always."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **(options | ({} if sys.stderr.isatty() else {"disable": True})))

    folder = snapshot_download(
        repo.id,
        revision=repo.revision,
        token=token,
        local_files_only=local,
        allow_patterns=repo.allow_patterns,
        ignore_patterns=repo.ignore_patterns,
        tqdm_class=Bar,
    )
    return Path(folder)


def find_cached(repo: Repository) -> Path | None:
    """The snapshot's folder when all needed files are in the cache."""
    folder = cached_folder(repo)
    return folder if folder is not None and is_complete(folder, repo.file) else None


def cached_folder(repo: Repository) -> Path | None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot(repo, local=True)
    except LocalEntryNotFoundError:
        return None


def is_complete(folder: Path, file: str | None) -> bool:
    """Older versions of huggingface_hub return partial snapshots."""
    if file:
        return all((folder / name).is_file() for name in split_names(file))
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return True  # complete but damaged, which the folder's reader reports
    return all(isinstance(shard, str) and (folder / shard).is_file() for shard in shards)


def list_files(repo: Repository, token: str | None) -> tuple[str, dict[str, int]]:
    """The hub's address and the needed files with their sizes.

    A request of its own, because snapshot_download hides some errors by what it has on the disk.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import filter_repo_objects

    files = list_repository(repo, token)
    selected = filter_repo_objects(files, allow_patterns=repo.allow_patterns, ignore_patterns=repo.ignore_patterns)
    needed = {name: files[name] for name in selected}
    check_weights(repo, files, needed)
    return constants.ENDPOINT, needed


def list_repository(repo: Repository, token: str | None) -> dict[str, int]:
    """All its files with their sizes."""
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi(token=token).model_info(
            repo.id, revision=repo.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError):
            raise  # an HTTP error, which is a ValueError too
        raise HubError(f"{constants.ENDPOINT} does not answer like the hub ({error!r}); check HF_ENDPOINT") from error


def check_weights(repo: Repository, files: dict[str, int], needed: dict[str, int]) -> None:
    """Refuse a repository without readable weights before anything is downloaded."""
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if repo.file:
        if missing := [name for name in split_names(repo.file) if name not in files]:
            raise ModelNotFound(f"{repo.id} has no file {missing[0]}; its GGUF files: {list_some(ggufs)}")
        return
    if any(name.endswith(".safetensors") for name in needed):
        return
    if ggufs:
        raise ModelNotFound(
            f"{repo} holds GGUF files; give a quantisation as {repo}:Q4_K_M or one as {repo}:FILE: {list_some(ggufs)}"
        )
    raise UnsupportedModel(f"{repo} has neither .safetensors nor .gguf, but {list_some(sorted(files))}; convert it")


def list_some(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "none") + rest


def verify(path: Path) -> None:
    """Check every file. The cache names contents by their digest: sha256, or git's sha1 for small files."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        expected = file.resolve().name
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected) is None:
            log.info(f"{file}: the cache has no digest of it; not verified")
        elif content_digest(file, expected) != expected:
            raise BadCheckpoint(f"{file} is damaged: its digest does not match; delete {file.resolve()} and pull again")


def content_digest(file: Path, expected: str) -> str:
    with open(file, "rb") as stream:
        if len(expected) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        sha1 = hashlib.sha1(b"blob %d\0" % os.fstat(stream.fileno()).st_size, usedforsecurity=False)
        while chunk := stream.read(1 << 20):
            sha1.update(chunk)
        return sha1.hexdigest()


def check_endpoint() -> None:
    address = os.environ.get("HF_ENDPOINT", "https://")
    try:
        split = urlsplit(address)
        usable = split.scheme in ("http", "https") and (split.port is None or split.port > 0)
    except ValueError:
        usable = False
    if not usable or (split.netloc == "" and address != "https://"):
        raise HubError(f"HF_ENDPOINT is {address!r}, expected http(s)://host[:port]; correct it or unset it")


@contextlib.contextmanager
def translate_errors(repo: str, request: str) -> Iterator[None]:
    """Errors of the network, the hub and the disk as MlxrtErrors."""
    from huggingface_hub import errors

    xet_error = getattr(errors, "XetDownloadError", errors.HTTPError)  # huggingface_hub 1.x has no such class
    try:
        yield
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} cannot be a model on the hub: {first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        raise http_error(repo, request, error, error.response.status_code) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError, xet_error) as error:
        raise HubError(
            f"no connection to the hub for {request} ({type(error).__name__}: {first_line(error)}); complete files "
            "are kept: check the network and HF_ENDPOINT and run it again, or use --offline with a model that is cached"
        ) from error
    except OSError as error:
        raise HubError(f"cannot store {request}: {first_line(error)}; free space or set HF_HOME elsewhere") from error


def http_error(repo: str, request: str, error: Exception, status: int) -> MlxrtError:
    """The error for an HTTP status of the hub."""
    from huggingface_hub import errors

    token = "give a token that may read it (--token or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repo} is gated (status {status}): accept its terms on its page at the hub, then {token}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{repo} has no such revision (requested: {request}); give a branch, a tag or a commit")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFound(f"the hub lists a file of {request} that it does not have: {first_line(error)}; try again")
    if status == 404:
        return ModelNotFound(f"the hub has no model {repo}; check the spelling, or {token} if it is private")
    if status == 401:
        return HubError(f"the hub answered 401 for {repo}: no such model, or a private one; check the name or {token}")
    if status == 403:
        return HubError(f"the hub answered 403 for {repo}: this token may not read it; {token}")
    return HubError(f"the hub answered {status} for {request}; try again later")


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
