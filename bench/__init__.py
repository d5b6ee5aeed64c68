"""Measurements and comparisons with other engines. Run as `python -m bench.NAME` from the repository's root."""
