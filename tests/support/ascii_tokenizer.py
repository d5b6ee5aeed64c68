"""A tokenizer with a token for every printable ASCII character: as many as the toy models have."""

from pathlib import Path

from mlxrt.text import Tokenizer

END = "<end>"


def write_ascii_tokenizer(folder: Path, template: str | None = None, size: int = 97) -> Tokenizer:
    """Token 0 ends an answer, 1 is a new line, the others are `size` - 2 characters from the space on."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    characters = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # as byte-level vocabularies write a new line and a space
    library = Library(models.BPE(vocab={c: i for i, c in enumerate([END, *characters][:size])}, merges=[]))
    library.add_special_tokens([END])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{END}"}}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)
