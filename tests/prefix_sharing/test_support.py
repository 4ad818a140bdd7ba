"""What cannot be exact is refused with its reason, and runs padded; nothing goes wrong silently."""

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, PrefixSharingError, position_limit, scope, sharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import (
    COMPLETION,
    MASKED,
    MULTIMODAL,
    SUPPORTED,
    UNSUPPORTED,
    assert_equal_gradients,
    awkward_batch,
    build,
    loss_inputs,
    losses_of,
    make_batch,
    make_trainer,
    stock_log_probs,
    with_stock_head,
)

REASONS = {
    "falcon": "adds ALiBi biases",
    "bloom": "takes no position_ids",
    "minimax": "do not keep their state in transformers' cache",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_run_padded_and_say_why(name, tmp_path, caplog):
    inputs = loss_inputs(*awkward_batch())
    with caplog.at_level(logging.WARNING, logger=sharing.__name__):
        trainers = [
            make_trainer(cls, build(UNSUPPORTED[name]), tmp_path) for cls in (GRPOTrainer, EfficientGRPOTrainer)
        ]
        stock, ours = losses_of(trainers, inputs)
    assert ours[0] == stock[0]
    assert_equal_gradients(ours[1], stock[1], tolerance=1e-6)
    lines = [record.getMessage() for record in caplog.records if record.name == sharing.__name__]
    assert len(lines) == 1 and REASONS[name] in lines[0], lines
    assert REASONS[name] in trainers[1].prefix_sharing.describe()


@pytest.mark.parametrize("name", [*UNSUPPORTED, "gptj"])
def test_naming_a_backend_makes_it_an_error(name, tmp_path):
    make = UNSUPPORTED.get(name) or MASKED[name]
    with pytest.raises(PrefixSharingError, match=REASONS.get(name, "attends by code of its own")):
        make_trainer(EfficientGRPOTrainer, build(make), tmp_path, prefix_sharing="cascade")


def test_unknown_choice_lists_the_known_ones():
    with pytest.raises(PrefixSharingError, match="auto, off, cascade, two_part"):
        PrefixSharing("fast")


def run(model, choice="auto", score_mask=None, **options):
    """One pass through `PrefixSharing` (its three values and its figures), with the padded reference beside it."""
    with_stock_head(model)
    packed = PrefixSharing(choice, temperature=0.9)
    packed.prepare("policy", model)
    ids, mask = awkward_batch()
    request = PassRequest(Kind.POLICY, model, scored_BC=score_mask).on(ids, mask, COMPLETION, **options)
    values, figures = packed.log_probs(
        request, lambda request: (*stock_log_probs(model, request.input_ids, request.attention_mask), None)
    )
    return packed, (*values, figures), stock_log_probs(model, ids, mask)[0]


def with_attention_of_its_own(model):
    """None of its layers goes through transformers' attention interface."""
    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(scope._compute, None, layer.self_attn.forward)
    return model


def test_layers_that_do_not_run_are_counted():
    packed, result, stock = run(with_attention_of_its_own(build(SUPPORTED["llama"])))
    assert "ran 0 times in a forward of 2" in packed.describe()
    assert torch.equal(result[0], stock)


def test_self_check_catches_a_leak_between_completions(caplog):
    """A recurrent layer that no static check knows: it mixes each token with its left neighbour in the row."""
    model = build(SUPPORTED["llama"])
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + 0.3 * x.roll(1, dims=1))
    packed, result, stock = run(model)
    assert "difference in log-probability" in packed.describe()
    assert torch.equal(result[0], stock)
    assert not packed.active()


def test_self_check_ignores_dropout_and_restores_modes():
    model = build(SUPPORTED["llama"])
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(
        model.model.layers[0].mlp.down_proj, torch.nn.Dropout(0.5)
    )
    model.train()
    model.model.layers[1].eval()
    packed, _, _ = run(model)
    assert packed.active()
    assert model.training and model.model.layers[0].training and not model.model.layers[1].training


def test_cascade_by_name_refuses_a_window():
    with pytest.raises(PrefixSharingError, match="sliding window of 6"):
        run(build(SUPPORTED["mistral_sliding"]), "cascade")


def test_a_mask_of_more_pairs_than_stock_computes_is_not_made(tmp_path, caplog):
    """Short prompts, long completions: 2 + 8 * 9 tokens of a row against 8 rows of 12."""
    inputs = loss_inputs(*make_batch([3] * 8, [9] * 8, prompt=3))
    trainers = [make_trainer(cls, build(MASKED["falcon"]), tmp_path) for cls in (GRPOTrainer, EfficientGRPOTrainer)]
    with caplog.at_level(logging.WARNING, logger=sharing.__name__):
        stock, ours = losses_of(trainers, inputs)
    assert trainers[1].prefix_sharing.active() and "larger than stock's" in caplog.text
    assert "prefix_sharing/policy/tokens_fraction" not in trainers[1]._metrics["train"]
    assert ours[0] == stock[0]
    assert_equal_gradients(ours[1], stock[1], tolerance=1e-6)


