import gc
import os
import signal
from pathlib import Path

import pytest

import tests.do_once  # noqa: F401

# Before torch is imported, and inherited by every process a test starts: two processes with two threads each on two
# cores spend their time waiting for each other (dev/LOG.md), and sums do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs the Hub; looking for it without a network takes seconds each time.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="K/N: of the tests that are left every Nth, from the Kth on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep a part of the tests, after those of another mark have gone."""
    number, parts = map(int, config.getoption("--part").split("/"))
    kept = items[number - 1 :: parts]
    others = items.copy()
    del others[number - 1 :: parts]
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """`Trainer.train` collects garbage, which takes half a second with torch and TRL loaded, and what they import."""
    gc.collect()
    gc.freeze()


def _named_by(variable: str, what: str) -> Path:
    """The path in an environment variable; the test is skipped if it is not set."""
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{what} is no part of the repository: name its path in {variable}")
    return Path(path).resolve()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct as a checkpoint."""
    return _named_by("TRL_FSDP_QLORA_SMOLLM2", "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def svamp() -> Path:
    """The file of the SVAMP problems."""
    return _named_by("TRL_FSDP_QLORA_SVAMP", "SVAMP.json")


@pytest.fixture
def default_handlers():
    """SIGINT and SIGTERM as a process of a terminal has them: in a shell's background SIGINT is ignored."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
