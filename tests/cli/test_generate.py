"""`mlxrt generate`: what it prints equals what the model computes; every option reaches the engine under its name."""

import json
import shlex
from dataclasses import fields

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.cli.flags import FLAG_HELP, Parser, add_engine_flags, add_sampling_flags, engine_config, sampling_options


def greedy(engine, tokens: list[int], count: int) -> list[int]:
    """Recomputed from nothing for every token."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(mx.argmax(engine.score(known)[-1]).item()))
    return known[len(tokens) :]


def test_json_is_one_object_with_the_models_own_greedy_tokens(cli, folder):
    result = cli("generate", "-m", folder, "--prompt", "hello", "-n", 12, "--ignore-eos", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    with mlxrt.load(str(folder)) as engine:
        prompt = engine.tokenizer.chat([{"role": "user", "content": "hello"}])
        assert found["tokens"] == greedy(engine, prompt, 12)
        assert found["text"] == engine.tokenizer.decode(found["tokens"])
    assert found["finish_reason"] == "length" and found["model"] == str(folder) and found["seed"] is None
    timings = found["timings"]
    assert set(timings) == {
        "prompt_tokens", "cached_tokens", "generated_tokens", "reasoning_tokens", "prefill_tps", "first_token_ms",
        "decode_tps", "total_ms", "peak_memory_bytes",
    }  # fmt: skip
    assert (timings["prompt_tokens"], timings["cached_tokens"], timings["generated_tokens"]) == (len(prompt), 0, 12)
    assert timings["first_token_ms"] > 0 and timings["total_ms"] > 0 and timings["peak_memory_bytes"] > 0


def test_raw_gives_the_prompt_without_the_template(cli, folder):
    found = json.loads(cli("generate", "-m", folder, "hello", "-n", 5, "--raw", "--json", "--ignore-eos").out)
    assert found["timings"]["prompt_tokens"] == len("hello")
    with mlxrt.load(str(folder)) as engine:
        assert found["tokens"] == greedy(engine, engine.tokenizer.encode("hello"), 5)


def test_text_goes_to_stdout_and_the_timing_line_to_stderr(cli, folder):
    flags = ("-m", folder, "-n", 6, "--ignore-eos", "hello")
    expected = json.loads(cli("generate", *flags, "--json").out)["text"]
    plain = cli("generate", *flags)
    assert plain.out == expected + "\n"
    assert "24 prompt tokens | 0 cached | prefill" in plain.err and "| 6 generated | decode" in plain.err
    assert "first token" in plain.err and "peak" in plain.err and "\033" not in plain.err


@pytest.mark.parametrize("given", [(), ("-",), ("-p", "-")])
def test_prompt_from_a_pipe_loses_one_newline(cli, folder, given):
    rest = ("-m", folder, "-n", 3, "--json")
    assert (
        json.loads(cli("generate", *rest, *given, stdin="grüß\n".encode()).out)["tokens"]
        == json.loads(cli("generate", *rest, "grüß").out)["tokens"]
    )


def test_template_options_reach_the_template(cli, folder, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "a"}, {"name": "b"}]')
    flags = ("--system", "Be brief.", "--tools", tools, "--no-thinking")
    found = json.loads(cli("generate", "-m", folder, "hi", "-n", 4, "--json", *flags).out)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    with mlxrt.load(str(folder)) as engine:
        prompt = engine.tokenizer.chat(messages, tools=[{"name": "a"}, {"name": "b"}], enable_thinking=False)
        assert found["timings"]["prompt_tokens"] == len(prompt)
        assert found["tokens"] == list(engine.generate(prompt, max_tokens=4).tokens)


def test_hot_answers_show_a_seed_that_repeats_them(cli, folder):
    flags = ("generate", "-m", folder, "hello", "-n", 16, "--temp", 1.5, "--json", "--ignore-eos")
    first = json.loads(cli(*flags).out)
    assert isinstance(first["seed"], int)
    assert json.loads(cli(*flags, "--seed", first["seed"]).out)["tokens"] == first["tokens"]
    assert f"seed {first['seed']}" in cli(*flags[:-2], "--ignore-eos", "--seed", first["seed"]).err


def test_sampling_flags_do_what_python_does(cli, folder):
    options = {
        "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "max_tokens": 20, "ignore_eos": True,
        "logit_bias": {5: 2.0, 6: -1.5}, "suppress": (1, 2, 3), "stop_token_ids": (9,), "stop": ("zz", "yy"),
    }  # fmt: skip
    flags = shlex.split("""--temp 0.8 --top-k 40 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --seed 3 -n 20
        --presence-penalty 0.5 --frequency-penalty 0.25 --ignore-eos --logit-bias 5=2 --logit-bias 6=-1.5
        --suppress 1,2 --suppress 3 --stop-token-ids 9 --stop zz --stop yy""")
    found = json.loads(cli("generate", "-m", folder, "--raw", "hello", "--json", *flags).out)
    with mlxrt.load(str(folder)) as engine:
        assert found["tokens"] == list(engine.generate("hello", **options).tokens)


def test_every_option_is_a_flag_of_the_same_name():
    parser = Parser(prog="x")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    known = parser.format_help()
    names = [f.name for f in fields(mlxrt.SamplingParams)] + [f.name for f in mlxrt.EngineConfig.options()]
    for name in names:
        assert f"--{name.replace('_', '-')}" in known
    assert set(FLAG_HELP) == {f.name for f in fields(mlxrt.SamplingParams)}
    assert "--token " not in known  # a secret on a command line is everybody's
    nothing = parser.parse_args([])
    assert sampling_options(nothing) == {} and engine_config(nothing) == mlxrt.EngineConfig()
    given = parser.parse_args(shlex.split("--kv-memory 64M --no-prefix-cache --compile --dtype float16 --ahead 0"))
    expected = mlxrt.EngineConfig(kv_memory="64M", prefix_cache=False, compile=True, dtype="float16", ahead=0)
    assert engine_config(given) == expected


def test_logprobs_name_the_chosen_token_first(cli, folder):
    found = json.loads(cli("generate", "-m", folder, "--raw", "hello", "-n", 3, "--json", "--logprobs", 2).out)
    with mlxrt.load(str(folder)) as engine:
        row = engine.score(engine.tokenizer.encode("hello"))[-1]
    row = row - mx.logsumexp(row)
    assert len(found["logprobs"]) == len(found["tokens"])
    first = found["logprobs"][0]
    assert first[0]["token"] == found["tokens"][0] and len(first) == 2
    for one in first:
        assert one["logprob"] == pytest.approx(row[one["token"]].item(), abs=1e-4)


def test_impossible_tokens_stay_valid_json(cli, folder):
    flags = ("-n", 2, "--json", "--logprobs", 5, "--suppress", ",".join(map(str, range(3, 258))))
    out = cli("generate", "-m", folder, "--raw", "hello", *flags).out
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(found["tokens"]) <= {0, 1, 2}


def test_stop_text_is_not_printed(cli, folder):
    whole = json.loads(cli("generate", "-m", folder, "hello", "-n", 12, "--ignore-eos", "--json").out)["text"]
    stop = whole[4:6]
    cut = json.loads(cli("generate", "-m", folder, "hello", "-n", 12, "--ignore-eos", "--json", "--stop", stop).out)
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


def test_generation_config_supplies_defaults_and_says_so(cli, folder):
    folder.recommend(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, eos_token_id=257, no_repeat_ngram_size=3)
    result = cli("generate", "-m", folder, "--raw", "hello", "-n", 8, "--json", "--seed", 1, "--top-k", 5)
    assert "from generation_config.json: temperature=0.7 top_p=0.8" in result.err and "top_k" not in result.err
    assert "not applied: no_repeat_ngram_size" in result.err
    with mlxrt.load(str(folder)) as engine:
        expected = engine.generate("hello", max_tokens=8, seed=1, top_k=5, temperature=0.7, top_p=0.8)
    assert json.loads(result.out)["tokens"] == list(expected.tokens) and json.loads(result.out)["seed"] == 1


@pytest.mark.parametrize("values", [{"do_sample": False, "temperature": 0.7}, {"top_p": 0.8}, {"temperature": None}])
def test_generation_config_without_sampling_is_greedy(cli, folder, values):
    folder.recommend(**values)
    result = cli("generate", "-m", folder, "hello", "-n", 2, "--json")
    assert json.loads(result.out)["seed"] is None and "generation_config" not in result.err


@pytest.mark.parametrize(
    ("values", "named"),
    [({"top_p": 1.5}, "top_p"), ({"temperature": "hot"}, "temperature"), ({"do_sample": "yes"}, "do_sample"),
     ({"temperature": -1}, "temperature"), ({"top_k": 1.5}, "top_k"), ({"min_p": 2}, "min_p")],
)  # fmt: skip
def test_bad_generation_config_is_named(cli, folder, values, named):
    folder.recommend(**values)
    line = cli("generate", "-m", folder, "hello").refused(1)
    assert "generation_config.json" in line and named in line
