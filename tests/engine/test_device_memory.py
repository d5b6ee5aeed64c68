"""A device with too little memory: a typed error with the numbers before anything is allocated, and others go on."""

import gc
import math
import weakref

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine import load as loader
from mlxrt.engine import memory as planner
from mlxrt.engine.memory import StepMemory, activation_bytes
from mlxrt.engine.weight_size import checkpoint_bytes, shape_bytes
from mlxrt.kernels import PLAIN, add_norm, device
from mlxrt.models import find
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.random_models import Shape, random_weights, shape_config
from tests.cli.conftest import folder  # noqa: F401  a fixture
from tests.support.log_lines import capture_log
from tests.support.oracle import truth
from tests.support.toy_models import KINDS, VOCAB

SHAPE = "shape:qwen3-0.6b@4bit"


class FakeDevice:
    """Has `total` bytes; free is what this process has not allocated since, and `taken` is another's."""

    def __init__(self, total):
        gc.collect()
        mx.clear_cache()
        self.total, self.taken, self.before = total, 0, mx.get_active_memory()

    def memory(self):
        return self.total, max(0, self.total - self.taken - (mx.get_active_memory() - self.before))


@pytest.fixture
def fake(monkeypatch):
    made = FakeDevice(1 << 40)
    monkeypatch.setattr(device, "memory", made.memory)
    return made


def ask(k, length, n):
    tokens = tuple((k * 37 + j * 11) % VOCAB for j in range(length))
    return Request(tokens=tokens, params=SamplingParams(max_tokens=n, ignore_eos=True))


def test_weights_larger_than_the_device_are_refused_before_they_are_made(fake, monkeypatch):
    need = shape_bytes(Shape.parse(SHAPE), mx.float32)
    fake.total = need - 1
    monkeypatch.setattr(loader, "random_weights", lambda *_, **__: pytest.fail("weights were made"))
    with pytest.raises(
        mlxrt.WontFit, match=f"needs {need} bytes for its weights, the device has \\d+ of {need - 1} bytes"
    ):
        mlxrt.load(SHAPE)
    with pytest.raises(mlxrt.WontFit, match=f"needs {need} bytes for its weights, memory is limited to {1 << 20}"):
        mlxrt.load(SHAPE, EngineConfig(memory="1M"))


def test_the_size_of_a_checkpoint_is_what_loading_it_takes(folder):  # noqa: F811
    checkpoint = FolderCheckpoint(folder.path)
    for dtype in (None, mx.float32, mx.bfloat16):
        model = loader.build(checkpoint, dtype=dtype)
        assert checkpoint_bytes(checkpoint, dtype, False) == planner.weight_bytes(model)


def test_a_checkpoint_larger_than_the_device_is_refused(fake, folder):  # noqa: F811
    fake.total = checkpoint_bytes(FolderCheckpoint(folder.path), mx.float32, False) - 1
    with pytest.raises(mlxrt.WontFit, match=rf"the device has \d+ of {fake.total} bytes free"):
        mlxrt.load(str(folder))


def test_a_device_that_is_full_all_the_same_is_a_typed_error_and_its_memory_is_freed(fake, folder, monkeypatch):  # noqa: F811
    held = []

    def fill(model, config):
        held.append(weakref.ref(model))
        raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")

    monkeypatch.setattr(loader, "prepare_model", fill)
    with pytest.raises(mlxrt.WontFit, match=r"out of memory\); without it \d+ of \d+ bytes are free") as caught:
        mlxrt.load(str(folder))
    gc.collect()
    assert held[0]() is None, "the error keeps the model alive"
    assert caught.value.exit_code == 1


def test_a_second_engine_in_too_little_memory(fake):
    model = KINDS["full"]()
    first = Engine(model)
    fake.taken = fake.total - 100_000 - (mx.get_active_memory() - fake.before)
    with pytest.raises(mlxrt.WontFit, match=r"needs \d+ bytes beside the KV cache, the device has \d+ of \d+"):
        Engine(model)
    assert first.generate(ask(1, 9, 5)).tokens == truth(model, ask(1, 9, 5).tokens, 5)


def test_a_step_is_as_long_as_the_device_allows(fake):
    model = KINDS["full"]()
    need = {n: activation_bytes(model, model.cache_specs(), n, 4, 0) for n in (64, 128)}
    fake.total, fake.before = need[64] + need[128], mx.get_active_memory()  # half of it is for the KV cache
    with Engine(model, EngineConfig(chunk=128, max_running=4)) as engine:
        assert engine.stats().chunk == 64


