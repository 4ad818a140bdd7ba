"""GRPO with a real `vllm serve`, one process and two, DDP and FSDP2 + QLoRA."""

import json
import re
from pathlib import Path

import pytest
from transformers import GenerationConfig

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import REPOSITORY, free_port, launch, run_launcher
from tests.engines.vllm.runs import figures, on_quantized, on_server
from tests.fsdp2_qlora import tiny as qlora
from trl_fsdp_qlora.engines.decode.completions import EngineModel, generate
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
from trl_fsdp_qlora.tools.evaluation.measurement import Measurement

pytestmark = pytest.mark.vllm


def test_a_server_draws_training_and_accuracy_from_the_policy(server, quantized_base, tmp_path):
    trainer = on_quantized(quantized_base[1], tmp_path, quantized=False, max_steps=3, **on_server(server.url))
    trainer.train()
    assert max(figures(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
    prefix = trainer.vllm_generation.versions.prefix
    assert [name for name in server.models() if name.startswith(prefix)] == [f"{prefix}-v3"]
    problems = qlora.prompt_data(6).map(lambda _: {"answer": "1"})
    with trainer.generating() as (model, _synced_gpus):
        assert isinstance(model, EngineModel)
        sizes = Measurement(max_new_tokens=8, samples=2, batch_size=8)
        measured = evaluate(model, trainer.processing_class, problems, sizes)
    assert measured.n == 6 and measured.tokens_per_completion > 0
    # Greedy, the server draws what the policy draws, and without the adapter what the base draws.
    ids = [trainer.processing_class(f"{i}+{i}=")["input_ids"] for i in range(4)]
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=[trainer.processing_class.eos_token_id])
    greedy.pad_token_id = trainer.processing_class.pad_token_id
    assert generate(model, ids, greedy) == generate(trainer.model, ids, greedy)
    base = EngineModel(trainer.vllm_generation.without_adapter(), trainer.model.generation_config)
    with trainer.model.disable_adapter():
        assert generate(base, ids, greedy) == generate(trainer.model, ids, greedy)


def test_another_model_behind_the_url(server, tmp_path):
    checkpoint = qlora.make_checkpoint(tmp_path / "model", hidden=128, intermediate=256, initializer_range=1.0)
    settings = {"per_device_train_batch_size": 16, **on_server(server.url)}
    trainer = on_quantized(checkpoint, tmp_path / "out", quantized=False, **settings)
    with pytest.raises(RolloutError, match=re.escape(server.url)):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_batch_drawn_ahead(server, quantized_base, tmp_path):
    settings = {"rollouts_ahead": 1, **on_server(server.url)}
    trainer = on_quantized(quantized_base[1], tmp_path, quantized=False, max_steps=3, **settings)
    trainer.train()
    assert figures(trainer, "sampling/staleness") == [0, 1, 1]
    assert figures(trainer, "sampling/sampling_logp_difference/mean")[0] < 1e-5
    prefix = trainer.vllm_generation.versions.prefix
    assert [name for name in server.models() if name.startswith(prefix)] == [f"{prefix}-v3"]


def two_ranks(way, model, out, url="", timeout=240, check=True, **environment):
    out.mkdir()
    arguments = ["tests/engines/vllm/rank.py", way, model, str(out), *([url] if url else [])]
    outputs = launch(*arguments, timeout=timeout, environment=environment, check=check)
    written = [out / f"rank{rank}.json" for rank in range(2)]
    assert all(path.is_file() for path in written), "\n".join(text[-3000:] for _, text in outputs)
    if check:  # vLLM's output while a process ends has no part in its exit code
        assert not any("Traceback" in text for _, text in outputs), "\n".join(text[-3000:] for _, text in outputs)
    return [json.loads(path.read_text()) for path in written]


def assert_synced(results, sharded):
    for rank, result in enumerate(results):
        assert result["sync"] == "adapter" and result["sharded"] == sharded and not result["synced_gpus"]
        assert result["drawn"] == [1 + rank] * (1 + rank)
    first = results[0]
    assert first["bytes"] == first["adapter_bytes"]
    differences = first["sampling/sampling_logp_difference/mean"]
    assert len(differences) == 4 and max(differences) < 1e-4


@pytest.mark.slow
def test_two_ddp_ranks(server, quantized_base, tmp_path):
    assert_synced(two_ranks("ddp", quantized_base[1], tmp_path / "out", server.url), sharded=False)


def test_two_fsdp2_ranks_with_a_4_bit_base(server, quantized_base, tmp_path):
    results = two_ranks("fsdp", quantized_base[0], tmp_path / "out", server.url, **fsdp_environment())
    assert_synced(results, sharded=True)
    assert results[0]["reason"] == "the base is quantized"


@pytest.mark.slow
def test_two_zero3_ranks(server, quantized_base, tmp_path):
    pytest.importorskip("deepspeed")
    words = ["accelerate", "--config_file", REPOSITORY / "accelerate_configs/zero3_cpu.yaml"]
    words += ["--main_process_port", free_port(), REPOSITORY / "tests/engines/vllm/rank.py"]
    run = run_launcher(*words, "zero3", quantized_base[1], tmp_path, server.url, cwd=REPOSITORY, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert_synced(results, sharded=True)
    assert results[0]["reason"] == "the base is sharded"


@pytest.mark.slow
def test_two_fsdp2_ranks_with_an_engine_each(quantized_base, tmp_path):
    environment = fsdp_environment(trl_fsdp_qlora_cache=str(tmp_path / "cache"))
    assert_synced(two_ranks("fsdp", quantized_base[0], tmp_path / "out", **environment), sharded=True)
    assert len(list((tmp_path / "cache" / "dequantized").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared", "shared_4_bits"])
def test_two_ddp_ranks_that_share_their_base_with_an_engine_each(quantized_base, tmp_path, way):
    """DDP sends rank 0's weights to all ranks when training begins, into the engines' bytes, too."""
    results = two_ranks(way, quantized_base[0 if way == "shared_4_bits" else 1], tmp_path / "out")
    assert_synced(results, sharded=False)
    assert all(result["shared"] for result in results)


@pytest.fixture
def no_segments_left():
    """vLLM's ranks unlink what they share when a process exits, which the tests' fork server leaves out: ranks after
    these would find the same names taken (errno 17)."""

    def remove():
        for segment in Path("/dev/shm").glob("-tp*-cpushm_*"):
            segment.unlink()

    remove()
    yield
    remove()


@pytest.mark.slow
def test_two_ranks_with_one_engine_over_both(quantized_base, tmp_path, no_segments_left):
    results = two_ranks("tp", quantized_base[1], tmp_path / "out")
    assert_synced(results, sharded=False)
    assert not any(result["draws_alone"] for result in results)  # so transformers drew what is not training
