"""Whatever is wrong gets one line and an exit code, never a traceback."""

import json
import logging

import mlx.core as mx
import pytest

from mlxrt.cli.terminal import configure_logging
from mlxrt.engine import load as loader
from mlxrt.kernels import device

from .conftest import weights, write_tokenizer


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "-1"], "temperature must be in 0..1000000, not -1.0"),
        (["--temp", "nan"], "'nan' is not a finite number"),
        (["--top-p", "0"], "top_p must be in (0, 1], not 0.0"),
        (["--top-p", "1.5"], "top_p must be in (0, 1], not 1.5"),
        (["--top-k", "-1"], "top_k"),
        (["--top-k", "1.5"], "'1.5' is not an integer"),
        (["--top-k", "9" * 400], "beyond 64 bits"),
        (["-n", "0"], "max_tokens"),
        (["--seed", "-5"], "seed"),
        (["--logit-bias", "5"], "is not ID=VALUE"),
        (["--logit-bias", "x=1"], "not an integer"),
        (["--suppress", "1,,2"], "not an integer"),
        (["--stop", ""], "stop must be"),
        (["--logprobs", "3"], "--json"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--temper", "1"], "--temper"),
        (["--dtype", "int8"], "dtype must be"),
        (["--kv-memory", "much"], "'much' is no amount of memory"),
        (["--chunk", "0"], "chunk must be"),
        (["--top-p"], "expected one argument"),
        (["--raw", "--system", "x"], "--system goes through the chat template"),
        (["--tools", "/nowhere/tools.json"], "/nowhere/tools.json"),
        (["-p", "again"], "two prompts"),
    ],
)
def test_bad_flags_need_no_model(cli, flags, said):
    assert said in cli("generate", "-m", "no-such-model", "hello", *flags).refused(2)


@pytest.mark.parametrize("command", [["fly"], ["--fly"], ["info", "--fly"], ["pull"], ["chat", "--top-p", "2"]])
def test_bad_commands(cli, command):
    cli(*command).refused(2)


def test_nothing_asked_prints_the_commands(cli):
    result = cli()
    assert result.code == 2 and "generate" in result.out
    assert cli("--help").code == 0 and cli("generate", "--help").code == 0
    assert cli("--version").out.startswith("mlxrt ")


@pytest.mark.parametrize("command", ["generate", "info", "pull"])
def test_unknown_model(cli, command):
    argv = ["generate", "-m", "smollm3000", "hi"] if command == "generate" else [command, "smollm3000"]
    line = cli(*argv).refused(2)
    assert "smollm3000" in line and "smollm2" in line  # what was asked and what there is


def test_offline_hub(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    line = cli("generate", "-m", "somebody/something", "--offline", "hi").refused(1)
    assert "somebody/something" in line


@pytest.mark.parametrize("flags", [("",), ("-p", ""), ()])
def test_empty_prompt(cli, folder, flags):
    assert "the prompt is empty" in cli("generate", "-m", folder, *flags).refused(2)


def test_prompt_that_is_no_utf8(cli, folder):
    line = cli("generate", "-m", folder, stdin=b"abc\xff").refused(2)
    assert "stdin is not UTF-8: byte 0xff at 3" in line
    cli("generate", "-m", folder, "lone \udcff").refused(2)  # how Python hands over an argument that is none


def test_prompt_longer_than_the_context(cli, folder):
    line = cli("generate", "-m", folder, "--max-context", 64, "--raw", "x" * 100).refused(2)
    assert "100 tokens" in line and "64" in line


def test_missing_tokenizer(cli, folder):
    (folder.path / "tokenizer.json").unlink()
    assert "tokenizer" in cli("generate", "-m", folder, "hi").refused(1)
    assert "tokenizer" in cli("chat", "-m", folder, stdin=b"hi\n").refused(1)


def test_missing_template(cli, folder):
    write_tokenizer(folder.path, template=None)
    assert "--raw" in cli("generate", "-m", folder, "hi").refused(2)
    assert cli("generate", "-m", folder, "hi", "--raw", "-n", 2).code == 0


def test_template_that_refuses(cli, folder):
    write_tokenizer(folder.path, template="{{ raise_exception('no\nsystem messages') }}")
    assert "no system messages" in cli("generate", "-m", folder, "hi").refused(1)


def test_missing_shard(cli, folder):
    names = list(weights())
    mapped = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder.path / "model.safetensors").rename(folder.path / "model-00001-of-00002.safetensors")
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    assert "model-00002-of-00002.safetensors" in cli("generate", "-m", folder, "hi").refused(1)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, (10).to_bytes(8, "little") + b"{not json}"])
def test_corrupt_safetensors(cli, folder, damage):
    (folder.path / "model.safetensors").write_bytes(damage)
    assert "model.safetensors" in cli("generate", "-m", folder, "hi").refused(1)
    cli("info", folder).refused(1)


def test_truncated_safetensors(cli, folder):
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in cli("generate", "-m", folder, "hi").refused(1)


def test_wrong_shape_names_tensor_expected_and_found(cli, folder):
    name = "model.layers.1.mlp.up_proj.weight"
    folder.store(weights() | {name: mx.zeros((64, 31))})
    line = cli("generate", "-m", folder, "hi").refused(1)
    assert name in line and "[64, 32]" in line and "[64, 31]" in line


