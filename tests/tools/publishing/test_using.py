"""The lines of docs/publishing.md that use an adapter run unchanged, on one that a run has left, and the merged
folder answers alike.
"""

import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.tiny import config, lora, prompts, save_tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter

PAGE = (Path(__file__).parents[3] / "docs" / "publishing.md").read_text(encoding="utf-8")


def test_chat_with_the_adapter_and_the_merged_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = save_tiny_model(tmp_path / "base")
    args = config(EfficientGRPOConfig, tmp_path / "runs" / "mine", max_steps=1, learning_rate=0.1)
    reward = [lambda completions, **columns: [float(len(str(one))) for one in completions]]
    trainer = EfficientGRPOTrainer(base, reward, args, prompts(), peft_config=lora())
    trainer.train()
    trainer.save_model()
    section = PAGE.partition("## Using the result")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(compile(code, "publishing.md", "exec"), names)
    assert names["rows"].shape[1] > names["batch"]["input_ids"].shape[1]
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter("runs/mine", "runs/mine-merged", base=base)).float()
    with torch.no_grad():
        ours = names["model"](**names["batch"]).logits
        theirs = merged(**names["batch"]).logits
    torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)  # merged weights are bfloat16
