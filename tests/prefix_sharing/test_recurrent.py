"""Recurrent and hybrid models on packed rows equal stock's padded pass, their gradients included."""

import copy

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, PrefixSharingError
from trl_fsdp_qlora.prefix_sharing.attention import install
from trl_fsdp_qlora.prefix_sharing.layout import pack
from trl_fsdp_qlora.prefix_sharing.recurrent import _SHORTEST, _TOKENS_PER_CALL, _similar, recurrent_layers
from trl_fsdp_qlora.prefix_sharing.recurrent import install as install_recurrent
from trl_fsdp_qlora.scoring.logprobs import add_scoring_head
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import (
    COMPLETION,
    RECURRENT,
    assert_equal_gradients,
    awkward_batch,
    build,
    gradients,
    loss_inputs,
    losses_of,
    make_batch,
    make_trainer,
    packed_log_probs,
    stock_log_probs,
    with_stock_head,
)

# Projections into the state are adapted like those of attention. PEFT refuses those out of it for state space models.
LORA = LoraConfig(r=4, target_modules=r".*(in_proj|in_proj_qkv|q_proj|v_proj|w1|up_proj)", init_lora_weights=False)
# One of each kind: gated delta rule, short convolution, state space models of both generations.
KINDS = ("qwen3_5", "lfm2", "falcon_h1", "jamba")


def family(name):
    return build(RECURRENT[name][0])


@pytest.mark.parametrize("name", RECURRENT)
def test_log_probs_entropy_and_gradients_equal_stock(name):
    model = with_stock_head(family(name))
    ids, mask = awkward_batch()
    weight = torch.randn(len(ids), COMPLETION, 2, generator=torch.Generator().manual_seed(5))
    weight *= mask[:, -COMPLETION:, None]
    logps, entropy = stock_log_probs(model, ids, mask)
    (torch.stack([logps, entropy], -1) * weight).sum().backward()
    reference = gradients(model)

    install(model)
    install_recurrent(model)
    add_scoring_head(model, 0.9)
    with torch.no_grad():  # what does not ask for a packed row is untouched
        assert torch.equal(stock_log_probs(model, ids, mask)[0], logps)
    layout = pack(ids, mask, COMPLETION)
    ours = packed_log_probs(model, layout)
    assert layout.layer_calls == RECURRENT[name][1]
    real = mask[:, -COMPLETION:].bool()
    torch.testing.assert_close(ours[0][real], logps[real], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1][real], entropy[real], atol=2e-5, rtol=1e-5)
    (torch.stack(ours, -1) * weight).sum().backward()
    assert_equal_gradients(gradients(model), reference, tolerance=2e-5)


OPTIONS = {
    "plain": {},
    "entropy quantile": {"top_entropy_quantile": 0.6},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "re-entrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "adapters": {"lora": True},
    "adapters, re-entrant checkpointing": {
        "lora": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_loss_equals_stock_trainer(name, options, tmp_path):
    config = dict(OPTIONS[options])
    peft_config = LORA if config.pop("lora", False) else None
    inputs = loss_inputs(*awkward_batch())
    inputs["advantages"][4:7] = 0  # a group without a signal is left out
    trainers = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainers.append(make_trainer(cls, family(name), tmp_path, copy.deepcopy(peft_config), **config))
    stock, ours = losses_of(trainers, inputs)
    assert trainers[1].prefix_sharing.active(), trainers[1].prefix_sharing.describe()
    assert trainers[1]._metrics["train"]["prefix_sharing/policy/layers_recurrent"][-1] >= 0.5
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance=2e-5)
    if peft_config is not None:
        adapted = {n for n, p in trainers[1].model.named_parameters() if p.requires_grad}
        assert any("in_proj" in n for n in adapted), adapted


@pytest.mark.parametrize("name", KINDS)
def test_training_equals_stock(name, tmp_path):
    """Reference model, old policy, several steps."""
    family(name).save_pretrained(tmp_path / "base")
    runs = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(cls, str(tmp_path / "base"), tmp_path, max_steps=3, beta=0.1, num_iterations=2)
        trainer.train()
        runs.append(
            [{k: row[k] for k in ("loss", "grad_norm", "kl") if k in row} for row in trainer.state.log_history]
        )
    assert trainer.prefix_sharing.active()
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_bf16_autocast_rounds_no_more_than_stock(tmp_path):
    inputs = loss_inputs(*awkward_batch())
    exact = make_trainer(GRPOTrainer, family("qwen3_5"), tmp_path)
    trainers = [
        make_trainer(cls, family("qwen3_5"), tmp_path, bf16=True) for cls in (GRPOTrainer, EfficientGRPOTrainer)
    ]
    reference, stock, ours = losses_of([exact, *trainers], inputs)
    assert trainers[1].prefix_sharing.active()

    def error(result):
        return sum((a - b).float().norm() ** 2 for a, b in zip(result[1], reference[1], strict=True)) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(stock)


def test_nf4_qlora(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")
    family("qwen3_5").save_pretrained(tmp_path / "base")
    quantization = tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    trainers = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=quantization, dtype=torch.float32
        )
        trainers.append(make_trainer(cls, model, tmp_path, copy.deepcopy(LORA)))
        for parameter in trainers[-1].model.parameters():
            if parameter.requires_grad:  # TRL casts the adapters of quantized models to bf16
                parameter.data = parameter.data.float()
    (layer,) = recurrent_layers(trainers[1].model)
    assert type(layer.in_proj_qkv.base_layer).__name__ == "Linear4bit"
    stock, ours = losses_of(trainers, loss_inputs(*awkward_batch()))
    assert trainers[1].prefix_sharing.active()
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance=2e-5)


