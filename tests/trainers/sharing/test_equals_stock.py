"""Log-probabilities, losses, gradients and whole runs equal stock TRL's: every family, loss type, option and
precision.
"""

import copy

import pytest
import torch
import transformers as tf
from peft import LoraConfig
from trl import GRPOTrainer

from tests.core.prefix_sharing.helpers import (
    COMPLETION,
    COUNTING,
    MULTIMODAL,
    RECURRENT,
    SUPPORTED,
    assert_equal_gradients,
    assert_equals_stock,
    awkward_batch,
    build,
    completion_labels,
    loss_inputs,
    losses_of,
    make_batch,
    make_trainer,
    one_pass,
    prepared,
    processor,
)
from tests.tiny import these_first
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharingError
from trl_fsdp_qlora.prefix_sharing.problems import CannotPack

BOTH = GRPOTrainer, EfficientGRPOTrainer
# One recurrent model of each kind: gated delta rule, short convolution, state space model.
KINDS = ("qwen3_5", "lfm2", "falcon_h1")
# What "auto" computes each layer by.
LAYERS = {name: ["cascade"] * 2 for name in SUPPORTED} | {
    "qwen3_sliding": ["cascade", "two_part"],
    "gemma2": ["two_part"] * 2,
    "gemma3": ["two_part", "cascade"],
    "mistral_sliding": ["two_part"] * 2,
    "gpt_oss": ["two_part"] * 2,
    **{name: layers for name, (_, layers) in RECURRENT.items()},
}
# PEFT refuses adapters on projections out of the state for state space models.
TARGETS = dict.fromkeys(KINDS, r".*(in_proj|in_proj_qkv|q_proj|v_proj|w1|up_proj)")
RE_ENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def lora(name):
    return LoraConfig(r=4, target_modules=TARGETS.get(name, "all-linear"), init_lora_weights=False)


@pytest.mark.parametrize("name", LAYERS)
def test_log_probs_entropy_and_gradients_on_each_backend(name):
    model = build(name)
    kinds = LAYERS[name]
    sharing = prepared(model, compared=True)
    figures = assert_equals_stock(model, sharing).metrics("pass")
    assert {kind: kinds.count(kind) / len(kinds) for kind in kinds} == {
        key.removeprefix("pass/layers_"): value for key, value in figures.items() if "/layers_" in key
    }
    for backend in ("cascade", "two_part"):
        prepared(model, backend, compared=True)
        if backend == "cascade" and "two_part" in kinds:
            with pytest.raises(CannotPack):
                one_pass(model, sharing)
        else:
            assert_equals_stock(model, sharing)


