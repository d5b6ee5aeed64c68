"""Engines under a load of many requests, each in a process of its own (bench/serving.py)."""
