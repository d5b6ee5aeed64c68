"""Log probabilities: every token has its own, wherever its text goes, and a stream says what a plain answer says."""

import pytest

from .conftest import running
from .test_cases import CALL, CHAT, HI, TEXT, TOOLS
from .test_responses import read_events


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def ask_both(server, path, says, **fields):
    """The plain answer's choice, and the choices of the streamed one's chunks."""
    server.script[:] = [says, says]
    plain = server.post(path, fields).json()["choices"][0]
    events = read_events(server.post(path, fields | {"stream": True}).text)
    return plain, [event["choices"][0] for event in events if event["choices"]]


def test_tokens_of_calls_have_theirs(server):
    asked = {"messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 1, "max_tokens": 300}
    plain, chunks = ask_both(server, CHAT, f"I look. {CALL}", **asked)
    streamed = [entry for chunk in chunks for entry in (chunk.get("logprobs") or {"content": []})["content"]]
    assert plain["message"]["tool_calls"] and len(streamed) > len(CALL)
    expected = plain["logprobs"]["content"]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in expected]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in expected])


@pytest.mark.parametrize("fields", [{}, {"stop": ["b, d"]}], ids=["whole", "a stop string"])
def test_offsets_are_places_in_the_text(server, fields):
    """Characters of several tokens, and text that is held back for a stop string."""
    says = "é a, b, c: 日本 😀 b, x"
    asked = {"prompt": "héllo", "max_tokens": 80, "logprobs": 0} | fields
    plain, chunks = ask_both(server, TEXT, says, **asked)
    found, text = plain["logprobs"], plain["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:") and offset < len(text):
            assert text[offset : offset + len(token)] == token
    assert found["text_offset"][0] == text.index("é a") and len(set(found["text_offset"])) > len("a, b, c")
    pieces = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for field in ("tokens", "text_offset"):
        assert [one for piece in pieces for one in piece[field]] == found[field]
