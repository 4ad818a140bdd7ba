import pytest
from trl.generation import vllm_client, vllm_generation

from tests.engines.vllm.sampling_server import SamplingServer


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """TRL's client needs vLLM for what an adapter does not use."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)


@pytest.fixture
def server():
    with SamplingServer() as running:
        yield running