@pytest.mark.parametrize("name", ["mistral_sliding", "qwen3_5"])
def test_what_does_not_ask_for_a_packed_row_is_untouched(name):
    """Padded passes, and generation by a decoder with windows or states."""
    model = build(name)
    ours = build(name)
    ids, mask = awkward_batch()
    prepared(ours)
    assert torch.equal(ours(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    arguments = {"attention_mask": mask[:, :14], "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(ids[:, :14], **arguments), model.generate(ids[:, :14], **arguments))


OPTIONS = {
    "plain": {},
    "entropy quantile": {"top_entropy_quantile": 0.6},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "re-entrant checkpointing": RE_ENTRANT,
    "adapters": {"lora": True},
    "adapters, re-entrant checkpointing": {"lora": True, **RE_ENTRANT},
}
LOSSES = [
    *((name, "re-entrant checkpointing") for name in COUNTING),
    *((name, "adapters, re-entrant checkpointing") for name in KINDS),
    *(("qwen3_5", options) for options in [*OPTIONS][:-1]),
]


def assert_same_loss(trainers, inputs, tolerance=2e-5):
    stock, ours = losses_of(trainers, inputs)
    assert trainers[1].sharing.is_active, trainers[1].sharing.describe()
    assert trainers[1]._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.7
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance)


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_loss_of_models_with_code_of_their_own(name, options, tmp_path):
    """They count positions, compute attention or keep a state by themselves."""
    config = dict(OPTIONS[options])
    peft_config = lora(name) if config.pop("lora", False) else None
    ids, mask = awkward_batch()
    # Padding as a tokenizer pads: RoBERTa counts by it. And a group without a signal, which is left out.
    inputs = loss_inputs(ids.masked_fill(mask == 0, 1), mask)
    inputs["advantages"][4:7] = 0
    trainers = []
    for cls in BOTH:
        torch.manual_seed(0)
        trainers.append(make_trainer(cls, build(name), tmp_path, copy.deepcopy(peft_config), **config))
        if config.get("gradient_checkpointing") and peft_config is None:
            trainers[-1].model.gradient_checkpointing_enable(config["gradient_checkpointing_kwargs"])
            trainers[-1].model.enable_input_require_grads()
    assert_same_loss(trainers, inputs)


# First, one of each kind: positions in three dimensions, windows, a recurrence.
@pytest.mark.parametrize("name", these_first(MULTIMODAL, "qwen2_5_vl", "gemma4", "qwen3_5"))
def test_loss_of_text_through_classes_that_could_take_images(name, tmp_path):
    """The batch decides, not the class and not TRL's `_is_vlm`."""
    trainers = [make_trainer(cls, build(MULTIMODAL[name]), tmp_path, processing_class=processor()) for cls in BOTH]
    assert all(trainer._is_vlm for trainer in trainers)
    assert_same_loss(trainers, loss_inputs(*awkward_batch()))


@pytest.mark.parametrize("make", ["falcon_h1", MULTIMODAL["qwen3_5"]], ids=["recurrent", "multimodal, recurrent"])
def test_training(make, tmp_path):
    """`tests/trainers/grpo/test_equals_stock.py` has runs with attention alone, with all loss types and options."""
    build(make).save_pretrained(tmp_path / "base")
    options = {"max_steps": 3, "eval_steps": 2, "eval_strategy": "steps", "beta": 0.1, "num_iterations": 2}
    runs = []
    for cls in BOTH:
        torch.manual_seed(0)
        further = {} if isinstance(make, str) else {"processing_class": processor()}
        trainer = make_trainer(cls, str(tmp_path / "base"), tmp_path, **further, **options)
        trainer.train()
        # Less averages over micro-batches, which depend on who shares one.
        wanted = ("loss", "grad_norm", "kl", "eval_loss", "reward")
        runs.append([{key: row[key] for key in wanted if key in row} for row in trainer.state.log_history])
    assert "prefix_sharing/policy/tokens_fraction" in trainer.state.log_history[0] and trainer.sharing.is_active
    for mine, theirs in zip(*runs, strict=True):
        # 1e-4: optimizer steps carry rounding on, Adam's first steps most of all.
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_nf4_qlora_with_a_tool_mask(name, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")
    build(name).save_pretrained(tmp_path / "base")
    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    load = {"quantization_config": tf.BitsAndBytesConfig(**kind), "dtype": torch.float32}
    trainers = []
    for cls in BOTH:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **load)
        trainers.append(make_trainer(cls, model, tmp_path, lora(name)))
        for parameter in trainers[-1].model.parameters():
            if parameter.requires_grad:  # TRL casts the adapters of quantized models to bf16
                parameter.data = parameter.data.float()
    bases = {type(m.base_layer).__name__ for m in trainers[1].model.modules() if hasattr(m, "base_layer")}
    assert bases == {"Linear4bit"}
    inputs = loss_inputs(*awkward_batch())
    inputs["tool_mask"] = inputs["completion_mask"].clone()
    inputs["tool_mask"][:, 2:4] = 0
    assert_same_loss(trainers, inputs)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_bf16_autocast_rounds_no_more_than_stock(name, tmp_path):
    exact = make_trainer(GRPOTrainer, build(name), tmp_path)
    trainers = [make_trainer(cls, build(name), tmp_path, bf16=True) for cls in BOTH]
    reference, stock, ours = losses_of([exact, *trainers], loss_inputs(*awkward_batch()))
    assert trainers[1].sharing.is_active

    def error(result):
        return sum((a - b).float().norm() ** 2 for a, b in zip(result[1], reference[1], strict=True)) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(stock)


@pytest.mark.parametrize("experts", [None, 0, 4])
def test_router_loss_counts_tokens_as_stock_does(experts, tmp_path):
    """Of Qwen3-MoE, and of Granite: TRL 1.16 looks for `num_experts` alone; with that field it is the reference."""
    trainers = []
    for cls in BOTH:
        model = build("qwen3_moe" if experts is None else "granitemoehybrid")
        if experts is None:
            model.config.output_router_logits = True
            model.config.router_aux_loss_coef = 0.5
        else:
            sizes = model.config.to_dict() | {"num_local_experts": experts}
            model = build(lambda sizes=sizes: tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**sizes)))
        trainers.append(make_trainer(cls, model, tmp_path))
    assert trainers[0].aux_loss_enabled and trainers[1].aux_loss_enabled == (experts != 0)
    if experts is not None:
        trainers[0].model.config.num_experts = experts
        trainers[0].aux_loss_enabled = bool(experts)
    assert_same_loss(trainers, loss_inputs(*awkward_batch()))
    if experts != 0:
        aux_losses = [trainer._metrics["train"]["aux_loss"][-1] for trainer in trainers]
        assert aux_losses[1] == pytest.approx(aux_losses[0]) and aux_losses[0] > 0


