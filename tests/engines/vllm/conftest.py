"""One engine and one server for all tests that need vLLM; without it the tests marked `vllm` are skipped."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import TORCHRUN, free_port
from tests.engines.vllm.serve import Server
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model

# Before vLLM is imported, and inherited by every process that a test starts.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: `make test-vllm` builds an environment")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(missing)


def save(folder: Path, seed: int, sharpness: float = 1.0) -> str:
    """A checkpoint of a size that vLLM's CPU kernels take."""
    tokenizer = character_tokenizer()
    model = new_model(tokenizer, seed, hidden=128, layers=2)
    model.lm_head.weight.data *= sharpness
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture(scope="session")
def another_base(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("another"), seed=1, sharpness=20.0)


@pytest.fixture(scope="session")
def quantized_base(tmp_path_factory) -> tuple[str, str]:
    """A checkpoint that is trained in 4 bits, and its dequantized copy that the server holds."""
    from tests.fsdp2_qlora import tiny
    from trl_fsdp_qlora.engines.vllm.dequantized_base import dequantized_base

    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("qlora") / "base", hidden=128, intermediate=256)
    cache = tmp_path_factory.mktemp("dequantized")
    copy = dequantized_base(tiny.load(folder), tiny.make_tokenizer(), cache, torch.float32, progress=False)
    return folder, str(copy)


@pytest.fixture(scope="session")
def server(quantized_base):
    with Server(quantized_base[1]) as running:
        yield running


ENGINES: dict = {}


@pytest.fixture
def ranks_are_forgotten():
    """TRL writes torchrun's variables for an engine in this process; any later test would be a rank with its port."""
    before = {name: os.environ.get(name) for name in TORCHRUN}
    os.environ["MASTER_PORT"] = str(free_port())  # TRL takes 29500 if it is free, and so does another worker
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def shared_engine(monkeypatch, ranks_are_forgotten):
    """`vllm.LLM` as TRL knows it hands out one engine for each checkpoint: starting one takes ten seconds."""
    from trl.generation import vllm_generation

    start = vllm_generation.LLM

    def reuse(model, **options):
        key = (model, options["dtype"])
        if key not in ENGINES:
            ENGINES[key] = start(model=model, **{**options, "max_num_seqs": 16, "max_model_len": 128})
        llm = ENGINES[key]
        for adapter in llm.llm_engine.list_loras():
            llm.llm_engine.remove_lora(adapter)
        llm.reset_prefix_cache()
        return llm

    monkeypatch.setattr(vllm_generation, "LLM", reuse)
