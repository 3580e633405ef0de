"""What the tests of one example share."""

from types import ModuleType

import pytest

from .loading import load_example, need_packages


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> ModuleType:
    """The example that the test's file is named after."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    need_packages(name)
    return load_example(name)