@pytest.mark.parametrize("name", ["qwen3", *KINDS])
def test_selected_tokens_and_rows_cut_inside_groups(name):
    """As an old policy's pass is cut, which stays within the tokens that stock holds at once."""
    batch = awkward_batch()
    model = build(name)
    draw = torch.Generator().manual_seed(2)
    scored = (torch.rand(len(batch[0]), COMPLETION, generator=draw) < 0.4) & batch[1][:, -COMPLETION:].bool()
    sharing = prepared(model, compared=True)
    seen = []
    budget = 2 * batch[0].shape[1]

    def look(_module, _args, arguments):
        seen.append(arguments["input_ids"].numel())

    model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    assert_equals_stock(model, sharing, batch, scored_BC=scored, tokens_per_pass=budget)
    assert len(seen) > 2 and max(seen[1:]) <= budget


def test_recurrent_layers_branch_at_every_level():
    """T-SPMO's completions begin alike: a state continues from their parting; it is not kept at every token."""
    batch = make_batch([12] * 4, [9] * 4)
    model = build("qwen3_5")
    batch[0][:, -COMPLETION:-2] = batch[0][0, -COMPLETION:-2]
    figures = assert_equals_stock(model, prepared(model), batch)
    # What four rows have in common is their prompt and seven tokens; the last of the others is only ever a target.
    assert (figures.tokens, figures.levels) == (12 + 7 + 4, [19, 4])
    # Prompts of two groups that begin alike, and completions of one of them that do: three levels.
    ids, mask = make_batch([14] * 6, [9] * 6)
    ids[3:, 11:14] += 1
    ids[:3, 14:22] = ids[0, 14:22]
    ids[2, 20] += 1
    figures = assert_equals_stock(model, prepared(model), (ids, mask))
    assert len(figures.levels) >= 2 and set(figures.layer_calls) == {"recurrent", "cascade"}


def test_one_token_completions():
    """One token behind a state would be a decoding step: kernels that write into the state and have no backward."""
    model = build("falcon_h1")
    assert_equals_stock(model, batch=make_batch([12] * 4, [1] * 4))
    # Behind the prompt each row computes one token and predicts another one.
    assert_equals_stock(model, batch=make_batch([12] * 4, [2] * 4))


def test_a_state_that_runs_on_is_caught(monkeypatch):
    """The recurrent layers of a packed row without the row: the error that all of this is there to avoid."""
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.recurrent.layers.install", lambda model: None)
    model = build("qwen3_5")
    with pytest.raises(PrefixSharingError, match="runs padded as in stock TRL"):
        one_pass(model, prepared(model, "cascade"))


# Lengths, groups and scored tokens all differ.
BATCHES = [
    ([14, 14, 9, 9, 9], [9, 4, 6, 6, 6]),
    ([8, 8, 8, 8], [3, 2, 7, 9]),
    ([12, 11, 11], [5, 9, 1]),
    ([7, 7, 6, 6, 5], [9, 9, 8, 2, 4]),
]


@pytest.mark.slow
def test_new_batches_are_not_compiled_anew():
    """A packed row's layout and the scoring of its tokens stay out of the graphs."""
    model = build("llama")
    graphs = []
    counts = []
    sharing = prepared(model, compared=True)
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for lengths in BATCHES:
        ids, mask = make_batch(*lengths)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": completion_labels(ids, mask)}
        ours = compiled(**inputs, fused_lm_head=True).log_probs
        assert sharing.figures.layer_calls == ["cascade"] * 2  # counted, also inside a compiled model
        torch.testing.assert_close(ours, model(**inputs, fused_lm_head=True).log_probs, atol=1e-5, rtol=1e-5)
        counts.append(len(graphs))
    torch._dynamo.reset()
    # The second batch shows which sizes change; from then on the graphs serve every batch.
    assert counts[0] and counts[2:] == [counts[2]] * len(counts[2:]), counts
