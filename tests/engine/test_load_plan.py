"""What headers tell is refused before a weight is read, and the bytes they give are those that loading takes."""

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import BadRequest, EngineConfig, Request, WontFit
from mlxrt.cache.memory.kv_options import KV
from mlxrt.config import KV_KINDS
from mlxrt.engine import cpu_kernels
from mlxrt.engine import load as loading
from mlxrt.engine.load import open_model
from mlxrt.engine.memory import weight_bytes
from mlxrt.errors import NoKernel
from mlxrt.weights.random_models import published_configs
from tests.support.tiny_files import CONFIG, float_weights, write_folder, write_gguf

FILES = ("float32", "bfloat16", "8bit", "4bit", "mxfp4", "Q8_0", "Q4_1", "Q4_0", "Q5_0", "F16")
QUANTIZED = {"8bit": (64, 8), "4bit": (64, 4), "mxfp4": (32, 4, "mxfp4")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model in several formats."""
    root, weights = tmp_path_factory.mktemp("files"), float_weights()
    made = {}
    for kind in FILES:
        if kind.startswith(("Q", "F")):
            made[kind] = write_gguf(root / f"{kind}.gguf", weights, kind=kind)
            continue
        arrays, config = {}, dict(CONFIG)
        for name, array in weights.items():
            value = mx.array(array).astype(mx.bfloat16 if kind == "bfloat16" else mx.float32)
            if kind in QUANTIZED and value.ndim == 2:
                packed = mx.quantize(value, *QUANTIZED[kind])
                stem = name.removesuffix(".weight")
                arrays |= {f"{stem}.{part}": a for part, a in zip(("weight", "scales", "biases"), packed)}
            else:
                arrays[name] = value
        if kind in QUANTIZED:
            config["quantization"] = dict(zip(("group_size", "bits", "mode"), QUANTIZED[kind]))
        made[kind] = write_folder(root / kind, arrays, config)
    return made


@pytest.mark.parametrize("dequantise", [None, False, True])
@pytest.mark.parametrize("kind", FILES)
def test_planned_bytes_are_those_of_the_weights(files, kind, dequantise):
    opened = open_model(str(files[kind]), EngineConfig(dequantise=dequantise))
    with opened.load() as engine:
        taken = weight_bytes(engine.model)
        assert engine.core.memory.weights == taken
    assert opened.plan.weights == taken


def refuse_weights(*_, **__):
    raise AssertionError("a weight was read")


@pytest.fixture
def unread(monkeypatch):
    monkeypatch.setattr(loading, "build", refuse_weights)
    monkeypatch.setattr(loading, "random_weights", refuse_weights)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_beyond_the_limit_is_refused_from_its_headers(files, kind, unread):
    need = open_model(str(files[kind]), EngineConfig(dequantise=False)).plan.weights
    with pytest.raises(WontFit, match=f"needs {need} bytes for its weights, memory is limited to {need // 2}"):
        mlxrt.load(str(files[kind]), EngineConfig(memory=need // 2))


@pytest.mark.parametrize("kind", ["4bit", "Q4_1"])
def test_kernels_are_not_compiled_for_a_model_that_is_refused(files, kind, unread, monkeypatch):
    need = open_model(str(files[kind]), EngineConfig(dequantise=False)).plan.weights
    monkeypatch.setattr(cpu_kernels, "locate", refuse_weights)
    for limit in (need // 2, need + 1):
        with pytest.raises(WontFit, match=f"memory is limited to {limit}"):
            mlxrt.load(str(files[kind]), EngineConfig(memory=limit))
    with pytest.raises(BadRequest, match="max_context 20000"):
        mlxrt.load(str(files[kind]), EngineConfig(max_context=20000))


@pytest.mark.parametrize("kind", ["4bit", "mxfp4", "Q4_1"])
def test_weights_are_planned_again_where_kernels_do_not_compile(files, kind, monkeypatch):
    packed, plain = (open_model(str(files[kind]), EngineConfig(dequantise=d)).plan for d in (False, True))
    monkeypatch.setattr(cpu_kernels, "locate", lambda *_: None)
    opened = open_model(str(files[kind]), EngineConfig())
    assert opened.plan.weights == packed.weights
    with opened.load() as engine:
        assert engine.core.memory.weights == weight_bytes(engine.model) == plain.weights


@pytest.mark.parametrize("name", sorted(published_configs()))
def test_a_shape_beyond_the_limit_is_refused_from_its_config(name, unread, monkeypatch):
    monkeypatch.setattr("mlxrt.kernels.device.memory", lambda: (1 << 40, 1 << 40))
    need = open_model(f"shape:{name}@4bit", EngineConfig(memory="900G")).plan.weights
    with pytest.raises(WontFit, match=f"the weights take {need}"):
        mlxrt.load(f"shape:{name}@4bit", EngineConfig(memory=need))


def test_weights_beyond_the_machine_are_refused_without_a_limit(monkeypatch, unread):
    monkeypatch.setattr("mlxrt.kernels.device.memory", lambda: (16 << 30, 12 << 30))
    with pytest.raises(WontFit, match="shape:gemma4-31b needs 122"):
        mlxrt.load("shape:gemma4-31b", EngineConfig(dtype="float32"))


def test_weights_stay_packed_where_the_limit_is_too_low_for_plain_ones(files):
    packed, plain = (open_model(str(files["4bit"]), EngineConfig(dequantise=d)).plan for d in (False, True))
    assert packed.weights < plain.weights // 4
    limit = plain.weights + (1 << 15)
    assert not open_model(str(files["4bit"]), EngineConfig(memory=limit)).plan.dequantise
    with pytest.raises(WontFit, match=rf"packed \(dequantise off\) they take {plain.packed}"):
        open_model(str(files["4bit"]), EngineConfig(memory=plain.weights, dequantise=True))
    with mlxrt.load(str(files["4bit"]), EngineConfig(memory=limit, max_running=2)) as engine:
        assert engine.core.memory.total <= limit
        assert len(engine.generate([1, 2, 3], max_tokens=2).tokens) == 2


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"max_context": 20000}, "max_context 20000 is beyond the model's own 64 tokens"),
        ({"max_kv_size": 8}, "max_kv_size must be above 8 tokens"),
        ({"cuda_graphs": True}, "cuda_graphs does not apply: this device is cpu"),
        ({"reasoning_parser": "x"}, "reasoning_parser must be one of none, think"),
        ({"tool_parser": "x"}, "tool_parser must be one of none, hermes"),
        ({"disk_cache": "/dev/null/folder"}, "disk_cache /dev/null/folder cannot be used"),
    ],
)
def test_options_that_do_not_apply_are_refused_first(files, unread, options, reason):
    with pytest.raises(BadRequest, match=reason):
        mlxrt.load(str(files["F16"]), EngineConfig(**options))


def test_unknown_kv_kinds_are_refused_by_the_config():
    assert tuple(KV) == KV_KINDS
    with pytest.raises(BadRequest, match=r"kv must be one of full, paged, q8, .*, not 'q5'"):
        EngineConfig(kv="q5")


def test_what_this_machine_cannot_do_is_refused_before_a_model_is_looked_for():
    with pytest.raises(NoKernel, match="kernels='strict' needs a GPU"):
        mlxrt.load("no/such-model", kernels="strict")
    with pytest.raises(BadRequest, match="cuda_graphs does not apply"):
        mlxrt.load("no/such-model", cuda_graphs=True)


@pytest.mark.parametrize(
    "form, reason",
    [
        ({"type": "regex", "pattern": "("}, "regex: .*unclosed group"),
        ({"type": "json_schema", "schema": {"not": {}}}, r'json_schema: Unimplemented keys: \["not"\]'),
        ({"type": "grammar", "grammar": "start: nowhere"}, "grammar: .*nowhere"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_before_the_weights(files, unread, form, reason):
    opened = open_model(str(files["float32"]), EngineConfig())
    with pytest.raises(BadRequest, match=f"response_format of type {reason}"):
        opened.check_prompt(Request(tokens=(1,), response_format=form))
    for right in ({"type": "regex", "pattern": "a+"}, {"type": "grammar", "grammar": 'start: "a" <|nothing|>'}):
        opened.check_prompt(Request(tokens=(1,), response_format=right))  # tokens are known with the vocabulary
