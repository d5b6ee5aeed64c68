"""KV cache on disk: saved states, and the prefix cache's blocks for the next process."""

from .disk_store import DiskStats, DiskStore

__all__ = ["DiskStats", "DiskStore"]
