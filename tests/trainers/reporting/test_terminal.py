"""What a recipe prints while it trains."""

import json
import re
import sys
from types import SimpleNamespace

from transformers import TrainerCallback

from tests.tiny import config, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.decode.completions import over_ranks
from trl_fsdp_qlora.tools.small_base import character_tokenizer
from trl_fsdp_qlora.trainers.reporting import terminal
from trl_fsdp_qlora.trainers.reporting.terminal import EfficientProgress, use_terminal


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def test_a_recipe_in_a_log_file(tmp_path, capsys):
    """The first and the last step print a line, for any last step."""
    grpo = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=False, max_steps=7, logging_steps=100
    )
    grpo.add_callback(Stop())
    use_terminal(grpo)
    grpo.eval_dataset = prompts(8)
    grpo.evaluate()
    grpo.train()
    grpo.save_state()
    captured = capsys.readouterr()
    output = captured.out.splitlines()
    evaluated, *lines = [line for line in output if "real_accelerator" not in line]  # of DeepSpeed's import
    assert evaluated.startswith("step 0: eval_loss ") and "  eval_reward 0." in evaluated
    assert "\r" not in captured.out + captured.err and "it/s" not in captured.err
    block = lines.index("trl-fsdp-qlora")
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    tokenizer = character_tokenizer()
    ids = tokenizer.apply_chat_template(prompts()[0]["prompt"], add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(ids).rstrip()
    prompt = next(i for i, line in enumerate(lines) if line.rstrip().endswith(text))
    assert block < prompt < steps[0] and str(len(ids)) in lines[prompt - 1]
    assert [lines[i].split("  ")[0] for i in steps] == ["step 1/7", "step 3/7"]
    for i in steps:
        assert "loss" in lines[i] and "reward" in lines[i] and "s/step" in lines[i] and len(lines[i]) < 100
    assert not any("{" in line for line in lines)
    assert "step 3 " in lines[-1]
    # What the line leaves out is in TRL's own places.
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert {"loss", "grad_norm", "completions/mean_length", "time/generate_s"} <= set(history[1])


def test_the_time_left_is_estimated_from_the_first_step_on(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    args = config(EfficientGRPOConfig, "unused")
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=10)
    control = SimpleNamespace(should_training_stop=False)
    callback = EfficientProgress()
    callback.on_train_begin(args, state, control)
    now[0] += 1000  # accuracy before training
    for seconds in (2, 4):
        callback.on_step_begin(args, state, control)
        now[0] += seconds
        state.global_step += 1
        callback.on_step_end(args, state, control)
    callback.on_log(args, state, control, logs={"loss": 0.0, "reward": 1.0, "accuracy": 0.955})
    (line,) = capsys.readouterr().out.splitlines()
    assert re.findall(r"\d[\d.:/%]*", line) == ["2/10", "0.000", "1.000", "95.5%", "3.00", "0:24"]


def test_quick_work_prints_a_bar_into_a_terminal_alone(monkeypatch, capsys):
    def accuracy(**metrics):
        assert over_ranks(5, 2, list, lambda batch, drawn: drawn, **metrics) == [0, 1, 2, 3, 4]
        return capsys.readouterr().err

    assert accuracy(description="accuracy") == accuracy() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "accuracy:   0%" in accuracy(description="accuracy") and accuracy() == ""


def test_a_script_has_a_recipes_lines_by_one_callback(tmp_path, capsys):
    """Given to the constructor or added later, in place of transformers' bar and dictionaries."""

    def steps(added: bool) -> list[str]:
        grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=False, max_steps=2)
        if added:
            grpo.add_callback(EfficientProgress())
        else:
            use_terminal(grpo)
        grpo.train()
        captured = capsys.readouterr()
        assert "it/s" not in captured.err and "{'loss'" not in captured.out
        lines = [line for line in captured.out.splitlines() if line.startswith("step ")]
        return [line.partition(" s/step")[0].rpartition("  ")[0] for line in lines]  # without the seconds

    assert steps(added=True) == steps(added=False)
