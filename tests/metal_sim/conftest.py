"""The simulator's own tests need a C++ compiler; where there is none they say so."""

import pytest

from .findings import NoCompiler
from .toolchain import compiler


def pytest_collection_modifyitems(items):
    try:
        compiler()
    except NoCompiler as reason:
        for item in items:
            if "tests/metal_sim" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=str(reason)))
