import mmap
import time

import pytest
import torch

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.run.telemetry import MIB, PhaseClock, token_counts, waste_metrics


def test_nested_phases_are_not_counted_twice():
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        time.sleep(0.02)
    metrics = clock.drain()
    assert 0.05 <= metrics["time/inner_s"] < 0.2
    assert 0.04 <= metrics["time/outer_s"] < metrics["time/inner_s"] + 0.1
    assert metrics["time/outer_s"] + metrics["time/inner_s"] >= 0.09
    assert clock.drain() == {}


def test_an_exception_closes_what_it_left_open():
    clock = PhaseClock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock.phase("outer"):
        clock.start("left open")
        _ = 1 / 0
    assert clock._open == []


def test_peak_bytes_of_a_phase():
    clock = PhaseClock(torch.device("cpu"))
    if not clock.memory.available:
        pytest.skip("no /proc/self/clear_refs here")
    with clock.phase("small"):
        pass
    # Mapped pages: malloc may serve a tensor from memory that earlier tests left resident.
    with clock.phase("large"), clock.phase("inside"), mmap.mmap(-1, 256 * MIB) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    metrics = clock.drain()
    for name in ("large", "inside"):
        assert metrics[f"memory/{name}_peak_mib"] - metrics["memory/small_peak_mib"] == pytest.approx(256, abs=40)


def test_waste_of_a_batch_by_hand():
    # two groups of two: prompts of 3 and 1 tokens, completions of 2, 4, 1, 1
    prompt_mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]])
    completion_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])
    batch = {
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0, 0.0, 0.0]),
    }
    counts = token_counts(batch, 2)
    assert counts.tolist() == [28, 16, 12, 4, 2, 8]
    metrics = waste_metrics(counts)
    assert metrics["waste/padding_share"] == pytest.approx(1 - 16 / 28)
    assert metrics["waste/prompt_redundancy"] == pytest.approx(16 / 12)
    assert metrics["waste/zero_advantage_share"] == 0.5


def test_metrics_of_a_run_and_its_start_up_block(tmp_path, capsys):
    made = trainer(
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        tmp_path,
        peft_config=lora(),
        beta=0.1,
        num_iterations=2,
        max_steps=2,
    )
    made.train()
    first = made.state.log_history[0]
    for phase in ("generate", "reward", "old_policy_pass", "reference_pass", "forward_backward", "optimizer"):
        assert first[f"time/{phase}_s"] > 0, phase
    assert first["waste/prompt_redundancy"] > 1
    assert first["throughput/tokens_per_s"] > 0
    assert made.state.log_history[1]["time/generate_s"] == 0.0  # the second iteration reuses the completions
    out = capsys.readouterr().out
    for text in (
        "8 completions in the loss = 2 prompts × 4 completions, each used 2 times",
        "2 optimizer steps, 2 prompts, 8 completions",
        "trainable parameters",
        "prefix sharing",
    ):
        assert text in out


def test_a_phase_that_a_step_did_not_have_took_none_of_its_time(tmp_path):
    # Two steps to a generation: a window's mean is per step, so phases add up to the step.
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=2, steps_per_generation=2, logging_steps=1
    )
    made.train()
    first, second = made.state.log_history[:2]
    assert first["time/generate_s"] > 0 and second["time/generate_s"] == 0.0
