"""Runs with a server that draws like vLLM's, and what they are compared by."""

import time

import torch
from transformers import TrainerCallback

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "optim": "adamw_torch", "rollouts_ahead": 1}


def make(server, folder, cls=EfficientGRPOTrainer, config=EfficientGRPOConfig, **changes):
    torch.manual_seed(0)
    settings = {"peft_config": tiny.lora(), **server.settings(), **changes}
    return tiny.trainer(cls, config, folder, **settings)


def trained_prompts(trainer) -> list:
    """To this list each generation batch of training adds its prompts."""
    batches = []
    generate = trainer._generate_and_score_completions

    def noted(inputs):
        if trainer.model.training:
            batches.append([row["prompt"] for row in inputs])
        return generate(inputs)

    trainer._generate_and_score_completions = noted
    return batches


def asked_prompts(server, per_generation: int = 2) -> list[list[list[int]]]:
    """The prompts of each generation batch that a server drew, whichever rank asked for them."""
    prompts = [prompt for draw in server.draws for prompt in draw.prompts]
    return [sorted(prompts[i : i + per_generation]) for i in range(0, len(prompts), per_generation)]


def adapter_by_step(trainer) -> dict[int, dict[str, torch.Tensor]]:
    """By the number of optimizer steps done: the adapter's weights."""
    kept = {}

    class Keep(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            kept[state.global_step] = {name: value.detach().clone() for name, value in named if "lora_" in name}

    trainer.add_callback(Keep())
    return kept


def wait_until(holds, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)


def assert_drawn_by(draw, weights) -> None:
    sent = [value for _, value in sorted(draw.weights.items())]
    assert sent
    for ours, theirs in zip([weights[name] for name in sorted(weights) if "lora_B" in name], sent, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@torch.no_grad()
def log_probabilities(model, adapter, inputs) -> torch.Tensor:
    """`(B, C)` of the completions under an adapter, each row by itself."""
    for name, value in model.named_parameters():
        if name in adapter:
            value.copy_(adapter[name])
    rows = []
    for prompt, prompt_mask, completion in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], strict=True
    ):
        ids = torch.cat([prompt[prompt_mask.bool()], completion])[None]
        logps = model(input_ids=ids).logits[0, -len(completion) - 1 : -1].log_softmax(-1)
        rows.append(logps.gather(1, completion[:, None])[:, 0])
    return torch.stack(rows)


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in trainer.model.parameters() if value.requires_grad])


class Stop(TrainerCallback):
    """Ends a run after a step, as an interrupt does."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step
