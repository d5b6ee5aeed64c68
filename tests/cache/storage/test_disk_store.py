"""Prefixes on disk: what a new process finds again, and what it must never use."""

import random
import threading

import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.cache.memory import QuantizedKV
from mlxrt.cache.storage import DiskStore, disk_store
from mlxrt.cache.storage.record import node_keys
from tests.support.oracle import truth
from tests.support.toy_models import KINDS, VOCAB, make

from ...support.log_lines import capture_log

TEXT = tuple((7 * i * i + 3 * i) % VOCAB for i in range(70))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def log_lines():
    return capture_log()


@pytest.fixture
def open_engine(tmp_path, log_lines):
    def make_engine(model, **options):
        options = {"disk_cache": str(tmp_path / "store"), "chunk": 16} | options
        return Engine(model, EngineConfig(**options))

    return make_engine


def ask(engine, prompt, n=4):
    return engine.generate(Request(tokens=prompt, params=SamplingParams(max_tokens=n)))


def resumable_length(model, n):
    """How much of n known tokens lies in full nodes that every layer can be resumed at."""
    size = 8 if any(spec.stride == 8 for spec in model.cache_specs() if not getattr(spec, "paged", True)) else 4
    size = max([size, *(spec.size for spec in model.cache_specs() if getattr(spec, "paged", False))])
    return n // size * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_goes_on_where_the_last_one_was(kind, open_engine, tmp_path, log_lines):
    model = KINDS[kind]()
    with open_engine(model) as engine:
        first = ask(engine, TEXT[:40], 8)
        assert first.cached_tokens == 0
        longer = (*TEXT[:40], *first.tokens, 30, 31)
    with open_engine(model, disk_cache=None) as engine:
        ask(engine, TEXT[:40], 8)
        in_memory = ask(engine, longer).cached_tokens
    for prompt, known in ((longer, 47), ((*TEXT[:29], 1, 2), 29), ((*TEXT[:9], 3), 9)):
        with open_engine(model) as engine:
            done = ask(engine, prompt)
            assert done.tokens == truth(model, prompt, 4)
            assert resumable_length(model, known) <= done.cached_tokens <= known
            if known == 47:
                assert done.cached_tokens >= resumable_length(model, in_memory)
            stats = engine.stats().disk
            assert stats.corrupt == 0 and stats.hits == bool(resumable_length(model, known))
            engine.core.prefix_cache.clear()
            assert [g.pool.used for g in engine.core.pools.groups] == [0] * len(engine.core.pools.groups)
    assert log_lines == []


@pytest.mark.parametrize("kind", ["gemma", "rotating-keep", "everything", "q8"])
def test_recalled_beside_running_requests_in_a_pool_that_is_too_small(kind, open_engine):
    """Recall takes blocks from what is evicted, while other sequences decode and have tails that were not written."""
    rng, model = random.Random(kind), KINDS[kind]()
    place = sum(s.nbytes() for s in model.cache_specs() if hasattr(s, "nbytes"))
    stems = [tuple(rng.randrange(VOCAB) for _ in range(k)) for k in (24, 33, 41)]
    with open_engine(model) as engine:
        for stem in stems:
            ask(engine, stem, 3)
    with open_engine(model, kv_memory=36 * place, max_running=3, ahead=2) as engine:
        streams, want = {}, {}
        for i in range(9):
            prompt = (*rng.choice(stems)[: rng.randrange(8, 30)], rng.randrange(VOCAB), i)
            stream = engine.stream(Request(tokens=prompt, params=SamplingParams(max_tokens=9)))
            streams[stream], want[stream] = [], prompt
            for running in list(streams):
                for _ in range(rng.randrange(1, 4)):
                    if running.ids:
                        streams[running].append(next(running).token)
        for stream, tokens in streams.items():
            tokens += [event.token for event in stream]
            assert tuple(tokens) == truth(model, want[stream], 9)
        assert engine.stats().disk.hits > 0
        assert engine.stats().evictions > 0


def test_two_questions_over_one_document(open_engine):
    """A Gemma-shaped model, window 32, blocks of 32: the document is computed once, ever."""
    model = make("wf", size=32, window=32)
    document = tuple((5 * i * i + i) % VOCAB for i in range(540))
    questions = [(*document, 11, 12, 13), (*document, 21, 22)]
    cold = [ask(Engine(model), q, 6).tokens for q in questions]
    with open_engine(model, chunk=512) as engine:
        ask(engine, questions[0], 6)
        again = ask(engine, questions[1], 6)
        assert again.cached_tokens >= 512 and again.tokens == cold[1]
    for question, want in zip(questions, cold):
        with open_engine(model, chunk=512) as engine:
            done = ask(engine, question, 6)
            assert done.cached_tokens >= 512 and done.tokens == want
    assert cold[1] == truth(model, questions[1], 6)


