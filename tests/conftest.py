"""Settings of all tests, and the cases of the layers' suite."""

import gc
import os

import pytest
import torch

# the tensors of tests are small: more threads only wait for one another
torch.set_num_threads(1)
# seeds of devices that are not there would be kept for later, each with the stack of whoever has set it
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None
# PSLAYERS_TEST_DEVICE=cuda: all that tests make lies there, if they do not say where
if DEVICE := os.environ.get("PSLAYERS_TEST_DEVICE"):
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
# what is imported by now is no leak, and need not be searched for one
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What pytest has collected, and what earlier tests have imported and cached (torch's compiler), is not
    searched through again and again for leaks.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None and "case" in metafunc.fixturenames:
        cases = metafunc.cls.cases
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])
