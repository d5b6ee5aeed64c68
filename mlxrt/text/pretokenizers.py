"""Pre-tokenizers of byte-level BPE in GGUF files, by the name in `tokenizer.ggml.pre`.

Each is a list of regular expressions applied in turn: a match becomes a word, the text between matches goes to the
next. Unknown names are refused: a guess would give wrong tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import BadTokenizer


def char_class(ranges: str) -> str:
    """A character class from hexadecimal ranges, which unlike the characters themselves survive editing."""
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in one.split("-")) for one in ranges.split()) + "]"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{OTHER}|{SPACES}"
QWEN2 = rf"{SHORT}|{WORD}|\p{{N}}|{OTHER}|{SPACES}"
QWEN35 = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{SLASHED}"
GPT4O = rf"{CASED[0]}{SHORT}?|{CASED[1]}{SHORT}?|\p{{N}}{{1,3}}|{SLASHED}"
CJK = char_class("4e00-9fa5 800-4e00 ac00-d7ff")
KANA_OR_HAN = char_class("4e00-9fa5 3040-309f 30a0-30ff")
SIGNS = char_class("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
# the letters of scripts with upper and lower case, as of the Unicode version DeepSeek took them from
CASED_LETTERS = char_class(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is not merged (llama.cpp's and tokenizers' name)
    add_bos: bool = False  # unless the file says otherwise


DIGITS = PreTokenizer((r"\p{N}", GPT2))
LLAMA3_PRE = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)

PRETOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum", "a.x-4.0", "trillion"), PreTokenizer((GPT2,))
    ),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3_PRE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), PreTokenizer((QWEN2,))),
    "qwen35": PreTokenizer((QWEN35,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((GPT4O,))),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer((r"[\r\n]", rf"\s?{CASED_LETTERS}+", rf"\s?{SIGNS}+", r"\s+$", f"{CJK}+", r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{CJK}+", r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer((r"\p{N}{1,3}", f"{KANA_OR_HAN}+", DEEPSEEK3))),
}


def find_pretokenizer(name: str) -> PreTokenizer:
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name]
    raise BadTokenizer(
        f"tokenizer.ggml.pre is {name!r}, which mlxrt does not know; known: {', '.join(sorted(PRETOKENIZERS))}"
    )