@pytest.mark.parametrize("kind", ["full", "gemma", "hybrid"])
def test_pools_grow_only_as_far_as_the_device_allows(fake, kind):
    model, lines = KINDS[kind](), capture_log("the KV cache stays")
    with Engine(model, EngineConfig(max_running=4, prefix_cache=False, kv_memory="64M", chunk=64)) as engine:
        allocated = engine.stats().kv_allocated
        engine.core.pools.reserve = lambda tokens: 0
        fake.taken = fake.memory()[1] - allocated - 4096  # one more layer and a little: no room to double
        short, long = ask(1, 20, 12), ask(2, 400, 5)
        assert engine.generate(short).tokens == truth(model, short.tokens, 12)
        with pytest.raises(mlxrt.WontFit, match=r"more blocks take \d+ bytes, the device has \d+ of \d+ bytes free"):
            engine.generate(long)
        assert len(lines) >= 1 and "bytes free" in lines[0]
        assert engine.generate(short).tokens == truth(model, short.tokens, 12)  # the next request is answered
        four = [ask(k, 20, 12) for k in range(4)]
        assert [d.tokens for d in engine.generate(four)] == [truth(model, r.tokens, 12) for r in four]
        fake.taken = 0  # the neighbour has gone
        assert engine.generate(long).tokens == truth(model, long.tokens, 5)


def test_a_prefill_step_is_as_long_as_what_is_free_allows(fake, monkeypatch):
    """Memory that another program took after loading: shorter steps, then a typed error; never the device's own."""
    model, lengths = KINDS["full"](), []
    monkeypatch.setattr(planner, "FILL_RATE", math.inf)  # the other program is quick
    with Engine(model, EngineConfig(max_running=4, prefix_cache=False, kv_memory="64M", chunk=128)) as engine:
        step, before = StepMemory(model, model.cache_specs(), 4, fake.total), mx.get_memory_limit()
        engine.core.scheduler.fit_prefill = step.fit  # as on a GPU
        launch = engine.core.runner.launch
        engine.core.runner.launch = lambda step: lengths.append(step.num_tokens) or launch(step)
        engine.core.pools.reserve = lambda tokens: 0
        engine.generate(ask(1, 120, 2))  # pools and tails are there
        long = ask(2, 120, 2)
        lengths.clear()
        fake.taken = fake.memory()[1] - step.bytes_of(40, 0, 120)
        assert engine.generate(long).tokens == truth(model, long.tokens, 2)
        assert 16 <= max(lengths) <= 64  # a tail was freed meanwhile
        assert mx.get_memory_limit() < mx.get_active_memory() + step.bytes_of(128)  # MLX waits before it overflows
        fake.taken = fake.total
        with pytest.raises(
            mlxrt.WontFit, match=r"a step of \d+ tokens takes \d+ bytes, the device has \d+ of \d+ bytes free"
        ):
            engine.generate(ask(3, 120, 2))
        fake.taken = 0  # the next one is answered
        assert engine.generate(long).tokens == truth(model, long.tokens, 2)
    assert mx.get_memory_limit() == before