def test_other_models_kinds_and_bits_miss(open_engine, tmp_path):
    base = make("wf")
    with open_engine(base) as engine:
        ask(engine, TEXT)
        written = engine.stats().disk.records
        assert written == (len(TEXT) + 3) // 4
    other = make("wf")
    other.model.layers[0].mlp.down_proj.weight = other.model.layers[0].mlp.down_proj.weight * 1.5
    changed = [other, make("f"), make("wf", window=9), make("wf", codec=QuantizedKV(8, 8)), make("wf", size=8)]
    changed.append(make("wf", codec=QuantizedKV(8, 4)))
    for model in changed:
        with open_engine(model) as engine:
            done = ask(engine, TEXT)
            assert done.cached_tokens == 0 and done.tokens == truth(model, TEXT, 4)
            stats = engine.stats().disk
            assert (stats.hits, stats.corrupt, stats.evicted) == (0, 0, 0)
    with open_engine(base) as engine:
        assert ask(engine, TEXT).cached_tokens == len(TEXT) // 4 * 4 and engine.stats().disk.records == written
        engine.core.disk.clear()
        assert engine.stats().disk.records == 0 and engine.stats().disk.nbytes > 0  # the others' stay


def test_budget_keeps_the_beginnings_of_what_was_used_last(open_engine, tmp_path):
    model = make("f")
    with open_engine(model) as engine:
        ask(engine, TEXT)
        per_record = engine.stats().disk.nbytes // engine.stats().disk.records
        engine.core.disk.clear()
    limit = 30 * per_record
    prompts = [(i, *TEXT) for i in range(4)]
    with open_engine(model, disk_cache_bytes=limit) as engine:
        for text in prompts:
            ask(engine, text)
            assert sum(p.stat().st_size for p in tmp_path.glob("store/*/*-*.safetensors")) <= limit
        assert engine.stats().disk.evicted > 0 and engine.stats().disk.nbytes <= limit
    with open_engine(model, disk_cache_bytes=limit) as engine:
        assert ask(engine, prompts[3]).cached_tokens == 68
    with open_engine(model, disk_cache_bytes=limit) as engine:
        assert ask(engine, prompts[0]).cached_tokens == 0
    with open_engine(model, disk_cache_bytes=5 * per_record) as engine:  # less than one text: its beginning is kept
        ask(engine, (90, *TEXT))
        assert 0 < engine.stats().disk.records <= 5
    with open_engine(model, disk_cache_bytes=5 * per_record) as engine:
        assert ask(engine, (90, *TEXT)).cached_tokens >= 8


def test_500_damaged_records_are_reported_and_none_is_used(open_engine, tmp_path, log_lines):
    model, rng = make("f"), random.Random(5)
    text = tuple(rng.randrange(VOCAB) for _ in range(2001))
    with open_engine(model, chunk=512) as engine:
        want = ask(engine, text, 1).tokens
    files = sorted(tmp_path.glob("store/*/*-*.safetensors"))
    assert len(files) == 500
    for file in files:
        data = bytearray(file.read_bytes())
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        else:
            at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(1200)  # the header as often
            data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    with open_engine(model, chunk=512) as engine:
        done = ask(engine, text, 1)
        assert done.cached_tokens == 0 and done.tokens == want
        stats = engine.stats().disk
        assert stats.corrupt == 500 and stats.hits == 0 and stats.misses == 1
        assert engine.core.disk.verify() == 0  # replaced by what was computed anew
    assert len(log_lines) == 500 and all("not used" in line for line in log_lines)
    assert ask(open_engine(model, chunk=512), text, 1).cached_tokens == 2000


