"""TRL's own trainers after `share_prompts`: losses and gradients of the same batch are what they were before."""

import copy
import itertools

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.experimental import gmpo

from tests.prefix_sharing.helpers import assert_equal_gradients, build, gradients, tokenizer
from tests.tiny import these_first
from tests.trainers.helpers import mean_token
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

# Two of three prompts begin alike.
BEGINNING = "ABCDEFGH*" * 3
PROMPTS = [f"{BEGINNING}IJKL=", f"{BEGINNING}MN=", "OPQRS="]
CHOSEN = ["AB", "CDE", "F"]
REJECTED = ["AC", "CDFGH", "GABAB"]
DATA = {
    "dpo": {"prompt": PROMPTS * 2, "chosen": CHOSEN * 2, "rejected": REJECTED * 2},
    "kto": {
        "prompt": [*PROMPTS, PROMPTS[0]] * 2,
        "completion": [*CHOSEN, "ACD"] * 2,
        "label": [True, False, True, False] * 2,
    },
    "sft": {"prompt": PROMPTS * 2, "completion": CHOSEN * 2},
    "rloo": {"prompt": PROMPTS * 4},
    "grpo": {"prompt": PROMPTS * 4},
    "gmpo": {"prompt": PROMPTS * 4},
}
TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"per_device_train_batch_size": 3}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"per_device_train_batch_size": 4}),
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"per_device_train_batch_size": 6}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {"num_generations": 4, "max_completion_length": 6}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}),
    "gmpo": (gmpo.GMPOTrainer, gmpo.GMPOConfig, {"num_generations": 4, "max_completion_length": 6}),
}
DRAWING = ("rloo", "grpo", "gmpo")
OPTIONS = {
    "dpo": {"ipo": {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}, "ld_alpha": {"ld_alpha": 0.5}},
    "kto": {"apo": {"loss_type": "apo_zero_unpaired"}},
    "sft": {"dft": {"loss_type": "dft"}},
    "rloo": {"no reference": {"beta": 0.0}},
    "grpo": {"sequence": {"importance_sampling_level": "sequence"}},
}


def make_trainer(kind, base, folder, adapter, **options):
    trainer_class, config_class, sizes = TRAINERS[kind]
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False, "report_to": [],
        "gradient_checkpointing": False, "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    torch.manual_seed(0)
    trainer = trainer_class(
        base if isinstance(base, torch.nn.Module) else str(base),
        args=config_class(**{**common, **sizes, **options}),
        train_dataset=Dataset.from_dict(DATA[kind]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if adapter else None,
        **({"reward_funcs": mean_token} if kind in DRAWING else {}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


# In `make test`: each trainer, some on layers of another kind or without an adapter.
OFTEN = [
    *(("qwen3", kind, True, None) for kind in TRAINERS),
    ("gpt_oss", "dpo", True, None),
    ("qwen3_5", "kto", True, None),
    ("lfm2", "sft", True, None),
    ("gemma3", "rloo", False, None),
    ("qwen3", "dpo", True, "ipo"),
]
CASES = [
    *OFTEN,
    *itertools.product(("gemma3", "qwen3_5"), ("dpo", "kto", "sft", "grpo"), [False], [None]),
    *(("qwen3", kind, True, option) for kind, options in OPTIONS.items() for option in options if option != "ipo"),
]


@pytest.mark.parametrize(("name", "kind", "adapter", "option"), these_first(CASES, *OFTEN))
def test_loss_and_gradients_are_what_they_were(name, kind, adapter, option, tmp_path):
    model = build(name)
    # Smaller weights than the other tests': long recurrences of large ones leave less than five digits of a gradient.
    for parameter in model.parameters():
        parameter.data.mul_(0.5 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(tmp_path / "base")
    options = OPTIONS[kind][option] if option else {}
    stock, shared = (make_trainer(kind, tmp_path / "base", tmp_path, adapter, **options) for _ in range(2))
    share_prompts(shared)
    batch = next(iter(stock.get_train_dataloader()))
    if kind in DRAWING:
        batch = stock._generate_and_score_completions(batch)
        batch["advantages"] = torch.linspace(-1, 1, len(batch["advantages"]))
    losses = []
    of_each = []
    for trainer in (stock, shared):
        loss = trainer.compute_loss(trainer.model, copy.deepcopy(batch))
        loss.backward()
        losses.append(loss.item())
        of_each.append(gradients(trainer.model))
    sharing = causal_language_model(shared.model).prompt_sharing
    assert sharing.status.packs and 0 < sharing.figures.tokens < 0.6 * sharing.figures.padded_tokens, (
        sharing.describe()
    )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-6)
    assert_equal_gradients(of_each[1], of_each[0], tolerance=2e-5)


@pytest.mark.parametrize("adapter", [True, False])
def test_a_trainer_that_is_made_after_share_prompts(adapter, tmp_path):
    """It puts its own head on the model, in front of prompt sharing, which wraps that head in the first pass."""
    losses = []
    for shares in (False, True):
        model = share_prompts(build("qwen3")) if shares else build("qwen3")
        trainer = make_trainer("sft", model, tmp_path, adapter, model_init_kwargs=None)
        batch = next(iter(trainer.get_train_dataloader()))
        losses.append([trainer.compute_loss(trainer.model, copy.deepcopy(batch)).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    figures = causal_language_model(trainer.model).prompt_sharing.figures
    assert 0 < figures.tokens < 0.6 * figures.padded_tokens
