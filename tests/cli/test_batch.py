"""`mlxrt generate --prompts`: the answers of single runs, in order; bad lines by their numbers."""

import json

import pytest


def lines_of(path, *values) -> str:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return str(path)


def found(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_results_are_those_of_single_runs_and_in_order(cli, folder, tmp_path):
    prompts = ["hello", "a longer question than that one", "x", "why?", "grüß", "hello"]
    lengths = [9, 3, 12, 1, 5, 4]
    values = [{"prompt": p, "max_tokens": n, "id": f"q{n}"} for p, n in zip(prompts, lengths)]
    path = lines_of(tmp_path / "p.jsonl", *values, "", '"plain"')
    result = cli("generate", "-m", folder, "--prompts", path, "--parallel", 3, "-n", 2, "--ignore-eos")
    assert result.code == 0 and "7 prompts, 0 not answered" in result.err
    got = found(result.out)
    assert [g["line"] for g in got] == [1, 2, 3, 4, 5, 6, 8] and got[0]["id"] == "q9" and "id" not in got[-1]
    for g, p, n in zip(got, [*prompts, "plain"], [*lengths, 2]):
        alone = json.loads(cli("generate", "-m", folder, p, "-n", n, "--ignore-eos", "--json").out)
        assert g["tokens"] == alone["tokens"] and g["text"] == alone["text"] and len(g["tokens"]) == n


def test_output_goes_to_a_file(cli, folder, tmp_path):
    path = lines_of(tmp_path / "p.jsonl", {"tokens": [1, 2, 3]}, {"messages": [{"role": "user", "content": "hi"}]})
    out = tmp_path / "results.jsonl"
    result = cli("generate", "-m", folder, "--prompts", path, "--output", out, "-n", 3, "--logprobs", 1)
    assert result.code == 0 and result.out == "" and [len(f["logprobs"]) for f in found(out.read_text())] == [3, 3]


def test_a_line_that_cannot_be_answered_is_one_result(cli, folder, tmp_path):
    path = lines_of(tmp_path / "p.jsonl", '"hello"', {"tokens": [5] * 5000}, {"tokens": [999]}, '"bye"')
    result = cli("generate", "-m", folder, "--prompts", path, "-n", 2)
    got = found(result.out)
    assert result.code == 1 and [("error" in g) for g in got] == [False, True, True, False]
    assert "5000 tokens" in got[1]["error"] and "0..257" in got[2]["error"] and "2 not answered" in result.err


@pytest.mark.parametrize(
    "line, words",
    [
        ("{nope", "line 2: not JSON"),
        ("[1, 2]", "line 2: expected a string or an object"),
        ({"prompt": "a", "tokens": [1]}, "line 2: exactly one of"),
        ({"max_tokens": 3}, "line 2: exactly one of"),
        ({"prompt": 7}, "line 2: prompt must be a string"),
        ({"prompt": ""}, "line 2: prompt must be a string, not empty"),
        ({"prompt": "a", "temprature": 1}, "line 2: unknown key temprature"),
        ({"prompt": "a", "top_p": 3}, "line 2: top_p must be"),
        ({"prompt": "a", "stop": 3}, "line 2: stop must be a list, not 3"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "line 2: logit_bias"),
    ],
)
def test_bad_lines_are_named_before_anything_runs(cli, folder, tmp_path, line, words):
    path = lines_of(tmp_path / "p.jsonl", '"fine"', line)
    error = cli("generate", "-m", folder, "--prompts", path).refused(2)
    assert words in error and "nothing was run" in error


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--parallel", "4", "hello"), "--parallel goes with --prompts"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--prompts", "{path}", "hello"), "give one of them"),
        (("--prompts", "{path}", "--parallel", "0"), "--parallel must be"),
        (("--prompts", "{path}", "--output", "/nowhere/x"), "--output /nowhere/x"),
        (("--prompts", "{path}", "--thinking"), "write it into the lines"),
    ],
)
def test_flags_that_do_not_go_together(cli, folder, tmp_path, flags, words):
    path = lines_of(tmp_path / "p.jsonl", '"fine"')
    assert words in cli("generate", "-m", folder, *(f.format(path=path) for f in flags)).refused(2)
