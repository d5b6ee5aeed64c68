"""A model folder small enough to be measured in a moment, and the command line in this process."""

from tests.cli.conftest import cli, folder  # noqa: F401  the same fixtures
