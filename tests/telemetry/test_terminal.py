import io
import json
import sys

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from tests.tiny import config, digit_share, prompts, tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.recipe.small_base import character_tokenizer
from trl_fsdp_qlora.telemetry import terminal
from trl_fsdp_qlora.telemetry.terminal import TerminalCallback, completion_lines, duration, number, training_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def of_type(made, kind):
    return [callback for callback in made.callback_handler.callbacks if type(callback) is kind]


def test_durations_and_numbers():
    assert [duration(s) for s in (0.4, 3, 63, 3723)] == ["0:00", "0:03", "1:03", "1:02:03"]
    assert [number(x) for x in (0.5, 0.0, 1234.5678, 1e-5, None, float("nan"))] == [
        "0.500", "0.000", "1235", "1e-05", "-", "-",
    ]  # fmt: skip


def test_a_logging_steps_line():
    line = training_line(10, 300, {"reward": 0.71234, "accuracy": 0.955}, 0.084, 24.4)
    assert line == "step  10/300  reward 0.712  accuracy 95.5%  0.08 s/step  0:24 left"
    assert "accuracy" not in training_line(10, 300, {"reward": 0.7}, 0.1, 1)


def test_completions_from_the_lowest_to_the_highest_reward():
    asked = [[{"role": "user", "content": "1 + 1"}]] * 3
    said = [[{"role": "assistant", "content": text}] for text in ("2", "3", "x\n" + "y" * 200)]
    low, high = completion_lines(asked, said, {"exact": [1.0, 0.5, 0.0]}, 2)
    assert low.startswith('    reward 0.000  "1 + 1" → "x\\nyyy') and len(low) < 140 and low.endswith('…"')
    assert high == '    reward 1.000  "1 + 1" → "2"'
    both = completion_lines(["p"], ["c"], {"exact": [1.0], "format": [float("nan")]}, 2)
    assert both == ['    exact 1.000, format -  "p" → "c"']
    assert completion_lines([], [], {"exact": []}, 2) == []
    assert completion_lines([], [], {}, 2) == []


def test_a_run_in_a_log_file(tmp_path, capsys):
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=False, max_steps=4)
    made.train()
    made.save_state()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "\r" not in captured.out + captured.err and "it/s" not in captured.err
    block, prompt = (
        lines.index("trl-fsdp-qlora"),
        next(i for i, line in enumerate(lines) if "first training prompt" in line),
    )
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    assert block < prompt < steps[0]
    assert "  precision:            float32" in lines
    assert [lines[i].split("  ")[0] for i in steps] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert all("reward" in lines[i] and "s/step" in lines[i] and len(lines[i]) < 100 for i in steps)
    assert lines[steps[0] + 1].startswith("    reward ") and "→" in lines[steps[0] + 1]
    assert not any("{" in line for line in lines)
    assert lines[-1].startswith("trained to step 4 in ")
    # What the line leaves out is where TRL puts it.
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert {"loss", "grad_norm", "completions/mean_length", "time/generate_s"} <= set(history[0])


def test_the_first_prompt_is_what_the_model_reads(tmp_path, capsys):
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=1)
    made.train()
    out = capsys.readouterr().out
    tokenizer = character_tokenizer()
    ids = tokenizer.apply_chat_template(prompts()[0]["prompt"], add_generation_prompt=True, return_dict=False)
    assert f"the first training prompt, {len(ids)} tokens:\n    {tokenizer.decode(ids)}".rstrip() in out


def test_completions_can_be_switched_off_and_give_way_to_trls_table(tmp_path, capsys):
    for more in ({"show_completions": 0}, {"log_completions": True}):
        trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=2, **more).train()
        assert "→" not in capsys.readouterr().out


def test_completions_are_shown_some_ten_times_in_a_run():
    class State:
        is_world_process_zero, global_step, max_steps = True, 0, 100

    shown, state = [], State()
    callback = TerminalCallback(False, lambda: shown.append(state.global_step) or [])
    callback.on_train_begin(None, state, None)
    for _ in range(state.max_steps):
        callback.on_step_begin(None, state, None)
        state.global_step += 1
        callback.on_step_end(None, state, None)
        callback.on_log(None, state, None, logs={"loss": 0.0, "reward": 1.0})
    assert shown == list(range(1, 101, 10))


def test_the_time_left_begins_with_the_first_step(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])

    class State:
        is_world_process_zero, global_step, max_steps = True, 0, 10

    state, callback = State(), TerminalCallback(False, list)
    callback.on_train_begin(None, state, None)
    now[0] += 1000  # accuracy before training
    for seconds in (2, 4):
        callback.on_step_begin(None, state, None)
        now[0] += seconds
        state.global_step += 1
        callback.on_step_end(None, state, None)
        now[0] += 5  # accuracy between steps is no step, but what is left will have it again
    callback.on_log(None, state, None, logs={"loss": 0.0, "reward": 1.0})
    assert capsys.readouterr().out == "step  2/10  reward 1.000  3.00 s/step  1:04 left\n"


def test_under_a_bar_in_a_terminal(tmp_path, monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=False)
    made.train()
    assert "step 3/3" in out.getvalue() and "3/3 [" in err.getvalue()


@pytest.mark.parametrize("disable_tqdm", [True, False])
@pytest.mark.parametrize("kind", [PrinterCallback, ProgressCallback])
def test_removing_trls_callback_silences_a_run(kind, disable_tqdm, tmp_path, capsys):
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=disable_tqdm, max_steps=1)
    assert not of_type(made, PrinterCallback) and not of_type(made, ProgressCallback)
    made.remove_callback(kind)
    made.train()
    assert "step 1/1" not in capsys.readouterr().out


def test_what_a_user_brings_stays(tmp_path, capsys):
    class Mine(TrainerCallback):
        pass

    for brought, stays in ((PrinterCallback, PrinterCallback), (Mine(), Mine)):
        made = EfficientGRPOTrainer(
            tiny_model(),
            digit_share,
            config(EfficientGRPOConfig, tmp_path, max_steps=1),
            prompts(),
            processing_class=character_tokenizer(),
            callbacks=[brought],
        )
        assert of_type(made, stays)
        assert bool(of_type(made, TerminalCallback)) == (stays is Mine)


def test_a_users_own_figures_and_evaluation(tmp_path, capsys):
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=1)
    made.log({"mine": 0.25})
    made.eval_dataset = prompts(8)
    made.evaluate()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0: mine 0.250"
    assert lines[-1].startswith("step 0: eval_reward 0.") and "eval_loss" in lines[-1] and len(lines[-1]) < 100
