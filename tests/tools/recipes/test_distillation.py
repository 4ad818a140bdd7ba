"""The recipe of TRL's Distillation: it trains, shares prompts, and leaves a folder that is measured."""

import json

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

WORDS = (
    "--model_name_or_path base --dtype float32 --dataset sums.jsonl --held_out 10 --use_peft true --lora_r 4 "
    "--lora_target_modules all-linear --output_dir out --per_device_train_batch_size 8 --learning_rate 1e-2 "
    "--gradient_checkpointing false --bf16 false --use_cpu true --report_to none --disable_tqdm true "
    "--logging_steps 1 --save_strategy no --max_steps 2 --max_completion_length 4 --chat false "
    "--prompt_template 1+2=3,4+5=9,{question}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "base")
    save_tiny_model(tmp_path / "teacher", seed=1)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_distillation_shares_prompts_and_is_measured(folder, called, monkeypatch):
    packed = []
    answer = PromptSharing.last_hidden_states

    def count(sharing, *args):
        output = answer(sharing, *args)
        packed.append(sharing.figures.tokens < sharing.figures.padded_tokens)
        return output

    monkeypatch.setattr(PromptSharing, "last_hidden_states", count)
    words = f"{WORDS} --teacher_model_name_or_path teacher --save_strategy steps --save_steps 2"
    called("distillation", words)
    # Two steps of student and teacher.
    assert len(packed) >= 4 and all(packed[-4:])
    record = json.loads((folder / "out" / "metrics.json").read_text())
    losses = [entry["loss"] for entry in record["history"] if "loss" in entry]
    assert len(losses) == 2 and record["train_seconds"] > 0
    assert (folder / "out" / "adapter_config.json").is_file()
    called("evaluate", "--adapter out --output measured.json")  # the folder has how it is measured
    assert json.loads((folder / "measured.json").read_text())["correct"] == record["after"]["correct"]
    called("distillation", words)
    assert json.loads((folder / "out" / "metrics.json").read_text()) == record


def test_distillation_needs_a_teacher(folder, called, capsys):
    with pytest.raises(SystemExit):
        called("distillation", WORDS)
    assert "error: teacher_model_name_or_path is not set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        called("distillation", f"{WORDS} --teacher_model_name_or_path runs/theteacher")
    assert "error: teacher_model_name_or_path='runs/theteacher': there is no such folder" in capsys.readouterr().err
