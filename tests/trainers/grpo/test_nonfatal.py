"""Settings as users write them, and errors in work other than the maths: training and checkpoints continue.

Covers `utils/nonfatal.py`.
"""

import numpy as np
import pytest
import torch
from transformers import BitsAndBytesConfig
from trl import GRPOConfig

from tests.tiny import character_tokenizer, lora, new_model, prompts, save_tiny_model, these_first, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.trainers.reporting.terminal import use_terminal
from trl_fsdp_qlora.trainers.saving import checkpoints
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole
from trl_fsdp_qlora.utils import nonfatal

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
# A new dictionary each time: transformers replaces the objects in it by texts when it writes the config down.
AS_USERS_WRITE = {
    "dtype: bfloat16": lambda: {"model_init_kwargs": {"dtype": torch.bfloat16}},
    ": cpu": lambda: {"model_init_kwargs": {"device_map": {"": torch.device("cpu")}}},
    "beta: 0.25": lambda: {"learning_rate": np.float64(1e-3), "beta": np.float32(0.25), "max_grad_norm": np.int64(1)},
    "load_in_4bit: true": lambda: {
        "model_init_kwargs": {
            "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        }
    },
}


@pytest.mark.parametrize(
    "config_class, on_card",
    these_first(
        [*((EfficientGRPOConfig, x) for x in AS_USERS_WRITE), (GRPOConfig, "beta: 0.25")],
        (EfficientGRPOConfig, "load_in_4bit: true"),
        (GRPOConfig, "beta: 0.25"),
    ),
)
def test_a_config_as_users_write_it_trains_saves_and_resumes(tmp_path, on_card, config_class, caplog):
    base = save_tiny_model(tmp_path / "base")
    if "4bit" in on_card:
        pytest.importorskip("bitsandbytes")
        new_model(character_tokenizer(), 0, hidden=64, layers=2).save_pretrained(base)  # bitsandbytes' block on a CPU

    def build(**changes):
        settings = {**SAVING, **AS_USERS_WRITE[on_card](), **changes}
        return trainer(EfficientGRPOTrainer, config_class, tmp_path / "out", base, lora(), **settings)

    grpo = build()
    grpo.train()
    grpo.save_model()
    grpo.create_model_card()
    for folder in ("out", "out/checkpoint-1", "out/checkpoint-2"):
        assert "## Quick start" in (tmp_path / folder / "README.md").read_text()
    assert on_card in (tmp_path / "out" / "README.md").read_text()
    resumed = build(max_steps=3)
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 3
    assert nonfatal.__name__ not in {record.name for record in caplog.records}
    (changed,) = [record.message for record in caplog.records if record.name == checkpoints.__name__]
    assert changed.endswith(": max_steps: 2 -> 3")


# What fails at once; the last two would keep others from being reached.
BESIDE = [
    ("trainers.reporting.card.changed_arguments", "trainers.reporting.phases.PeakMemory.read",
     "trainers.reporting.phases.islice", "trainers.reporting.phases.PhaseTimer.drain_peaks",
     "trainers.reporting.startup.first_prompt"),
    ("trainers.reporting.startup.startup_block", "trainers.reporting.terminal._duration"),
]  # fmt: skip


@pytest.mark.parametrize("side_work", BESIDE)
def test_work_other_than_the_maths_may_fail(tmp_path, monkeypatch, caplog, side_work):
    monkeypatch.setattr(nonfatal, "_warned", set())
    settings = {"peft_config": lora(), "dataset": prompts(8), **SAVING}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **settings)
    use_terminal(grpo)
    raised = set()
    for name in side_work:

        def fail(*_arguments, name=name, **_named):
            raised.add(name)
            raise TypeError(f"cannot represent {name}")

        monkeypatch.setattr(f"trl_fsdp_qlora.{name}", fail)
    grpo.train()
    grpo.save_model()
    assert grpo.state.global_step == 2
    assert [why_not_whole(tmp_path / f"checkpoint-{step}") for step in (1, 2)] == [None, None]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / checkpoints.STAGING).exists()
    lines = [record for record in caplog.records if record.name == nonfatal.__name__]
    messages = [record.message for record in lines]
    assert not any("\n" in record.message or record.exc_info for record in lines)  # a line each, and no traceback
    assert raised == set(side_work) and len(set(messages)) == len(messages) > 1  # each is named once


@pytest.mark.parametrize("asked", [False, True])
def test_the_traceback_of_such_a_failure_is_printed_if_asked_for(monkeypatch, caplog, asked):
    monkeypatch.setattr(nonfatal, "_warned", set())
    if asked:
        monkeypatch.setenv("TRL_FSDP_QLORA_TRACEBACK", "1")
    with nonfatal.nonfatal("a card"):
        raise OSError("no space\nleft")
    (record,) = caplog.records
    assert "a card" in record.message and "OSError: no space left" in record.message
    assert bool(record.exc_info) is asked
