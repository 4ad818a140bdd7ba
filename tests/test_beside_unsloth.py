"""`benchmarks/beside_unsloth.py` on a CPU, with a stand-in for Unsloth: the settings of both sides, and the table."""

import argparse
import sys
import types

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from tests.benchmark_modules import benchmark
from tests.tiny import save_tiny_model


class FastLanguageModel:
    """Unsloth's two functions, with those of their arguments (2026.10.9) that the benchmark gives; any other is an
    error.
    """

    @staticmethod
    def from_pretrained(model_name, max_seq_length, load_in_4bit, fast_inference, max_lora_rank):
        assert not load_in_4bit and not fast_inference and max_lora_rank == 16 and max_seq_length == 64
        return AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model, r, target_modules, lora_alpha, use_gradient_checkpointing, random_state):
        assert use_gradient_checkpointing == "unsloth"
        return get_peft_model(model, LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules))


def test_both_sides_train_on_the_same(tmp_path, monkeypatch):
    """Prompts, settings and LoRA are equal; every completion has the length that was asked for; the warm-up is left
    out.
    """
    monkeypatch.setitem(sys.modules, "unsloth", types.SimpleNamespace(FastLanguageModel=FastLanguageModel))
    unsloth = benchmark("beside_unsloth")
    monkeypatch.setattr(unsloth, "version", lambda package: "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"group": 2, "prompt": 6, "completion": 3, "longest": 64, "steps": 4, "four_bit": False}
    args = argparse.Namespace(model=save_tiny_model(tmp_path / "base"), **arguments)
    trainers = {}
    rows = {}
    for side, make in unsloth.TRAINERS.items():

        def keep(*arguments, side=side, make=make):
            trainers[side] = make(*arguments)
            return trainers[side]

        monkeypatch.setitem(unsloth.TRAINERS, side, keep)
        rows[side] = unsloth.measure(side, args)
    ours = trainers["ours"]
    theirs = trainers["unsloth"]
    assert type(theirs) is GRPOTrainer and type(ours) is not GRPOTrainer
    assert ours.train_dataset["prompt"] == theirs.train_dataset["prompt"]
    shapes = [{n: p.shape for n, p in t.model.named_parameters() if p.requires_grad} for t in (ours, theirs)]
    assert shapes[0] == shapes[1] and shapes[0]
    shared = set(unsloth.settings(args, "")) - {"output_dir"}
    assert [getattr(ours.args, key) for key in shared] == [getattr(theirs.args, key) for key in shared]
    for row in rows.values():
        assert row["completion_tokens"] == 3 and len(row["all_seconds"]) == 4 and row["seconds"] > 0
    table = unsloth.table(rows)
    assert "Unsloth's seconds over ours" in table
    rows["unsloth"]["completion_tokens"] = 2.5
    assert "not comparable" in unsloth.table(rows)
