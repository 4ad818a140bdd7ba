"""`rollouts_ahead: 1` and a user's own code: what a run in turns computes with it, a run ahead computes, too."""

import argparse
import asyncio

import pytest
import torch
from datasets import Dataset
from trl.generation import vllm_client, vllm_generation

from tests import tiny
from tests.engines.vllm.sampling_server import SamplingServer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

FIGURES = ("loss", "grad_norm", "reward", "mine", "completions/mean_length")


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """The server is this repository's; TRL's client asks whether vLLM is installed."""
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)


class CutsCompletions(EfficientGRPOTrainer):
    def _generate(self, prompts):
        prompt_ids, completion_ids, mask, _, logprobs, *rest = super()._generate(prompts)
        completion_ids = [ids[:2] for ids in completion_ids]
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return (prompt_ids, completion_ids, mask, texts, [values[:2] for values in logprobs], *rest)


class Counts(EfficientGRPOTrainer):
    draws = 0

    def _generate_single_turn(self, *args, **kwargs):
        self.draws += 1
        return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        return super()._calculate_rewards(*args, **kwargs) * self.draws


class LogsMetrics(EfficientGRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        self._metrics["train"]["mine"].append(float(self.state.num_input_tokens_seen >= 0))
        return super()._generate_single_turn(*args, **kwargs)


class ChangesPrompts(EfficientGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        for row in inputs:
            row["prompt"][0]["content"] += "1+"
        return super()._generate_and_score_completions(inputs)


def make(server, folder, trainer_class=EfficientGRPOTrainer, **changes):
    torch.manual_seed(0)
    settings = {"peft_config": tiny.lora(), "learning_rate": 0.0, "max_steps": 3, "rollouts_ahead": 1}
    return tiny.trainer(trainer_class, EfficientGRPOConfig, folder, **{**settings, **server.settings(), **changes})


def figures_of_a_run(folder, trainer_class, ahead: int) -> list[list[float]]:
    with SamplingServer(keeps_keys=True) as server:
        trainer = make(server, folder / str(ahead), trainer_class, rollouts_ahead=ahead)
        torch.manual_seed(1)
        trainer.train()
    return [[step.get(name, 0.0) for name in FIGURES] for step in trainer.state.log_history if "loss" in step]


@pytest.mark.parametrize("trainer_class", [CutsCompletions, Counts, LogsMetrics])
def test_a_subclass_that_draws_in_its_own_way_trains_as_in_turns(tmp_path, trainer_class):
    """The policy does not change, so the figures of both runs are equal."""
    in_turns = torch.tensor(figures_of_a_run(tmp_path, trainer_class, ahead=0))
    ahead = torch.tensor(figures_of_a_run(tmp_path, trainer_class, ahead=1))
    torch.testing.assert_close(ahead, in_turns, rtol=0, atol=1e-5)
    assert in_turns[:, 0].abs().max() > 1e-3 and (trainer_class is not LogsMetrics or in_turns[:, 3].all())


def test_an_attribute_that_a_draw_sets_is_named(tmp_path, caplog):
    class CountsToo(Counts):  # a line is logged once a process
        pass

    with SamplingServer() as server, caplog.at_level("WARNING"):
        make(server, tmp_path, CountsToo).train()
    lines = [record.getMessage() for record in caplog.records if "CountsToo.draws" in record.getMessage()]
    assert len(lines) == 1


def argparse_ends() -> None:
    argparse.ArgumentParser().parse_args(["--unknown"])


def a_coroutine_is_cancelled() -> None:
    raise asyncio.CancelledError


def the_user_interrupts() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        (argparse_ends, SystemExit),
        (a_coroutine_is_cancelled, asyncio.CancelledError),
        (the_user_interrupts, KeyboardInterrupt),
    ],
)
def test_what_is_no_exception_ends_the_run_as_in_turns(tmp_path, ends, error):
    draws = []

    def rollout(prompts, trainer):
        draws.append(prompts)
        if len(draws) == 2:
            ends()
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(prompt_ids, None, trainer.num_generations)
        logprobs = [[token[0] for token in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    with SamplingServer() as server:
        settings = {**server.settings(), "rollouts_ahead": 1}
        trainer = EfficientGRPOTrainer(
            tiny.tiny_model(),
            tiny.digit_share,
            tiny.config(EfficientGRPOConfig, tmp_path, **settings),
            Dataset.from_dict({"prompt": [f"{number}+1=" for number in range(16)]}),
            processing_class=tiny.character_tokenizer(),
            peft_config=tiny.lora(),
            rollout_func=rollout,
        )
        with pytest.raises(error):
            trainer.train()
    assert trainer.state.global_step == 1


def test_prompts_that_change_on_their_way_are_refused(tmp_path):
    with SamplingServer() as server:
        trainer = make(server, tmp_path, ChangesPrompts)
        method = "ChangesPrompts._generate_and_score_completions"
        with pytest.raises(ValueError, match=f"rollouts_ahead=1: {method} changes the rows of the data loader"):
            trainer.train()
        assert not server.draws


def test_a_draw_that_is_set_on_the_trainer_is_refused(tmp_path):
    with SamplingServer() as server:
        trainer = make(server, tmp_path)
        trainer._generate = lambda prompts, generate=trainer._generate: generate(prompts)
        with pytest.raises(ValueError, match=r"rollouts_ahead=1 with _generate set on the trainer: .* in a subclass"):
            trainer.train()
        assert not server.draws
