"""Where vLLM does not draw from the policy a sync is proven on completions that it does draw from it; named before a step."""

import pytest
import torch
from peft import get_peft_model

from tests import tiny
from tests.rollout.whole_engine import start_whole
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.trl import SAMPLED_LOGPS
from trl_fsdp_qlora.grpo import trainer as grpo_trainer
from trl_fsdp_qlora.rollout.reshaped import own_draws, reshaping, reshaping_warning
from trl_fsdp_qlora.rollout.sync_proof import StaleRolloutError


def settings(folder, **changes):
    return tiny.config(EfficientGRPOConfig, folder, use_vllm=True, **changes)


NOTHING = [
    {},
    {"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}},
    {"top_k": -1, "min_p": 0.0},
    {"generation_kwargs": {"seed": 3, "stop": ["."], "max_tokens": 4, "ignore_eos": True}},
    {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}},  # vLLM gets the latter
    {"generation_kwargs": {"min_tokens": 0, "logit_bias": {}, "presence_penalty": 0.0, "bad_words": None}},
]
SOMETHING = [
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 20}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex"),
    ({"generation_kwargs": {"temperature": 0.7}}, "generation_kwargs.temperature"),
    *(
        ({"generation_kwargs": {name: value}}, f"generation_kwargs.{name}")
        for name, value in {
            "min_tokens": 8,
            "logit_bias": {5: 1.0},
            "bad_words": ["a"],
            "allowed_token_ids": [5, 6],
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "structured_outputs": {"regex": "[0-9]+"},
            "extra_args": {"what": "ever"},  # of a processor that nothing is known of
        }.items()
    ),
]


@pytest.mark.parametrize("changes", NOTHING)
def test_what_leaves_the_distribution(tmp_path, changes):
    args = settings(tmp_path, **changes)
    assert not reshaping(args)
    assert reshaping_warning(args) is None
    assert own_draws(args, object()) is None


@pytest.mark.parametrize("changes, named", SOMETHING)
def test_what_changes_it_is_named(tmp_path, changes, named):
    args = settings(tmp_path, **changes)
    assert f"under {named} vLLM draws from another distribution" in reshaping_warning(args)
    assert own_draws(args, object()) is not None
    args.vllm_importance_sampling_correction = False
    assert "nothing corrects that" in reshaping_warning(args)


def test_every_sampling_parameter_of_vllm_is_told_apart():
    """What is drawn from is all that is not known to leave it alone: look at what a new vLLM adds to either side."""
    params = pytest.importorskip("vllm").SamplingParams
    from trl_fsdp_qlora.rollout.reshaped import _LEAVES_TOKENS

    assert set(_LEAVES_TOKENS) <= set(params.__struct_fields__)


@pytest.fixture
def trainer_with(tmp_path, monkeypatch):
    def make(**changes):
        torch.manual_seed(0)
        policy = get_peft_model(tiny.tiny_model(), tiny.lora())
        monkeypatch.setattr(grpo_trainer, "start_engine", start_whole(policy))
        kwargs = {"min_tokens": 6}
        args = {"use_vllm": True, "vllm_mode": "server", "rollout_sync": "adapter", "generation_kwargs": kwargs}
        args |= {"max_completion_length": 12, "learning_rate": 1e-2, "max_steps": 4}
        made = tiny.trainer(
            EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=tiny.lora(), **{**args, **changes}
        )
        made.vllm_generation.generation_kwargs = kwargs  # as `start_engine` hands them over
        return made

    return make


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_min_tokens_is_proven(trainer_with, monkeypatch):
    trainer = trainer_with()
    batches = []
    begin = trainer.watch.begin

    def recorded(inputs, *others):
        batches.append(inputs)
        return begin(inputs, *others)

    monkeypatch.setattr(trainer.watch, "begin", recorded)
    trainer.train()
    assert len(logged(trainer, "rollout/logp_difference/max")) == 4
    assert max(logged(trainer, "rollout/logp_difference/max")) < 1e-5  # float32, sums in another order
    assert max(map(abs, logged(trainer, "rollout/staleness"))) < 0.1 and len(logged(trainer, "rollout/staleness")) == 3
    # Training has the engine's own values, as ever: of a distribution that its weights correct.
    assert trainer.vllm_generation.generation_kwargs == {"min_tokens": 6}
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]
    assert abs(trainer.state.log_history[0]["sampling/importance_sampling_ratio/mean"] - 1) > 1e-3
    assert all(SAMPLED_LOGPS in inputs for inputs in batches)


def test_what_was_drawn_under_it_looks_like_another_policys(trainer_with):
    trainer = trainer_with()
    trainer.watch.draws = None
    with pytest.raises(StaleRolloutError, match="another base"):
        trainer.train()


def test_a_stale_adapter_is_still_caught(trainer_with):
    trainer = trainer_with(max_steps=6)
    load = trainer.vllm_generation._load
    trainer.vllm_generation._load = lambda version, folder: load(version, folder) if version < 3 else None
    with pytest.raises(StaleRolloutError):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("rows, expected", [(1, 2), (3, 3), (12, 8)])
def test_a_few_of_the_prompts(rows, expected):
    """As many on every rank as micro-batches have rows, within limits; settings are back afterwards, after an error too."""

    class Engine:
        top_p, top_k, min_p, repetition_penalty = 0.9, 5, 0.1, 1.2
        structured_outputs_regex, generation_kwargs, max_completion_length = "a", {"min_tokens": 3}, 512
        asked = None

        def generate(self, prompts, images, num_generations):
            self.asked = dict(vars(self))
            if self.fails:
                raise RuntimeError("died")
            lengths = [1 + i % 3 for i in range(len(prompts))]
            return prompts, [[7] * n for n in lengths], [[[-0.5]] * (n - 1) + [[None]] for n in lengths], None

    engine = Engine()
    engine.fails = False
    prompt_mask = torch.ones(rows, 4, dtype=torch.long)
    prompt_mask[0, :2] = 0
    inputs = {"prompt_ids": torch.arange(4 * rows).view(rows, 4), "prompt_mask": prompt_mask}
    draws = own_draws(settings_of(512), engine)
    own = draws(inputs)
    assert own["completion_ids"].shape == own[SAMPLED_LOGPS].shape == (expected, min(expected, 3))
    assert own["completion_mask"].sum(1).tolist() == [1 + i % 3 for i in range(expected)]
    assert own["prompt_ids"].tolist() == [inputs["prompt_ids"][i % rows].tolist() for i in range(expected)]
    assert own[SAMPLED_LOGPS][0].isnan()[0] and not own[SAMPLED_LOGPS].isnan().all()
    assert engine.asked["max_completion_length"] == 64 and engine.asked["top_p"] == 1.0
    assert engine.asked["generation_kwargs"] == {} and engine.asked["structured_outputs_regex"] is None
    assert (engine.top_p, engine.generation_kwargs, engine.max_completion_length) == (0.9, {"min_tokens": 3}, 512)
    engine.fails = True
    with pytest.raises(RuntimeError, match="died"):
        draws(inputs)
    assert engine.top_k == 5


def settings_of(width):
    class Args:
        use_vllm, temperature, top_p, top_k, min_p, repetition_penalty = True, 1.0, 0.9, 0, None, 1.0
        vllm_structured_outputs_regex, generation_kwargs, max_completion_length = None, None, width

    return Args()