@pytest.mark.parametrize("damaged", [0, 3, 9])
def test_records_before_a_damaged_one_are_used(open_engine, tmp_path, damaged):
    model = make("f")
    with open_engine(model) as engine:
        ask(engine, TEXT)
        at = engine.core.disk.digest
    from mlxrt.cache.storage.record import node_keys

    key = node_keys(at, TEXT, 4)[damaged].digest
    [file] = tmp_path.glob(f"store/*/{key}-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with open_engine(model) as engine:
        done = ask(engine, TEXT)
        assert done.cached_tokens == 4 * damaged and done.tokens == truth(model, TEXT, 4)
        assert engine.stats().disk.corrupt == 1


def test_a_record_under_another_ones_name_is_refused(open_engine, tmp_path):
    model = make("f")
    with open_engine(model) as engine:
        ask(engine, TEXT)
        disk = engine.core.disk  # of the prompt's records, so that both are read
        files = [disk.index.path(key.digest, 1) for key in node_keys(disk.digest, TEXT, engine.core.node_size)]
        one, two = (file.read_bytes() for file in files[:2])
        files[0].write_bytes(two)
        files[1].write_bytes(one)
    with open_engine(model) as engine:
        assert ask(engine, TEXT).tokens == truth(model, TEXT, 4)
        assert engine.stats().disk.corrupt == 2


def test_files_that_vanish_and_folders_too(open_engine, tmp_path):
    """Another process may remove anything at any time."""
    model = make("wf")
    with open_engine(model) as engine:
        ask(engine, TEXT)
        engine.core.prefix_cache.clear()
        for file in tmp_path.glob("store/*/*-*.safetensors"):
            file.unlink()
        engine.core.disk.index._mtimes = {
            f: f.stat().st_mtime_ns for f in engine.core.disk.index._mtimes
        }  # not seen yet
        assert ask(engine, TEXT).tokens == truth(model, TEXT, 4)
        assert engine.stats().disk.corrupt == 0
        engine.core.prefix_cache.clear()
        for file in tmp_path.glob("store/**/*.*"):
            file.unlink()
        for folder in tmp_path.glob("store/*"):
            folder.rmdir()
        (tmp_path / "store").rmdir()
        assert ask(engine, TEXT).tokens == truth(model, TEXT, 4)
        assert engine.stats().disk.records == (len(TEXT) + 3) // 4


def test_two_engines_on_one_folder(open_engine):
    model = make("rf")
    with open_engine(model) as a, open_engine(model) as b:
        ask(a, TEXT)
        assert ask(b, TEXT).cached_tokens == 64  # what the other wrote meanwhile
        longer = (*TEXT, 5, 6, 7, 8, 9)
        want = truth(model, longer, 4)
        assert ask(a, longer).tokens == ask(b, longer).tokens == want
        assert a.stats().disk.records == b.stats().disk.records and not b.stats().disk.corrupt


def test_thinned_checkpoints_come_back_and_more_complete_records_replace_poorer(open_engine):
    model = make("rf")
    with open_engine(model) as engine:
        ask(engine, TEXT)
        recurrent = next(g for g, part in enumerate(engine.core.pools.empty_states()) if part.has_checkpoints)
        for node in engine.core.prefix_cache.full_nodes(TEXT):
            node.blocks[recurrent] = None
        assert ask(engine, TEXT[:50]).cached_tokens == 48
        engine.core.disk.clear()
        for node in engine.core.prefix_cache.full_nodes(TEXT):
            node.blocks[recurrent] = None
        engine.core.disk.save(TEXT)
        poor = engine.stats().disk.nbytes
        engine.core.prefix_cache.clear()
        assert ask(engine, TEXT).cached_tokens == 0
        assert engine.stats().disk.nbytes > poor and engine.stats().disk.records == (len(TEXT) + 3) // 4
        engine.core.prefix_cache.clear()
        assert ask(engine, TEXT).cached_tokens == 64


def test_a_folder_that_cannot_be_used(open_engine, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(mlxrt.BadRequest, match="cannot be used: "):
        open_engine(make("f"), disk_cache=str(tmp_path / "file"))
    for options in ({"disk_cache": ""}, {"disk_cache": 3}, {"disk_cache_bytes": 0}, {"disk_cache_bytes": "much"}):
        with pytest.raises(mlxrt.BadRequest):
            EngineConfig(**options)
    with pytest.raises(mlxrt.BadRequest, match="prefix_cache"):
        EngineConfig(disk_cache="x", prefix_cache=False)


def test_a_disk_that_fails_ends_no_request(open_engine, monkeypatch, log_lines):
    def full(*_):
        raise OSError(28, "No space left on device")

    model = make("f")
    with open_engine(model) as engine:
        monkeypatch.setattr("mlxrt.cache.files.os.fsync", full)
        assert ask(engine, TEXT).tokens == truth(model, TEXT, 4)
        assert ask(engine, TEXT[:20]).tokens == truth(model, TEXT[:20], 4)
    assert len(log_lines) == 1 and "No space left" in log_lines[0]


def test_steps_go_on_while_records_are_written(open_engine, monkeypatch):
    """Writing waits for a gate that opens when the other request has its answer: nothing else would open it."""
    model, gate, write = make("wf"), threading.Event(), disk_store.write_encoded
    monkeypatch.setattr(DiskStore, "save", DiskStore.save.__wrapped__)  # conftest waits for the writer
    in_time = []

    def write_late(*args, **options):
        in_time.append(gate.wait(60))
        return write(*args, **options)

    monkeypatch.setattr(disk_store, "write_encoded", write_late)
    with open_engine(model) as engine:
        ask(engine, TEXT, 1)
        again = ask(engine, TEXT, 8)  # what is queued is not queued again
        assert again.tokens == truth(model, TEXT, 8) and not engine.stats().disk.written
        gate.set()
    assert set(in_time) == {True}
    with open_engine(model) as engine:  # closing wrote what was left
        assert engine.stats().disk.records == len(in_time)
        assert ask(engine, (*TEXT, 1)).cached_tokens == resumable_length(model, len(TEXT))


def test_a_writer_that_lags_behind_is_waited_for(open_engine, monkeypatch):
    """No more is copied than a limit, and every record is written all the same."""
    monkeypatch.setattr(disk_store, "MAX_QUEUED_BYTES", 1)
    monkeypatch.setattr(disk_store, "BATCH_BYTES", 1)
    model = make("f")
    with open_engine(model) as engine:
        ask(engine, TEXT, 1)
    with open_engine(model) as engine:
        assert ask(engine, (*TEXT, 1)).cached_tokens == resumable_length(model, len(TEXT))
