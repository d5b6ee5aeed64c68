"""Sampling defaults that a model's authors give in generation_config.json.

`do_sample: false` means greedy; where it is absent, a temperature means sampling.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import BadCheckpoint, BadRequest
from .request import SamplingParams

APPLIED_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a generation_config.json that take effect."""
    found = {key: generation[key] for key in APPLIED_KEYS if generation.get(key) is not None}
    for key, value in found.items():
        try:
            SamplingParams(**{key: value})
        except BadRequest as error:
            raise BadCheckpoint(f"generation_config.json: {error}; correct the file") from None
    sample = generation.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise BadCheckpoint(f"generation_config.json: do_sample must be true or false, not {sample!r}")
    if sample is False or (sample is None and "temperature" not in found):
        return {key: value for key, value in found.items() if key == "repetition_penalty"}
    return {"temperature": 1.0} | found  # HF's own value where sampling is on and no temperature is named
