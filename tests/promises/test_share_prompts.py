"""`share_prompts`, `unshare_prompts` and `verify`: equal to stock TRL whatever a user's model holds or becomes."""

import copy
import logging
import re

import pytest
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora import share_prompts, unshare_prompts, verify


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A small Qwen3 with TRL's fused head, and a copy that shares prompts."""
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    stock = transformers.Qwen3ForCausalLM(config)
    for parameter in stock.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        add_fused_lm_head(model, 0.9, outputs=("log_probs", "entropy"))
    return stock, share_prompts(ours)


def group(seed: int) -> dict[str, torch.Tensor]:
    """Two prompts with four completions each."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 60, (2, 20), generator=draw).repeat_interleave(4, 0)
    ids = torch.cat([prompts, torch.randint(3, 60, (8, 8), generator=draw)], 1)
    labels = ids.clone()
    labels[:, :20] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    log_probs = model(**batch, fused_lm_head=True).log_probs
    weight = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(7))
    (log_probs * weight).sum().backward()
    return log_probs.detach(), [parameter.grad for parameter in model.parameters()]


def assert_equal_steps(stock, ours, batch) -> None:
    (expected, expected_gradients), (values, gradients) = step(stock, batch), step(ours, batch)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    largest = max(gradient.abs().max() for gradient in expected_gradients)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).abs().max() <= 2e-5 * largest


def held_in_a_default_argument(layer):
    layer.mlp.forward = lambda hidden, forward=layer.mlp.forward: forward(hidden) + 0.1 * hidden.cumsum(1)


def held_in_a_keyword_default(layer):
    forward = layer.mlp.forward

    def mixed(hidden, *, forward=forward):
        return forward(hidden) + 0.1 * hidden.cumsum(1)

    layer.mlp.forward = mixed


class Holder:
    """An object that is called in place of a forward, and holds it."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, hidden):
        return self.forward(hidden) + 0.1 * hidden.cumsum(1)


def held_in_an_object(layer):
    layer.mlp.forward = Holder(layer.mlp.forward)


@pytest.mark.parametrize("hold", [held_in_a_default_argument, held_in_a_keyword_default, held_in_an_object])
def test_the_first_step_of_a_token_mixing_model_is_stocks(hold):
    """The comparison of the first pass left its gradients in those of the run: 9 to 13% of the first step."""
    stock, ours = models()
    for model in (stock, ours):
        for layer in model.model.layers:
            hold(layer)
    assert_equal_steps(stock, ours, group(1))


def test_a_class_forward_that_is_replaced_later_is_noticed(monkeypatch):
    stock, ours = models()
    assert_equal_steps(stock, ours, group(1))
    mlp_class = type(stock.model.layers[0].mlp)
    forward = mlp_class.forward
    monkeypatch.setattr(mlp_class, "forward", lambda self, hidden: forward(self, hidden) + 0.1 * hidden.cumsum(1))
    assert_equal_steps(stock, ours, group(2))


def test_rotary_tables_that_are_replaced_later_are_noticed():
    stock, ours = models()
    assert_equal_steps(stock, ours, group(1))
    for model in (stock, ours):
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        model.config.max_position_embeddings = 16
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert_equal_steps(stock, ours, group(2))


def test_verify_of_a_right_model_finds_and_changes_nothing():
    _, ours = models()
    step(ours, group(1))
    before = [(parameter.grad, parameter.grad.clone()) for parameter in ours.parameters()]
    state = torch.get_rng_state()
    assert verify(ours, group(2)) == []
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, (gradient, value) in zip(ours.parameters(), before, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient, value)


def test_unshare_prompts_gives_the_model_back():
    stock, ours = models()
    forwards = [name for name, module in stock.named_modules() if "forward" in vars(module)]
    step(ours, group(1))
    assert unshare_prompts(ours) is ours
    assert [name for name, module in ours.named_modules() if "forward" in vars(module)] == forwards
    assert torch.equal(step(ours, group(2))[0], step(stock, group(2))[0])


class Rows(torch.utils.data.Dataset):
    """Two prompts of 20 tokens with four completions of 8 each, which begin differently."""

    def __init__(self):
        batch = group(3)
        batch["input_ids"][:, 20] = torch.arange(40, 48)
        batch["labels"][:, 20] = batch["input_ids"][:, 20]
        self.batch = batch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: x[row] for name, x in self.batch.items()}


def test_the_first_step_of_a_shared_trainer_logs_its_tokens(tmp_path, caplog):
    stock, _ = models()
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        use_cpu=True,
        per_device_train_batch_size=8,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = share_prompts(transformers.Trainer(stock, arguments, train_dataset=Rows()))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("trl_fsdp_qlora")]
    computed, padded = 2 * 20 + 8 * 8, 8 * 28  # of the first of two steps
    percent = round(100 * (1 - computed / padded))
    assert [int(number) for number in re.findall(r"\b\d+", line)] == [computed, padded, percent]
