"""Compiled modules of MLX, handed from process to process (bench/gpu/modules.py): whole ones only."""

import os

import pytest

from bench.gpu.modules import SUFFIXES, ModuleFolders

LONG = "x" * 245 + "/rest"


def write(folder, name, suffixes=SUFFIXES, age=10.0, content="text"):
    for suffix in suffixes:
        path = folder / (name + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (path.stat().st_mtime - age,) * 2)


def modules_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def folders(tmp_path):
    write(tmp_path / "source", "old")
    return ModuleFolders(tmp_path / "source", tmp_path / "parts", 3)


def test_each_begins_with_what_there_was(folders, tmp_path):
    for part in folders.parts:
        assert modules_in(part) == ["old.cu", "old.ptx", "old.txt"]


@pytest.mark.parametrize("name", ["new", LONG])
def test_a_finished_module_reaches_all_and_the_source(folders, tmp_path, name):
    write(folders.parts[1], name)
    assert folders.share() == 1 and folders.share() == 0
    for folder in (tmp_path / "source", *folders.parts):
        assert {f"{name}{suffix}" for suffix in SUFFIXES} <= set(modules_in(folder))


@pytest.mark.parametrize("suffixes", [(".ptx",), (".ptx", ".txt"), (".ptx", ".cu")])
def test_a_module_that_is_being_written_waits_until_it_is_whole(folders, suffixes):
    write(folders.parts[0], "new", suffixes)
    assert folders.share() == 0 and "new.ptx" not in modules_in(folders.parts[1])
    write(folders.parts[0], "new")
    assert folders.share() == 1
    assert {"new.cu", "new.txt", "new.ptx"} <= set(modules_in(folders.parts[1]))


def test_one_written_just_now_or_empty_waits(folders):
    write(folders.parts[0], "young", age=0)
    write(folders.parts[0], "empty", content="")
    assert folders.share() == 0


def test_what_a_process_has_itself_stays(folders):
    write(folders.parts[0], "new", content="one")
    write(folders.parts[2], "new", content="another")
    folders.share()
    assert [(part / "new.ptx").read_text() for part in folders.parts] == ["one", "one", "another"]
