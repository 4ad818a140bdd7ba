"""`share_prompts`: what it takes, and that it changes nothing of a trainer.

Covers `prefix_sharing/share.py`.
"""

import subprocess
import sys

import pytest
import torch
import transformers as tf
from trl.experimental import cpo

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.compat.transformers import CACHE
from trl_fsdp_qlora.errors import PrefixSharingError

from .test_every_trainer import assert_equal_steps, make_trainer, save_base, steps_of, trained


@pytest.mark.parametrize("value", [42, "Qwen/Qwen3-0.6B", None])
def test_what_is_no_model_is_named_in_one_line(value):
    with pytest.raises(PrefixSharingError) as error:
        share_prompts(value)
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


def test_a_trainers_class_and_attributes_stay(tmp_path):
    save_base("cpo", "qwen3", tmp_path / "base")
    trainer = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out")
    before = dict(vars(trainer))
    assert share_prompts(trainer) is trainer
    assert type(trainer) is cpo.CPOTrainer
    assert {name: id(value) for name, value in vars(trainer).items()} == {n: id(v) for n, v in before.items()}


def test_a_teacher_that_is_a_model_of_its_own_is_shared(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdft", tmp_path / "base", False, tmp_path / "out")
    assert isinstance(trainer.teacher_model, tf.PreTrainedModel) and trainer.teacher_model is not trainer.model
    teacher = trainer.teacher_model.eval()
    for _ in range(2):
        share_prompts(trainer)
        assert teacher.prompt_sharing.status.packs
    tokens = torch.cat([torch.arange(3, 11).repeat(4, 1), torch.arange(3, 19).reshape(4, 4)], dim=1)
    rows = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        assert teacher(**rows).get(CACHE) is None and teacher.prompt_sharing.figures.tokens
        assert teacher(**rows, use_cache=True).get(CACHE) is not None
    assert teacher.config.use_cache is True, "what is saved of it is what was loaded"


class WithEntropy(cpo.CPOTrainer):
    """Reads the logits of its answers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        log_probs = self.concatenated_forward(model, inputs)[2].log_softmax(-1)
        is_answer = inputs["chosen_labels"] != -100
        entropy = -(log_probs.exp() * log_probs).sum(-1)[:, : is_answer.shape[1]]
        return loss - 0.5 * entropy[is_answer].mean()


def halve_logits(model):
    """Give the model a forward of its own."""
    stock = model.forward

    def forward(*args, **kwargs):
        output = stock(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward


@pytest.mark.parametrize(
    ("kind", "cls", "change", "fields"),
    [
        ("cpo", WithEntropy, None, {}),
        ("sdft", None, halve_logits, {"distillation_mode": "full_logits", "distillation_topk": None}),
        ("sdft", None, None, {"neftune_noise_alpha": 5.0}),  # as many random numbers as stock's
        ("cpo", None, None, {"neftune_noise_alpha": 5.0}),
    ],
)
def test_two_steps_of_a_trainer_that_a_user_changed(kind, cls, change, fields, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    runs = []
    for shares in (False, True):
        trainer = make_trainer(kind, tmp_path / "base", True, tmp_path / "out", cls, **fields)
        if change is not None:
            change(trainer.model)
        gradients = trained(trainer, shares)
        runs.append((steps_of(trainer), gradients))
    (stock_steps, stock), (steps, ours) = runs
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in stock_steps], rel=1e-5)
    assert_equal_steps(ours, stock)


def test_a_pair_forward_of_another_model(tmp_path):
    save_base("cpo", "qwen3", tmp_path / "base")
    trainer = share_prompts(make_trainer("cpo", tmp_path / "base", True, tmp_path / "out"))
    other = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out").model
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ours, stock = (trainer.concatenated_forward(model, batch) for model in (trainer.model, other))
    for a, b in zip(ours[:2], stock[:2], strict=True):
        assert torch.allclose(a, b, rtol=1e-4)


WITHOUT_TRL = """
import sys
for name in ("trl", "peft", "datasets", "pandas", "bitsandbytes"):
    sys.modules[name] = None
import copy, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.compat.transformers import CACHE

torch.manual_seed(0)
sizes = dict(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
stock = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, use_cache=False))
shared = share_prompts(copy.deepcopy(stock))
prompt = torch.randint(67, (1, 12)).expand(4, -1)
ids = torch.cat([prompt, torch.randint(67, (4, 5))], 1)
labels = ids.masked_fill(torch.arange(17) < 12, -100)
losses = []
for model in (stock, shared):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss)
torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
figures = shared.prompt_sharing.figures
print(figures.tokens, figures.padded_tokens)
"""


@pytest.mark.processes
def test_a_loop_of_ones_own_needs_no_trl():
    """Torch, transformers and accelerate are enough."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRL], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-2:] == ["32", "68"]