def test_a_batch_with_images_runs_as_stock_where_the_class_takes_none():
    model = with_stock_head(build(MULTIMODAL["gemma3"]))
    packed = PrefixSharing(temperature=0.9)
    packed.prepare("policy", model)
    ids, mask = awkward_batch()

    def padded(request):
        return *stock_log_probs(model, request.input_ids, request.attention_mask), None

    images = {"pixel_values": torch.zeros(len(ids), 3, 4, 4), "num_images": [1] * len(ids)}
    for fields, is_packed in ((images, False), ({"mm_token_type_ids": ids * 0}, True)):
        request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION, **fields)
        assert bool(packed.log_probs(request, padded).figures) == is_packed


def test_batches_that_cannot_be_packed_run_padded(caplog):
    model = with_stock_head(build(SUPPORTED["llama"]))
    packed = PrefixSharing(temperature=0.9)
    packed.prepare("policy", model)
    ids, mask = awkward_batch()
    mask[0, -COMPLETION + 2] = 0  # a hole
    stock = stock_log_probs(model, ids, mask)
    request, calls = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION), []

    def padded(request):
        calls.append(request)
        return *stock_log_probs(model, request.input_ids, request.attention_mask), None

    values, figures = packed.log_probs(request, padded)
    assert calls == [request]  # there is nothing to compare
    assert torch.equal(values[0], stock[0]) and figures == {}
    assert "left padding" in caplog.text
    assert packed.active()  # the next batch is packed again


def test_rotary_tables_that_depend_on_the_longest_position(caplog):
    """Padding decides which table stock uses, so a row beyond the switch runs padded and one below runs packed."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
    for switch, packed_share in ((16, None), (40, True)):
        model = build(SUPPORTED["phi3"])
        config = tf.Phi3Config(**(model.config.to_dict() | {"original_max_position_embeddings": switch}))
        config.rope_parameters = longrope | {"original_max_position_embeddings": switch}
        _packed, result, stock = run(build(lambda config=config: tf.Phi3ForCausalLM(config)))
        assert ("tokens_fraction" in result[3]) == bool(packed_share)
        torch.testing.assert_close(result[0], stock, atol=2e-5, rtol=1e-5)
    assert "rows of 23 positions" in caplog.text


def test_rotary_tables_of_single_layer_types_count_too():
    default, dynamic = {"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}
    tables = {"sliding_attention": default, "full_attention": dynamic}
    for rope, limit in ((tables, 64), ({"full_attention": dynamic | {"original_max_position_embeddings": 16}}, 16)):
        config = tf.LlamaConfig(max_position_embeddings=64)
        config.rope_parameters = rope
        assert position_limit(SimpleNamespace(config=config)) == limit
    config.rope_parameters = {"full_attention": default}
    assert position_limit(SimpleNamespace(config=config)) == float("inf")


def test_generation_sees_the_models_own_implementation(tmp_path, monkeypatch):
    """transformers' continuous batching refuses implementations whose name it does not know."""
    trainer = make_trainer(EfficientGRPOTrainer, build(SUPPORTED["qwen3"]), tmp_path)
    config, seen = trainer.model.config, []
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: seen.append(config._attn_implementation))
    trainer._generate([])
    assert seen == ["sdpa"] and config._attn_implementation == "prefix_sharing_sdpa"


def test_generation_uses_the_models_own_attention():
    model, prepared = build(SUPPORTED["mistral_sliding"]), build(SUPPORTED["mistral_sliding"])
    PrefixSharing().prepare("policy", prepared)
    ids, mask = awkward_batch()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids[:, :14], attention_mask=mask[:, :14], **options)
    assert torch.equal(prepared.generate(ids[:, :14], attention_mask=mask[:, :14], **options), expected)


def test_saved_config_does_not_name_this_package(tmp_path):
    model = build(SUPPORTED["llama"])
    PrefixSharing().prepare("policy", model)
    model.save_pretrained(tmp_path)
    assert "prefix_sharing" not in (tmp_path / "config.json").read_text()
    assert tf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_score_mask_cuts_work_and_zeros_the_rest():
    ids, _mask = awkward_batch()
    score = torch.zeros(len(ids), COMPLETION, dtype=torch.bool)
    score[0, [0, 4]] = True
    score[2, 8] = True  # behind the completion's end: not a token
    _packed, result, stock = run(build(SUPPORTED["qwen3"]), score_mask=score)
    expected = stock * 0
    expected[0, [0, 4]] = stock[0, [0, 4]]
    torch.testing.assert_close(result[0], expected, atol=2e-5, rtol=1e-5)
    # One completion is left, up to the token before its last scored one: 14 prompt tokens and 4 of the completion.
    assert result[3]["tokens_fraction"] == 18 / ids.numel()


def test_nothing_to_score_still_reaches_every_parameter():
    model = build(SUPPORTED["qwen3"])
    ids, _mask = awkward_batch()
    _, result, _ = run(model, score_mask=torch.zeros(len(ids), COMPLETION, dtype=torch.bool))
    assert result[0].abs().sum() == 0
    result[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())
