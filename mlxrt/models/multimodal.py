"""The text model of a multimodal checkpoint: its part of the config and its tensors.

Images and audio are not supported, so the tensors of their towers are ignored.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import BadCheckpoint, quote
from .config import IGNORED_KEYS, report

TOWERS = (
    (
        r"^(?:model\.)?(?:vision_tower|vision_model|visual|vision_embedder|audio_tower|multi_modal_projector"
        r"|embed_vision|embed_audio)\.",
        "images and sound are not computed",
    ),
)
# Keys beside text_config: the towers and their placeholder tokens.
OUTER_KEYS = frozenset(
    """text_config vision_config audio_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image
    boi_token_id eoi_token_id image_token_id video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index
    vision_start_token_id vision_end_token_id vision_soft_tokens_per_image audio_soft_tokens_per_image processor_class
    tie_word_embeddings vocab_size""".split()
)
# Keys of the outer config that the text model needs.
INHERITED_KEYS = frozenset({"jang_config", "jang", "jang_norms_pre_shifted"})
TEXT_TENSOR = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\.)?(.*)", re.DOTALL)


def read_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model, with the outer keys it needs."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        kind = raw.get("model_type")
        raise BadCheckpoint(f"config.json: {quote(kind)} needs text_config, an object; found {quote(inner)}")
    for key in sorted(set(raw) - OUTER_KEYS - IGNORED_KEYS):
        report(f"config.json: {quote(key)} is unknown to mlxrt and has no effect")
    text = dict(inner)
    if "tie_word_embeddings" in raw:  # the outer value counts
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    for key in INHERITED_KEYS & set(raw):
        text[key] = raw[key]
    if "vocab_size" in raw:  # some tools copy it here; the inner one is right for a resized table
        text.setdefault("vocab_size", raw["vocab_size"])
    return text


def rename_text_tensor(key: str) -> str:
    """The tensor's name as if the text model had been saved alone."""
    found = TEXT_TENSOR.fullmatch(key)
    if not found:
        return key
    return f"lm_head.{found[2]}" if found[1] else f"model.{found[2]}"