@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
def test_a_step_needs_the_keys_that_its_attention_gathers(kind, fake):
    """Of one layer with all of a prompt, or with what a window sees; a pool leaves that free when it grows."""
    model = KINDS[kind]()
    specs = model.cache_specs()
    step = StepMemory(model, specs, 4, fake.total)
    assert step.key_bytes(16, 0) == 0
    paged = [spec for spec in specs if getattr(spec, "paged", False)]
    seen = {spec: 320 if spec.window is None else min(320, spec.window + 16) for spec in paged}
    expected = max(-(-n // spec.size) * spec.nbytes() for spec, n in seen.items())
    assert step.key_bytes(16, 320) == planner.KV_BUFFERS * expected
    assert step.bytes_of(16, 2, 320) == step.bytes_of(16, 2) + step.key_bytes(16, 320)
    with Engine(model, EngineConfig(max_running=4, max_context=400, kv_memory="64M", chunk=16)) as engine:
        reserve = engine.core.pools.reserve
        assert reserve(320) - reserve(0) == step.key_bytes(16, 320)
        assert reserve(1 << 20) == reserve(400)  # no sequence is longer
        engine.core.scheduler.fit_prefill = step.fit
        fake.taken = fake.memory()[1] - step.bytes_of(16, 1, 64) + fake.taken
        with pytest.raises(mlxrt.WontFit, match=r"a step of 16 tokens takes \d+ bytes, the device has \d+ of \d+"):
            fake.taken += step.bytes_of(16, 1, 64)
            engine.generate(ask(1, 60, 3))
        fake.taken = 0
        assert engine.generate(ask(1, 60, 3)).tokens == truth(model, ask(1, 60, 3).tokens, 3)


def test_a_short_prompt_needs_the_logits_of_its_own_rows(fake, monkeypatch):
    """Not those of as many rows as may run: a device with little memory left still answers."""
    monkeypatch.setattr(planner, "FILL_RATE", math.inf)
    model = KINDS["full"]()
    step = StepMemory(model, model.cache_specs(), 64, fake.total)
    before = mx.get_memory_limit()
    try:
        for tokens, decoding in ((20, 0), (20, 5), (63, 1), (100, 64)):
            need = step.bytes_of(tokens, decoding)
            assert need == tokens * step.token + min(tokens + decoding, 64) * step.logits + step.dense * (tokens > 64)
            fake.taken = fake.memory()[1] - need + fake.taken
            assert step.fit(tokens, decoding) == (tokens, "")
            fits, short = step.fit(2048, decoding)
            assert fits in (tokens, 64) and "2048 tokens" in short
        assert step.bytes_of(20) < 20 * step.token + 64 * step.logits
    finally:
        mx.set_memory_limit(before)


def test_what_is_dequantised_for_a_step(monkeypatch):
    """The largest matrix but embeddings and the head, twice; on CUDA all of several layers."""
    small = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = shape_config("qwen3-0.6b") | small | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640}
    model = find(raw)(find(raw).parse(raw))
    random_weights(model, 4, mx.bfloat16)
    layer = 64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 3 * 64 * 192  # attention's, and the three of the MLP
    assert not StepMemory(model, model.cache_specs(), 4, 1 << 40).dense  # a CPU unpacks a tile at a time
    monkeypatch.setattr(device, "backend", lambda: "metal")
    assert StepMemory(model, model.cache_specs(), 4, 1 << 40).dense == 2 * 2 * 64 * 192
    monkeypatch.setattr(device, "backend", lambda: "cuda")
    assert StepMemory(model, model.cache_specs(), 4, 1 << 40).dense == planner.LAYERS_AHEAD * 2 * layer


def test_the_device_is_asked_as_often_as_its_memory_could_be_taken(fake, monkeypatch):
    model, now, asked = KINDS["full"](), [100.0], []
    step = StepMemory(model, model.cache_specs(), 4, fake.total)
    monkeypatch.setattr(planner.time, "monotonic", lambda: now[0])
    memory = fake.memory
    monkeypatch.setattr(device, "memory", lambda: asked.append(now[0]) or memory())
    spare = fake.memory()[1] - step.bytes_of(64)
    before = mx.get_memory_limit()
    try:
        for later in (0.0, 0.5, 0.6):
            now[0] = 100.0 + later * spare / planner.FILL_RATE
            assert step.fit(64) == (64, "")
        assert len(asked) == 1
        now[0] = 100.0 + 1.01 * spare / planner.FILL_RATE
        fake.taken = fake.total
        assert step.fit(64)[0] == 0 and len(asked) > 1
        count = len(asked)
        assert step.fit(64)[0] == 0 and len(asked) > count  # what is short is looked for at every step
    finally:
        mx.set_memory_limit(before)


def test_running_sequences_wait_for_each_other_where_pools_cannot_grow(fake):
    """Preempted and resumed, never failed: each fits alone."""
    model = KINDS["full"]()
    with Engine(model, EngineConfig(max_running=4, kv_memory="64M", chunk=64)) as engine:
        engine.core.pools.reserve = lambda tokens: 0
        fake.taken = fake.memory()[1] - engine.stats().kv_allocated - 4096
        asked = [ask(k, 50, 40) for k in range(4)]
        assert [d.tokens for d in engine.generate(asked)] == [truth(model, r.tokens, 40) for r in asked]
        assert engine.stats().preemptions + engine.stats().evictions > 0


@pytest.mark.parametrize(
    "error", [RuntimeError("cudaGraphLaunch failed: out of memory"), ValueError("[matmul] shapes")]
)
def test_an_error_of_mlx_in_a_step_names_the_step_and_the_op(error, monkeypatch):
    model = KINDS["full"]()
    engine, other = Engine(model), Engine(model)
    engine.generate(ask(1, 5, 2))

    def fail(*_):
        error.add_note("in qmv(x [1, 64])")
        raise error

    monkeypatch.setattr(engine.core.runner, "launch", fail)
    words = r"in the middle of a step of 9 tokens of 1 sequence \(.*(out of memory|shapes).*, in qmv\(x \[1, 64\]\)"
    if isinstance(error, RuntimeError):
        words += r", \d+ of \d+ bytes of the device were free\)"
    with pytest.raises(mlxrt.EngineFailed, match=words) as caught:
        engine.generate(ask(2, 9, 5))
    assert caught.value.__cause__ is error
    with pytest.raises(mlxrt.EngineFailed):
        engine.generate(ask(2, 9, 5))
    assert other.generate(ask(1, 9, 5)).tokens == truth(model, ask(1, 9, 5).tokens, 5)


def test_an_error_of_mlx_while_scoring_ends_the_engine(monkeypatch):
    engine = Engine(KINDS["full"]())

    def fail(*_, **__):
        raise RuntimeError("cudaMallocAsync failed: out of memory")

    monkeypatch.setattr(engine.core.runner, "hidden", fail)
    with pytest.raises(mlxrt.EngineFailed, match="step of 3 tokens of 1 sequence"):
        engine.score((1, 2, 3))
    with pytest.raises(mlxrt.EngineFailed):
        engine.generate(ask(2, 9, 5))


@pytest.mark.parametrize("what", ["saving a state", "loading a state", "recalling a prompt from disk"])
def test_an_error_of_mlx_between_steps_ends_the_engine(what, tmp_path, monkeypatch):
    """Keys and values may be half written. Nothing reads them again, and the caller is told what failed."""
    model, asked, config = KINDS["full"](), ask(1, 70, 3), EngineConfig(disk_cache=str(tmp_path / "disk"))
    with Engine(model, config) as engine:
        engine.generate(asked)
        engine.save_state(tmp_path / "state", engine.compute_state(asked.tokens), {})

    def fail(*_):
        raise RuntimeError("cudaMallocAsync failed: out of memory")

    engine = Engine(model, config)
    acts = {
        "saving a state": lambda: engine.save_state(tmp_path / "x", engine.compute_state(asked.tokens), {}),
        "loading a state": lambda: engine.load_state(tmp_path / "state", None, lambda extra: extra),
        "recalling a prompt from disk": lambda: engine.generate(asked),
    }
    monkeypatch.setattr(engine.core.pools, "read" if "saving" in what else "apply_pending", fail)
    with pytest.raises(mlxrt.EngineFailed, match=f"in the middle of {what}.*out of memory"):
        acts[what]()
    with pytest.raises(mlxrt.EngineFailed):
        engine.generate(ask(2, 9, 5))


@pytest.mark.parametrize("kind", ["full", "gemma"])
def test_what_is_on_disk_is_recalled_as_far_as_the_device_allows(fake, kind, tmp_path):
    """Pools may be planned for more than the device has when they are to grow."""
    model, asked = KINDS[kind](), ask(1, 400, 3)
    config = EngineConfig(max_running=4, kv_memory="64M", chunk=64, disk_cache=str(tmp_path))
    with Engine(model, config) as engine:
        expected = engine.generate(asked).tokens
        engine.save_state(tmp_path / "state", engine.compute_state(asked.tokens), {})
    with Engine(model, config) as engine:
        engine.core.pools.reserve = lambda tokens: 0
        fake.taken = fake.memory()[1] - engine.stats().kv_allocated - 4096  # one more layer and a little
        with pytest.raises(mlxrt.WontFit, match=r"does not fit: .* bytes free"):
            engine.load_state(tmp_path / "state", None, lambda extra: extra)
        with pytest.raises(mlxrt.WontFit, match="bytes free"):  # it does not fit at all, recalled or not
            engine.generate(asked)
        short = ask(1, 20, 12)
        assert engine.generate(short).tokens == truth(model, short.tokens, 12)
        fake.taken = 0
        done = engine.generate(asked)
        assert done.tokens == expected and done.cached_tokens


def test_an_error_of_mlx_after_the_last_token_loses_no_answer(monkeypatch):
    model = KINDS["full"]()
    engine, lines = Engine(model), capture_log("the engine stopped")

    def fail(*_, **__):
        raise RuntimeError("cudaGraphInstantiate failed: out of memory")

    engine.generate(ask(1, 5, 2))
    flush, runner = engine.core.runner.flush, engine.core.runner
    monkeypatch.setattr(runner, "flush", lambda **given: flush(**given) if engine.core.busy else fail())
    assert engine.generate(ask(2, 9, 5)).tokens == truth(model, ask(2, 9, 5).tokens, 5)
    assert "out of memory" in lines[0] and "load it again" in lines[0]
    with pytest.raises(mlxrt.EngineFailed, match="out of memory"):
        engine.generate(ask(2, 9, 5))


def test_a_device_that_is_gone_is_logged_and_the_caller_still_gets_the_error(monkeypatch):
    engine, lines = Engine(KINDS["full"]()), capture_log("the device does not answer")

    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.core.runner, "launch", fail)
    monkeypatch.setattr(engine.core.runner, "close", fail)
    with pytest.raises(mlxrt.EngineFailed, match="illegal memory access"):
        engine.generate(ask(2, 9, 5))
    assert "restart the program" in lines[0]


def test_an_op_that_fails_says_which():
    with pytest.raises(ValueError) as caught:
        PLAIN.run(add_norm, x=mx.zeros((2, 3)), weight=mx.zeros((4,)), eps=1e-5)
    assert caught.value.__notes__ == ["in add_norm(x [2, 3], weight [4])"]