def granite(experts: int):
    sizes = family("granitemoehybrid").config.to_dict() | {"num_local_experts": experts}
    return build(lambda: tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**sizes)))


@pytest.mark.parametrize("experts", [0, 4])
def test_granites_router_loss(experts, tmp_path):
    """TRL 1.16 looks for `num_experts` alone: where it is told, it is the reference."""
    trainers = [make_trainer(cls, granite(experts), tmp_path) for cls in (GRPOTrainer, EfficientGRPOTrainer)]
    assert trainers[0].aux_loss_enabled and trainers[1].aux_loss_enabled == bool(experts)
    trainers[0].model.config.num_experts = experts
    trainers[0].aux_loss_enabled = bool(experts)
    stock, ours = losses_of(trainers, loss_inputs(*awkward_batch()))
    assert trainers[1].prefix_sharing.active(), trainers[1].prefix_sharing.describe()
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance=2e-5)
    if experts:
        aux_losses = [trainer._metrics["train"]["aux_loss"][-1] for trainer in trainers]
        assert aux_losses[1] == pytest.approx(aux_losses[0]) and aux_losses[0] > 0


def request_of(model, batch, **asked):
    ids, mask = batch
    batch_size = asked.pop("batch_size", None)
    return PassRequest(Kind.POLICY, model, **asked).on(ids, mask, COMPLETION, batch_size=batch_size)


def shared_pass(model, batch, choice="auto", **asked):
    """Log-probabilities and figures of a pass, and stock's."""
    with_stock_head(model)
    sharing = PrefixSharing(choice, temperature=0.9)
    sharing.prepare("policy", model)
    request = request_of(model, batch, **asked)
    values, figures = sharing.log_probs(
        request, lambda request: (*stock_log_probs(model, request.input_ids, request.attention_mask), None)
    )
    return sharing, values[0], figures, stock_log_probs(model, *batch)[0]


@pytest.mark.parametrize("name", KINDS)
def test_selected_tokens_and_rows_cut_inside_groups(name):
    batch = awkward_batch()
    draw = torch.Generator().manual_seed(2)
    scored = (torch.rand(len(batch[0]), COMPLETION, generator=draw) < 0.4) & batch[1][:, -COMPLETION:].bool()
    sharing, ours, figures, stock = shared_pass(family(name), batch, scored_BC=scored, batch_size=3)
    assert sharing.active(), sharing.describe()
    assert figures["layers_recurrent"] >= 0.5
    torch.testing.assert_close(ours, torch.where(scored, stock, 0.0), atol=2e-5, rtol=1e-5)


def test_nested_rows_share_prompts_only():
    """T-SPMO's completions begin alike; a state is kept where a prompt ends, not at every token."""
    batch = make_batch([12] * 4, [9] * 4)
    batch[0][:, -COMPLETION:-2] = batch[0][0, -COMPLETION:-2]
    sharing, ours, figures, stock = shared_pass(family("qwen3_5"), batch, nested=True)
    assert sharing.active()
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-5)
    assert figures["tokens_fraction"] == (11 + 4 * 9) / batch[0].numel()
    assert "one level" in sharing.describe()


def test_one_token_completions():
    """One token behind a state would be a decoding step: kernels that write into the state and have no backward."""
    model = with_stock_head(family("falcon_h1"))
    batch = make_batch([12] * 4, [1] * 4)
    _, ours, figures, stock = shared_pass(model, batch)
    assert figures["layers_recurrent"] == 0.5
    torch.testing.assert_close(ours[:, :1], stock[:, :1], atol=2e-5, rtol=1e-5)


def test_a_named_backend_serves_the_attention_between():
    sharing, ours, figures, stock = shared_pass(family("qwen3_5"), awkward_batch(), choice="two_part")
    assert sharing.active() and figures["layers_two_part"] == figures["layers_recurrent"] == 0.5
    real = awkward_batch()[1][:, -COMPLETION:].bool()
    torch.testing.assert_close(ours[real], stock[real], atol=2e-5, rtol=1e-5)


def test_a_state_that_runs_on_is_caught(monkeypatch):
    """The recurrent layers of a packed row without their layout: the error that all of this is there to avoid."""
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.sharing.install_recurrent", lambda model: None)
    with pytest.raises(PrefixSharingError, match="ran 1 times in a forward of 2"):
        shared_pass(family("qwen3_5"), awkward_batch(), choice="cascade")


def test_preparing_twice_changes_nothing():
    model = family("qwen3_5")
    install_recurrent(model)
    (layer,) = recurrent_layers(model)
    own = layer.own_forward
    install_recurrent(model)
    assert layer.own_forward is own


def test_generation_uses_the_layers_own_forward():
    model, prepared = family("qwen3_5"), family("qwen3_5")
    PrefixSharing().prepare("policy", prepared)
    ids, mask = awkward_batch()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids[:, :14], attention_mask=mask[:, :14], **options)
    assert torch.equal(prepared.generate(ids[:, :14], attention_mask=mask[:, :14], **options), expected)


def test_completions_of_similar_length_are_called_together():
    draw = np.random.default_rng(0)
    for size in (0, 1, 5, 40):
        lengths = draw.integers(1, 600, size)
        batches = _similar(lengths)
        assert sorted(np.concatenate([*batches, np.zeros(0, int)])) == list(range(size))
        cost = sum(len(batch) * lengths[batch].max() + _TOKENS_PER_CALL for batch in batches)
        assert cost <= size * lengths.max(initial=_SHORTEST) + _TOKENS_PER_CALL
    assert [list(batch) for batch in _similar(np.array([500, 20, 490, 30]))] == [[0, 2], [1, 3]]
