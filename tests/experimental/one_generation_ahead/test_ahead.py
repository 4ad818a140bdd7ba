"""One generation ahead, compared with runs without it: prompts and their order, versions, importance weights."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from PIL import Image
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests import tiny
from tests.engines.vllm.runs import figures
from tests.engines.vllm.sampling_server import SamplingServer
from tests.tiny import these_first
from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.experimental.one_generation_ahead import ahead as ahead_module

from .helpers import adapter_by_step, assert_drawn_by, log_probabilities, make, trained_prompts, wait_until

CORRECTION = "vllm_importance_sampling_"


def test_each_batch_is_drawn_by_the_policy_of_one_generation_ago(server, tmp_path):
    trainer = make(server, tmp_path, rollouts_ahead=1, max_steps=5)
    adapters = adapter_by_step(trainer)
    trainer.train()
    for draw, step in zip(server.draws, (0, 0, 1, 2, 3), strict=True):  # five batches, and none that is not trained on
        assert_drawn_by(draw, adapters[step])
    assert figures(trainer, "sampling/staleness") == [0, 1, 1, 1, 1]
    assert max(figures(trainer, "sampling/sampling_logp_difference/mean")[:1]) < 1e-5
    # A version is sent only when nothing is in flight: never two requests, nor a sync, between a request and its end.
    for before, after in zip(server.draws, server.draws[1:], strict=False):
        assert before.ended < after.began
    assert server.events[:7] == [
        "load_lora_adapter", "completions", "completions", "load_lora_adapter", "unload_lora_adapter", "completions",
        "load_lora_adapter",
    ]  # fmt: skip
    assert "time/wait_for_server_s" in trainer.state.log_history[0]
    assert "time/server_idle_s" in trainer.state.log_history[1]


def test_without_the_option_the_engine_is_unchanged(server, tmp_path):
    trainer = make(server, tmp_path, max_steps=2)
    assert trainer.ahead is None and "generate" not in vars(trainer.vllm_generation)
    adapters = adapter_by_step(trainer)
    trainer.train()
    for step, draw in enumerate(server.draws):
        assert_drawn_by(draw, adapters[step])
    assert not figures(trainer, "sampling/staleness")


ORDERS = {
    "every step": {},
    "epochs' ends": {"max_steps": 7, "dataset": tiny.prompts(5)},  # of five prompts, two batches of two
    "a generation for two steps": {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 5},
    "steps that end with an epoch": {
        "num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 7,
        "gradient_accumulation_steps": 3, "dataset": tiny.prompts(7),
    },
}  # fmt: skip


@pytest.mark.parametrize("order", these_first(ORDERS, "every step", "steps that end with an epoch"))
def test_prompts_and_their_order_are_those_without_the_option(tmp_path, order):
    trained, asked = {}, {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            trainer = make(server, tmp_path / str(ahead), rollouts_ahead=ahead, **ORDERS[order])
            trained[ahead] = trained_prompts(trainer)
            trainer.train()
            asked[ahead] = [draw.prompts for draw in server.draws]
    assert len(trained[0]) > 1
    assert trained[1] == trained[0] and asked[1] == asked[0]


def test_another_run_of_the_same_trainer_is_drawn_ahead_too(tmp_path):
    """The first run ends in the middle of a generation, so the second begins with what is left of it, as in TRL."""
    halves = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "num_iterations": 2, "max_steps": 10}
    trained, asked = {}, {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            trainer = make(server, tmp_path / str(ahead), rollouts_ahead=ahead, **halves)
            trained[ahead] = trained_prompts(trainer)
            trainer.train()
            trainer.train()
            asked[ahead] = [draw.prompts for draw in server.draws]
    assert trained[1] == trained[0] and asked[1] == asked[0] and len(asked[0]) == 5
    assert figures(trainer, "sampling/staleness") == [0, 4]


LOSSES = {"grpo": {}, "vespo": {f"{CORRECTION}mode": "token_truncate"}}


@pytest.mark.parametrize("loss_type", these_first(LOSSES, "vespo"))
def test_losses_of_a_constant_policy_equal_those_in_turns(tmp_path, loss_type):
    changes = {
        "learning_rate": 0.0, "loss_type": loss_type, "per_device_train_batch_size": 4, "max_steps": 4,
        "gradient_accumulation_steps": 2, **LOSSES[loss_type],
    }  # fmt: skip
    losses = {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            trainer = make(server, tmp_path / str(ahead), rollouts_ahead=ahead, **changes)
            trainer.train()
        losses[ahead] = [figures(trainer, name) for name in ("loss", "grad_norm", "reward", "entropy")]
    assert any(losses[0][1])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=1e-5)


# By mode of correction: its bounds, and the steps of a generation.
WEIGHTS = {
    "token_truncate": ({"clip_max": 1.01}, 1),
    "token_mask": ({"clip_min": 0.99, "clip_max": 1.01}, 2),
    "sequence_truncate": ({"clip_min": 0.99, "clip_max": 1.01}, 2),
    "sequence_mask": ({"clip_max": 1.01}, 1),
}


@pytest.mark.parametrize("mode", these_first(WEIGHTS, "token_mask", "sequence_mask"))
def test_importance_weights_equal_the_formula(server, tmp_path, monkeypatch, mode):
    """Of the policy when a batch comes, in float64 with dense masks, and of the adapter that the server drew with."""
    bounds, steps_per_generation = WEIGHTS[mode]
    correction = {"mode": mode, **bounds}
    changes = {f"{CORRECTION}{name}": value for name, value in correction.items()}
    sizes = {"steps_per_generation": steps_per_generation, "per_device_train_batch_size": 8 // steps_per_generation}
    trainer = make(server, tmp_path, rollouts_ahead=1, max_steps=4, learning_rate=0.05, **sizes, **changes)
    adapters = adapter_by_step(trainer)
    seen = []

    def noted(self, model, inputs):
        seen.append((self.state.global_step, dict(inputs)))
        return stock(self, model, inputs)

    stock = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", noted)
    trainer.train()
    reference = get_peft_model(tiny.tiny_model(), tiny.lora()).double().eval()
    low = correction.get("clip_min", -torch.inf)
    high = correction["clip_max"]
    clipped = 0
    for step, inputs in seen:
        batch = step // steps_per_generation
        mask = inputs["completion_mask"]
        log_weights = log_probabilities(reference, adapters[batch * steps_per_generation], inputs)
        drawn_by = log_probabilities(reference, adapters[max(batch - 1, 0) * steps_per_generation], inputs)
        torch.testing.assert_close(inputs["sampling_per_token_logps"] * mask, (drawn_by * mask).float())
        log_weights = (log_weights - drawn_by) * mask
        if correction["mode"].startswith("sequence"):
            log_weights = log_weights.sum(-1, keepdim=True)
        weights = log_weights.exp()
        inside = (weights >= low) & (weights <= high)
        clipped += int((~inside).sum())
        expected = weights * inside if correction["mode"].endswith("mask") else weights.clamp(low, high)
        torch.testing.assert_close(inputs["importance_sampling_ratio"], expected.float(), rtol=0, atol=1e-5)
    assert len(seen) == 4 and clipped


def test_an_impossible_setting_names_the_line_to_change(server, tmp_path):
    refused = (
        ({"rollouts_ahead": 2}, r"rollouts_ahead=2: .* use 1"),
        ({"use_vllm": False}, r"use_vllm=False: .* vllm_mode: server"),
        ({"vllm_mode": "colocate"}, r"vllm_mode='colocate': .* vllm_mode: server"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: .* dispatch_batches: false"),
    )
    for changes, named in refused:
        with pytest.raises(ValueError, match=named):
            make(server, tmp_path, **{"rollouts_ahead": 1, **changes})
    with pytest.raises(ValueError, match="rollouts_ahead=1 does not fit A\\*-PO"):
        tiny.config(AStarPOConfig, tmp_path, rollouts_ahead=1, num_generations=1, **server.settings())


def test_a_server_that_fails_and_a_reward_that_raises(server, tmp_path):
    """The error names the server; what is in flight when a run breaks off is forgotten."""

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            server.fails = True

    trainer = make(server, tmp_path, rollouts_ahead=1, max_steps=4)
    trainer.add_callback(Fail())
    server.holds_from = 1  # the second batch is in flight when the server begins to fail
    with pytest.raises(RolloutError, match=rf"vLLM server at {server.url} .*the engine is dead"):
        trainer.train()
    assert trainer.state.global_step == 1

    server.fails = False
    server.holds_from = len(server.draws) + 1

    def raises(**_):
        wait_until(lambda: len(server.draws) > server.holds_from)  # the request is there
        raise RuntimeError("no reward today")

    trainer = make(server, tmp_path, rollouts_ahead=1, max_steps=4, reward=raises)
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.train()
    assert trainer.ahead.batch is None


def test_randomly_transformed_rows_are_those_drawn_for(server, tmp_path):
    """What was drawn ahead is never taken for other prompts than those trained on: a row is read once."""
    calls = []

    def changed(batch):
        """Rows that are others each time they are read: their prompts begin with the number of the reading."""
        calls.append(1)
        return {"prompt": [f"{len(calls)}+{prompt}" for prompt in batch["prompt"]]}

    data = Dataset.from_dict({"prompt": [str(i) for i in range(64)]})
    data.set_transform(changed)
    trainer = make(server, tmp_path, rollouts_ahead=1, max_steps=3, dataset=data)
    trained = trained_prompts(trainer)
    trainer.train()
    tokenizer = tiny.character_tokenizer()
    asked = [draw.prompts for draw in server.draws]
    assert all([tokenizer(prompt)["input_ids"] for prompt in batch[::4]] in asked for batch in trained)
    assert figures(trainer, "sampling/staleness") == [0, 1, 1]


def test_a_batch_in_flight_is_for_its_rows_images_and_settings(server, tmp_path):
    trainer = make(server, tmp_path, rollouts_ahead=1)

    def row(color):
        return {"prompt": "1+1=", "image": Image.new("RGB", (2, 2), color), "vector": np.arange(3), "answer": 2}

    asked = trainer.ahead._digest([row("red")])
    assert trainer.ahead._digest([row("red")]) == asked != trainer.ahead._digest([row("blue")])
    trainer.vllm_generation.temperature = 0.5
    assert trainer.ahead._digest([row("red")]) != asked


def test_a_slow_server_is_waited_for_and_the_log_names_who_waits(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(ahead_module, "PATIENCE", 0.05)
    monkeypatch.setattr(ahead_module.logger, "warning", lambda line, **_: lines.append(line))
    with SamplingServer(seconds=0.3) as slow:
        trainer = make(slow, tmp_path, rollouts_ahead=1, max_steps=2)
        trainer.train()
    assert lines and "rank 0" in lines[0]
    assert "the vLLM server" in lines[0] and trainer.state.global_step == 2
