"""Settings as users write them, and whatever is done beside the maths raising: training and checkpoints go on."""

import numpy as np
import pytest
import torch
from transformers import BitsAndBytesConfig
from trl import GRPOConfig

from tests.tiny import character_tokenizer, lora, new_model, prompts, save_tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints import checkpoints
from trl_fsdp_qlora.run import nonfatal
from trl_fsdp_qlora.telemetry.terminal import use_terminal

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
AS_USERS_WRITE = {
    "dtype": {"model_init_kwargs": {"dtype": torch.bfloat16}},
    "device": {"model_init_kwargs": {"device_map": {"": torch.device("cpu")}}},
    "numpy": {"learning_rate": np.float64(1e-3), "beta": np.float32(0.25), "max_grad_norm": np.int64(1)},
    "quantized": {
        "model_init_kwargs": {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        }
    },
}


@pytest.mark.parametrize("written", AS_USERS_WRITE)
@pytest.mark.parametrize("config_class", [EfficientGRPOConfig, GRPOConfig])
def test_a_config_as_users_write_it_trains_saves_and_resumes(tmp_path, written, config_class, caplog):
    base = save_tiny_model(tmp_path / "base")
    if written == "quantized":
        pytest.importorskip("bitsandbytes")
        new_model(character_tokenizer(), 0, hidden=64, layers=2).save_pretrained(base)  # bitsandbytes' block on a CPU

    def build(**changes):
        # A new dictionary: transformers replaces the objects in it by texts when it writes the config down.
        settings = {
            name: dict(value) if isinstance(value, dict) else value for name, value in AS_USERS_WRITE[written].items()
        }
        return trainer(
            EfficientGRPOTrainer, config_class, tmp_path / "out", base, lora(), **{**SAVING, **settings, **changes}
        )

    made = build()
    made.train()
    made.save_model()
    made.create_model_card()
    for folder in ("out", "out/checkpoint-1", "out/checkpoint-2"):
        assert "## Quick start" in (tmp_path / folder / "README.md").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert {"dtype": "dtype: bfloat16", "device": ": cpu", "numpy": "beta: 0.25", "quantized": "load_in_4bit: true"}[
        written
    ] in card
    resumed = build(max_steps=3)
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 3
    assert "generated anew" not in caplog.text and "the run goes on" not in caplog.text


def raises(*_arguments, **_named):
    raise TypeError("cannot represent an object")


BESIDE = {
    "card": "trl_fsdp_qlora.publishing.card.changed_arguments",
    "memory": "trl_fsdp_qlora.telemetry.phases.PeakMemory.read",
    "deferred": "trl_fsdp_qlora.telemetry.phases.AsyncMetrics.flush",
    "peaks": "trl_fsdp_qlora.telemetry.phases.PhaseTimer.drain_peaks",
    "start-up": "trl_fsdp_qlora.telemetry.startup.startup_block",
    "prompt": "trl_fsdp_qlora.telemetry.startup.first_prompt",
    "line": "trl_fsdp_qlora.telemetry.terminal._duration",
    "completions": "trl_fsdp_qlora.telemetry.terminal.completion_lines",
    "logits": "trl_fsdp_qlora.publishing.logits.few_logits",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_what_is_done_beside_the_maths_may_fail(tmp_path, monkeypatch, caplog, beside):
    monkeypatch.setattr(nonfatal, "_warned", set())
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora(), dataset=prompts(8), **SAVING
    )
    use_terminal(made)
    monkeypatch.setattr(BESIDE[beside], raises)
    made.train()
    made.save_model()
    assert made.state.global_step == 2
    assert [checkpoints.why_incomplete(tmp_path / f"checkpoint-{step}") for step in (1, 2)] == [None, None]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    said = [record for record in caplog.records if "the run goes on" in record.message]
    assert len({record.message for record in said}) == len(said) >= 1
    assert "cannot represent an object" in caplog.text
