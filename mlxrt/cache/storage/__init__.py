"""The blocks of the prefix store in files: what one process computed, the next one finds."""

from .disk_store import DiskStats, DiskStore

__all__ = ["DiskStats", "DiskStore"]
