"""The models that were downloaded: files of aliases in mlxrt's cache, repositories in the hub's."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ModelNotFound
from .alias import ALIASES
from .cache_dir import cache_root, exclusive, writing
from .hub import HUB_ALIASES, list_some

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


@dataclass(frozen=True)
class CachedModel:
    name: str  # as `-m` takes it
    path: Path
    nbytes: int
    modified: float  # seconds since 1970


def list_cached() -> list[CachedModel]:
    """Every model in the caches, by name. Repositories without weights that mlxrt reads are left out."""
    scan = scan_hub()
    repos = [describe_repo(repo) for repo in (scan.repos if scan else ()) if has_weights(repo)]
    return sorted([*list_packages(), *repos], key=lambda model: model.name)


def remove_cached(name: str) -> CachedModel:
    """Delete a model from its cache; what was deleted."""
    for model in list_packages():
        if model.name == name:
            with writing(model.path), exclusive(model.path):
                shutil.rmtree(model.path)
            return model
    scan = scan_hub()
    for repo in scan.repos if scan else ():
        if repo.repo_id == HUB_ALIASES.get(name, name) and repo.repo_type == "model":
            with writing(
                repo.repo_path
            ):  # by its folder: huggingface_hub finds revisions by commit, which copies share
                shutil.rmtree(repo.repo_path)
            return describe_repo(repo)
    known = list_some([model.name for model in list_cached()])
    raise ModelNotFound(f"no model {name!r} was downloaded; there are: {known}")


def list_packages() -> list[CachedModel]:
    """What aliases brought: a folder for each package and version, named by the alias where it is the one in use."""
    names = {alias.path.parent: alias.name for alias in ALIASES.values()}
    root = cache_root() / "models"
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        files = [file.stat() for file in folder.glob("*") if file.is_file()]
        if nbytes := sum(stat.st_size for stat in files):
            found.append(
                CachedModel(names.get(folder, folder.name), folder, nbytes, max(stat.st_mtime for stat in files))
            )
    return found


def scan_hub() -> "HFCacheInfo | None":
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def has_weights(repo: "CachedRepoInfo") -> bool:
    names = (file.file_name for revision in repo.revisions for file in revision.files)
    return repo.repo_type == "model" and any(name.endswith((".safetensors", ".gguf")) for name in names)


def describe_repo(repo: "CachedRepoInfo") -> CachedModel:
    return CachedModel(repo.repo_id, repo.repo_path, repo.size_on_disk, repo.last_modified)
