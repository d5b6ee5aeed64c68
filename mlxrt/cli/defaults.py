"""generation_config.json as sampling defaults: what the model's authors recommend, printed, never over a given flag.

`do_sample: false` means greedy; where it is absent, a temperature counts as wanting one.
"""

from collections.abc import Mapping
from typing import Any

from ..engine.request import SamplingParams
from ..errors import BadCheckpoint, BadRequest
from .terminal import note

TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SILENT = frozenset(
    (
        "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
        "_from_model_config", "use_cache", "cache_implementation", "return_dict_in_generate", "output_attentions",
        "output_hidden_states", "output_scores", "trust_remote_code",
    )
)  # fmt: skip  # whether to sample and where to end is honoured; the others do not change what is generated


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a generation_config.json that take effect."""
    for key in TAKEN:
        if generation.get(key) is not None:
            check(key, generation[key])
    sample = generation.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise BadCheckpoint(f"generation_config.json: do_sample must be true or false, not {sample!r}")
    found = {key: generation[key] for key in TAKEN if generation.get(key) is not None}
    if sample is False or (sample is None and "temperature" not in found):
        return {key: value for key, value in found.items() if key == "repetition_penalty"}
    return {"temperature": 1.0} | found  # HF's own value where sampling is on and no temperature is named


def check(key: str, value: Any) -> None:
    try:
        SamplingParams(**{key: value})
    except BadRequest as error:
        raise BadCheckpoint(f"generation_config.json: {error}; correct the file") from None


def settled(generation: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The sampling options of a run: those given, else the model's; says which came from the model."""
    ours = {key: value for key, value in recommended(generation).items() if key not in given}
    if ours:
        note(f"from generation_config.json: {' '.join(f'{key}={value}' for key, value in ours.items())} (flags win)")
    if left := sorted(k for k, v in generation.items() if v is not None and k not in SILENT and k not in TAKEN):
        note(f"generation_config.json: not applied: {', '.join(left)}")
    return ours | given


def seeded(options: dict[str, Any]) -> dict[str, Any]:
    """With the seed drawn here: an answer that is stopped before its end must be repeatable too."""
    if options.get("temperature", 0) > 0 and options.get("seed") is None:
        from ..engine.sampler import draw_seed

        return options | {"seed": draw_seed()}
    return options
