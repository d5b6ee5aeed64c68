"""Checkpoint file formats and weight formats, one file each. None knows an architecture."""
