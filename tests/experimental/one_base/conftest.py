"""The engine and the models of tests/engines/vllm, for the tests that share their base."""

from tests.engines.vllm.conftest import (  # noqa: F401
    another_base,
    base,
    pytest_collection_modifyitems,
    quantized_base,
    ranks_are_forgotten,
    server,
    shared_engine,
)