def test_a_defect_is_logged_with_where_it_is(capsys):
    configure_logging(verbose=False, quiet=True)
    try:
        raise LookupError("planted\x1b[2J")
    except LookupError as error:
        logging.getLogger("mlxrt").error("the engine stopped", exc_info=error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the engine stopped" and lines[-1] == r"LookupError: planted\x1b[2J"
    assert any(__file__ in line for line in lines)


def test_wrong_dtype_names_tensor_expected_and_found(cli, folder):
    folder.store(weights() | {"model.norm.weight": mx.zeros((32,), mx.int32)})
    line = cli("generate", "-m", folder, "hi").refused(1)
    assert "model.norm.weight" in line and "float32" in line and "int32" in line


def test_leftover_and_missing_tensors(cli, folder):
    folder.store(weights() | {"model.extra.weight": mx.zeros((3,))})
    assert "model.extra.weight" in cli("generate", "-m", folder, "hi").refused(1)
    folder.store({k: v for k, v in weights().items() if k != "model.norm.weight"})
    assert "model.norm.weight" in cli("generate", "-m", folder, "hi").refused(1)


@pytest.mark.parametrize("command", ["generate", "info"])
def test_unsupported_architecture_lists_what_is_supported(cli, folder, command):
    folder.configure(model_type="hyena")
    argv = ["generate", "-m", folder, "hi"] if command == "generate" else ["info", folder]
    line = cli(*argv).refused(1)
    assert "hyena" in line and "llama" in line and "qwen3" in line


def test_known_key_with_an_unsupported_value(cli, folder):
    folder.configure(hidden_act="gelu")
    line = cli("generate", "-m", folder, "hi").refused(1)
    assert "hidden_act" in line and "gelu" in line


@pytest.mark.parametrize("argv", [["generate", "hi", "-n", "1", "-m"], ["info"]])
def test_unknown_config_key_prints_one_line(cli, folder, argv):
    folder.configure(flux_capacitance=1.21)
    result = cli(*argv, folder)
    assert result.code == 0
    assert [line for line in result.err.splitlines() if "flux_capacitance" in line] == [
        "config.json: flux_capacitance is unknown to mlxrt and has no effect"
    ]


def test_config_without_json(cli, folder):
    (folder.path / "config.json").write_text("{" * 5000)
    assert "config.json" in cli("generate", "-m", folder, "hi").refused(1)
    (folder.path / "config.json").unlink()
    cli("info", folder).refused(1)


def test_control_characters_from_files_are_spelled_out(cli, folder):
    folder.configure(model_type="\x1b[31mred\nline")
    line = cli("generate", "-m", folder, "hi").refused(1)
    assert "\x1b" not in line


def test_a_folder_that_may_not_be_read_is_one_line(cli, folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr(loader, "resolve", refuse)
    assert cli("generate", "-m", folder, "hi").refused(1) == "mlxrt: /secret: Permission denied"


def test_a_model_larger_than_the_device_is_one_line(cli, folder, monkeypatch):
    monkeypatch.setattr(device, "memory", lambda: (4096, 1024))
    line = cli("generate", "-m", folder, "hi").refused(1)
    assert "bytes for its weights, the device has 1024 of 4096 bytes free" in line


def test_a_full_memory_is_one_line_and_a_bug_is_not(cli, folder, monkeypatch):
    def exhaust(*_, **__):
        raise RuntimeError("[metal::malloc] Unable to allocate 9 bytes")

    monkeypatch.setattr(loader, "resolve", exhaust)
    assert "out of memory" in cli("generate", "-m", folder, "hi").refused(1)

    def stumble(*_, **__):
        raise RuntimeError("broken invariant")

    monkeypatch.setattr(loader, "resolve", stumble)
    with pytest.raises(RuntimeError, match="broken invariant"):
        cli("generate", "-m", folder, "hi")


@pytest.fixture
def no_weights(monkeypatch):
    """Reading a weight is an error."""

    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mlxrt.engine.load.build", refuse)


@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
@pytest.mark.parametrize("missing", ["template", "tokenizer"])
def test_without_template_or_tokenizer_no_weight_is_read(cli, folder, tmp_path, no_weights, command, missing):
    if missing == "tokenizer":
        (folder.path / "tokenizer.json").unlink()
    (folder.path / "tokenizer_config.json").unlink()
    (tmp_path / "some.jsonl").write_text('"hello"\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    argv = {
        "generate": ["generate", "hi"],
        "chat": ["chat"],
        "batch": ["generate", "--prompts", tmp_path / "some.jsonl"],
    }
    line = cli(*argv[command], "-m", folder).refused(2 if missing == "template" else 1)
    assert "has no chat template" in line if missing == "template" else "came without a tokenizer" in line


def test_wrong_kv_and_too_little_memory_read_no_weight(cli, folder, no_weights):
    assert "kv must be one of full" in cli("generate", "-m", folder, "--kv", "q5", "hi").refused(2)
    assert "memory is limited to" in cli("generate", "-m", folder, "--memory", "100K", "hi").refused(1)
    line = cli("generate", "-m", folder, "--kv-memory", "1K", "hi").refused(1)
    assert "keys, values and states need" in line and "there are 1024; " in line
    line = cli("generate", "-m", folder, "--kv-memory", "100K", "--max-context", 4096, "hi").refused(1)
    assert "max_context 4096 does not fit: " in line
    line = cli("generate", "-m", folder, "--max-context", 5, "a longer prompt").refused(2)
    assert "the context holds 5 " in line and "raise max_context" in line


def test_a_prompt_beyond_the_model_gets_no_advice_to_raise_max_context(cli, folder):
    line = cli("generate", "-m", folder, "--raw", "x" * 5000).refused(2)
    assert "this is the model's own limit" in line and "raise max_context" not in line
    assert "raise max_context" in cli("generate", "-m", folder, "--raw", "--max-context", 50, "x" * 60).refused(2)
