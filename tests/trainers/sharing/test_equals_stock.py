"""Losses, gradients and whole runs of GRPO equal stock TRL's, for models with code of their own, quantized ones, and
in half precision. `tests/prefix_sharing/test_equals_stock.py` compares the passes of every family.
"""

import copy

import pytest
import torch
import transformers as tf
from peft import LoraConfig
from trl import GRPOTrainer

from tests.prefix_sharing.helpers import (
    COUNTING,
    MULTIMODAL,
    assert_equal_gradients,
    awkward_batch,
    build,
    small,
)
from tests.prefix_sharing.test_equals_stock import KINDS
from tests.tiny import these_first
from tests.trainers.helpers import loss_inputs, losses_of, make_trainer, processor
from trl_fsdp_qlora import EfficientGRPOTrainer

BOTH = GRPOTrainer, EfficientGRPOTrainer
# PEFT refuses adapters on projections out of the state for state space models.
TARGETS = dict.fromkeys(KINDS, r".*(in_proj|in_proj_qkv|q_proj|v_proj|w1|up_proj)")
RE_ENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def lora(name):
    return LoraConfig(r=4, target_modules=TARGETS.get(name, "all-linear"), init_lora_weights=False)


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
    assert trainers[1].sharing.status.packs, trainers[1].sharing.describe()
    assert trainers[1]._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.7
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance)


# First, each model once, and the option that reads entropies; `test_changed_models.py` recomputes layers of each kind.
LOSSES_OFTEN = [*LOSSES[: len(COUNTING) + len(KINDS)], ("qwen3_5", "entropy quantile")]


@pytest.mark.parametrize(("name", "options"), these_first(LOSSES, *LOSSES_OFTEN))
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


@pytest.mark.parametrize("name", these_first(["falcon_h1", "qwen3_5"], "qwen3_5"))
def test_training(name, tmp_path):
    """`tests/trainers/grpo/test_trainer.py` has runs with attention alone, with all loss types and options."""
    build(MULTIMODAL.get(name, name)).save_pretrained(tmp_path / "base")
    options = {"max_steps": 3, "eval_steps": 2, "eval_strategy": "steps", "beta": 0.1, "num_iterations": 2}
    runs = []
    for cls in BOTH:
        torch.manual_seed(0)
        further = {"processing_class": processor()} if name in MULTIMODAL else {}
        trainer = make_trainer(cls, str(tmp_path / "base"), tmp_path, **further, **options)
        trainer.train()
        # Less averages over micro-batches, which depend on who shares one.
        wanted = ("loss", "grad_norm", "kl", "eval_loss", "reward")
        runs.append([{key: row[key] for key in wanted if key in row} for row in trainer.state.log_history])
    assert "prefix_sharing/policy/tokens_fraction" in trainer.state.log_history[0] and trainer.sharing.status.packs
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
    assert trainers[1].sharing.status.packs

    def error(result):
        return sum((a - b).float().norm() ** 2 for a, b in zip(result[1], reference[1], strict=True)) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(stock)


@pytest.mark.parametrize("experts", [None, 0, 4])
def test_router_loss_counts_tokens_as_stock_does(experts, tmp_path):
    """Of Qwen3-MoE, and of Granite: TRL 1.16 looks for `num_experts` alone; with that field it is the reference."""
    if experts and tf.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 gives stock TRL no router logits of Granite's")
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


def test_a_model_that_cannot_be_packed_trains_padded(tmp_path):
    """Dropout of attention draws the masks that it draws in stock. tests/prefix_sharing has all such models."""
    inputs = loss_inputs(*awkward_batch())
    results = []
    for cls in BOTH:
        model = build(small("GPT2", "LMHeadModel", attn_pdrop=0.1))
        trainer = make_trainer(cls, model, tmp_path, skip_zero_advantage=False)
        torch.manual_seed(1)
        results += losses_of([trainer], inputs)
    assert results[0][0] == results[1][0]
    assert_equal_gradients(results[1][1], results[0][1], tolerance=1e-6)
    assert not trainer.sharing.status.packs


def test_generation_and_checkpoints_see_the_models_attention(tmp_path, monkeypatch):
    """transformers' continuous batching refuses implementations whose name it does not know."""
    trainer = make_trainer(EfficientGRPOTrainer, build("qwen3"), tmp_path)
    config = trainer.model.config
    seen = []
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: seen.append(config._attn_implementation))
    trainer._generate([])
    assert seen == ["sdpa"] and config._attn_implementation == "prefix_sharing_sdpa"
    trainer.model.save_pretrained(tmp_path)
    assert "prefix_sharing" not in (tmp_path / "config.json").read_text()
