"""The simulator's own tests need a C++ compiler; where there is none they say so."""

from pathlib import Path

import pytest

from .findings import NoCompiler
from .toolchain import compiler

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    try:
        compiler()
    except NoCompiler as reason:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(reason)))
