"""Log-probabilities, losses, gradients and whole runs equal stock TRL's: every family, loss type, option and precision."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import LoraConfig
from trl import GRPOTrainer

from tests.distributed.launch import launch
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing.attention import UnsupportedAttention, install
from trl_fsdp_qlora.prefix_sharing.layout import pack
from trl_fsdp_qlora.prefix_sharing.recurrent import install as install_recurrent
from trl_fsdp_qlora.scoring.logprobs import add_scoring_head

from .helpers import (
    COMPLETION,
    COUNTING,
    LOSS_TYPES,
    MASKED,
    MULTIMODAL,
    RECURRENT,
    SUPPORTED,
    assert_equal_gradients,
    awkward_batch,
    build,
    gradients,
    loss_inputs,
    losses_of,
    make_trainer,
    packed_log_probs,
    processor,
    stock_log_probs,
    with_stock_head,
)

BOTH = GRPOTrainer, EfficientGRPOTrainer
# One recurrent model of each kind: gated delta rule, short convolution, state space models of both generations.
KINDS = ("qwen3_5", "lfm2", "falcon_h1", "jamba")
MAKE = {**SUPPORTED, **COUNTING, **MASKED, **{name: make for name, (make, _) in RECURRENT.items()}}
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
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
RE_ENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def lora(name):
    return LoraConfig(r=4, target_modules=TARGETS.get(name, "all-linear"), init_lora_weights=False)


@pytest.mark.parametrize("name", LAYERS)
def test_log_probs_entropy_and_gradients_on_each_backend(name):
    model = with_stock_head(build(MAKE[name]))
    ids, mask = awkward_batch()
    real = mask[:, -COMPLETION:].bool()
    weight = torch.randn(len(ids), COMPLETION, 2, generator=torch.Generator().manual_seed(5)) * real[:, :, None]
    stock = torch.stack(stock_log_probs(model, ids, mask), -1)
    (stock * weight).sum().backward()
    reference = gradients(model)

    install(model)
    install_recurrent(model)
    add_scoring_head(model, 0.9)
    with torch.no_grad():  # what does not ask for a packed row is untouched
        assert torch.equal(stock_log_probs(model, ids, mask)[0], stock[..., 0])
    layout = pack(ids, mask, COMPLETION)
    for backend in ("auto", "cascade", "two_part"):
        layout.layer_calls.clear()
        try:
            ours = torch.stack(packed_log_probs(model, layout, backend), -1)
        except UnsupportedAttention:
            assert backend == "cascade" and "two_part" in LAYERS[name]
            continue
        if backend == "auto":
            assert layout.layer_calls == LAYERS[name]
        # Rounding of float32 in sums of this length.
        torch.testing.assert_close(ours, torch.where(real[:, :, None], stock, 0.0), atol=2e-5, rtol=1e-5)
        (ours * weight).sum().backward()
        assert_equal_gradients(gradients(model), reference, tolerance=2e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "qwen3_moe"])
def test_every_loss_type(name, tmp_path):
    ids, mask = awkward_batch()
    inputs = loss_inputs(ids, mask)
    stock = make_trainer(GRPOTrainer, build(SUPPORTED[name]), tmp_path)
    backends = ["two_part"] + ([] if "two_part" in LAYERS[name] else ["cascade"])
    trainers = {
        backend: make_trainer(EfficientGRPOTrainer, build(SUPPORTED[name]), tmp_path, prefix_sharing=backend)
        for backend in backends
    }
    noise = torch.randn(len(ids), COMPLETION, generator=torch.Generator().manual_seed(7)) * mask[:, -COMPLETION:]
    with torch.no_grad():
        logps = stock._get_per_token_logps_and_entropies(stock.model, ids, mask, COMPLETION)[0]
    # Off-policy, and away from a reference, so that clipping and KL have a gradient.
    inputs |= {"old_per_token_logps": logps + 0.15 * noise, "ref_per_token_logps": logps - 0.2 * noise}
    for loss_type in LOSS_TYPES:
        for trainer in (stock, *trainers.values()):
            trainer.loss_type, trainer.beta = loss_type, 0.1
        expected, *found = losses_of([stock, *trainers.values()], inputs)
        for ours in found:
            # VESPO weights a sequence by exp(k Σ log-ratio), which multiplies the rounding of all its log-probabilities.
            assert ours[0] == pytest.approx(expected[0], rel=5e-5 if loss_type == "vespo" else 1e-5), loss_type
            assert_equal_gradients(ours[1], expected[1])
    for backend, trainer in trainers.items():
        assert trainer.prefix_sharing.active()
        assert trainer._metrics["train"][f"prefix_sharing/policy/layers_{backend}"][-1] == 1.0


OPTIONS = {
    "plain": {},
    "entropy quantile": {"top_entropy_quantile": 0.6},
    "checkpointing": CHECKPOINTING,
    "re-entrant checkpointing": RE_ENTRANT,
    "adapters": {"lora": True},
    "adapters, re-entrant checkpointing": {"lora": True, **RE_ENTRANT},
}
LOSSES = [
    *((name, "plain") for name in (*COUNTING, *MASKED)),
    *((name, "re-entrant checkpointing") for name in (*COUNTING, *MASKED)),
    *((name, options) for name in KINDS for options in OPTIONS),
]


def assert_same_loss(trainers, inputs, tolerance=2e-5):
    stock, ours = losses_of(trainers, inputs)
    assert trainers[1].prefix_sharing.active(), trainers[1].prefix_sharing.describe()
    assert trainers[1]._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.7
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance)


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_loss_of_models_with_code_of_their_own(name, options, tmp_path):
    """They count positions, compute attention or keep a state by themselves."""
    config = dict(OPTIONS[options])
    peft_config = lora(name) if config.pop("lora", False) else None
    ids, mask = awkward_batch()
    # Padding as a tokenizer pads: RoBERTa counts by it.
    inputs = loss_inputs(ids.masked_fill(mask == 0, 1), mask)
    inputs["advantages"][4:7] = (
        0 if name in KINDS else inputs["advantages"][4:7]
    )  # a group without a signal is left out
    trainers = []
    for cls in BOTH:
        torch.manual_seed(0)
        trainers.append(make_trainer(cls, build(MAKE[name]), tmp_path, copy.deepcopy(peft_config), **config))
        if config.get("gradient_checkpointing") and peft_config is None:
            trainers[-1].model.gradient_checkpointing_enable(config["gradient_checkpointing_kwargs"])
            trainers[-1].model.enable_input_require_grads()
    assert_same_loss(trainers, inputs)
    kind = "recurrent" if name in KINDS else "dense"
    metrics = trainers[1]._metrics["train"]
    assert metrics.get(f"prefix_sharing/policy/layers_{kind}", [0])[-1] >= (0.5 if name not in COUNTING else 0)
    if peft_config is not None:
        assert any("in_proj" in n for n, p in trainers[1].model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_loss_of_text_through_classes_that_could_take_images(name, tmp_path):
    """The batch decides, not the class and not TRL's `_is_vlm`."""
    trainers = [make_trainer(cls, build(MULTIMODAL[name]), tmp_path, processing_class=processor()) for cls in BOTH]
    assert all(trainer._is_vlm for trainer in trainers)
    assert_same_loss(trainers, loss_inputs(*awkward_batch()))


# A model, options of both trainers, what else.
RUNS = {
    "reference model, two iterations": ("qwen3", {"beta": 0.1, "num_iterations": 2}),
    "accumulation, dapo": ("qwen3", {"gradient_accumulation_steps": 2, "loss_type": "dapo"}),
    "adapter off as reference": ("qwen3", {"beta": 0.1, "num_iterations": 2, "lora": True}),
    "checkpointing": ("qwen3", {"gradient_checkpointing": True}),
    "re-entrant checkpointing": ("qwen3", {**RE_ENTRANT, "lora": True, "beta": 0.1}),
    "truncated completions masked": ("qwen3", {"mask_truncated_completions": True}),
    **{name: (name, {"beta": 0.1, "num_iterations": 2}) for name in KINDS},
    "multimodal": (MULTIMODAL["gemma3"], {"beta": 0.1, "num_iterations": 2}),
    "multimodal, recurrent": (MULTIMODAL["qwen3_5"], {"beta": 0.1, "num_iterations": 2}),
}


def history(trainer) -> list[dict]:
    """What a run logged, less averages over micro-batches, which depend on who shares one."""
    wanted = ("loss", "grad_norm", "kl", "eval_loss", "reward")
    return [{k: row[k] for k in wanted if k in row} for row in trainer.state.log_history if "train_runtime" not in row]


def assert_same_run(ours, stock):
    assert len(ours) == len(stock) > 0
    for mine, theirs in zip(ours, stock, strict=True):
        # 1e-4: optimizer steps carry rounding on, Adam's first steps most of all.
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_training(name, tmp_path):
    make, options = RUNS[name]
    build(MAKE.get(make, make)).save_pretrained(tmp_path / "base")
    options = {"max_steps": 3, "eval_steps": 2, "eval_strategy": "steps", **options}
    peft_config = lora(make) if options.pop("lora", False) else None
    if "multimodal" in name:
        options["processing_class"] = processor()
    results = []
    for cls in BOTH:
        torch.manual_seed(0)
        trainer = make_trainer(cls, str(tmp_path / "base"), tmp_path, copy.deepcopy(peft_config), **options)
        trainer.train()
        results.append(history(trainer))
    assert trainer.prefix_sharing.active()
    assert any("prefix_sharing/policy/tokens_fraction" in row for row in trainer.state.log_history)
    assert_same_run(results[1], results[0])


def test_several_steps_a_generation_equal_the_padded_path(tmp_path):
    """Each generation batch is cut into two optimizer steps; old log-probabilities come from one packed pass."""
    build(SUPPORTED["qwen3"]).save_pretrained(tmp_path / "base")
    results = []
    for choice in ("off", "auto"):
        torch.manual_seed(0)
        options = {"prefix_sharing": choice, "max_steps": 4, "steps_per_generation": 2, "beta": 0.1}
        trainer = make_trainer(EfficientGRPOTrainer, str(tmp_path / "base"), tmp_path, **options)
        trainer.train()
        results.append(history(trainer))
    assert_same_run(results[1], results[0])
    first = trainer.state.log_history[0]
    assert first["prefix_sharing/no_grad/tokens_fraction"] < 1
    assert first["prefix_sharing/no_grad/layers_cascade"] == 1


def test_tool_mask(tmp_path):
    inputs = loss_inputs(*awkward_batch())
    inputs["tool_mask"] = inputs["completion_mask"].clone()
    inputs["tool_mask"][:, 2:4] = 0
    assert_same_loss([make_trainer(cls, build(SUPPORTED["qwen3"]), tmp_path) for cls in BOTH], inputs)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_nf4_qlora(name, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")
    build(MAKE[name]).save_pretrained(tmp_path / "base")
    quantization = tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    trainers = []
    for cls in BOTH:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=quantization, dtype=torch.float32
        )
        trainers.append(make_trainer(cls, model, tmp_path, lora(name)))
        for parameter in trainers[-1].model.parameters():
            if (
                parameter.requires_grad
            ):  # TRL casts the adapters of quantized models to bf16; compare without that rounding
                parameter.data = parameter.data.float()
    bases = {type(m.base_layer).__name__ for m in trainers[1].model.modules() if hasattr(m, "base_layer")}
    assert bases == {"Linear4bit"}
    assert_same_loss(trainers, loss_inputs(*awkward_batch()))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_bf16_autocast_rounds_no_more_than_stock(name, tmp_path):
    exact = make_trainer(GRPOTrainer, build(MAKE[name]), tmp_path)
    trainers = [make_trainer(cls, build(MAKE[name]), tmp_path, bf16=True) for cls in BOTH]
    reference, stock, ours = losses_of([exact, *trainers], loss_inputs(*awkward_batch()))
    assert trainers[1].prefix_sharing.active()

    def error(result):
        return sum((a - b).float().norm() ** 2 for a, b in zip(result[1], reference[1], strict=True)) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(stock)


def granite(experts: int):
    sizes = build(MAKE["granitemoehybrid"]).config.to_dict() | {"num_local_experts": experts}
    return build(lambda: tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**sizes)))


@pytest.mark.parametrize("experts", [None, 0, 4])
def test_router_loss_counts_tokens_as_stock_does(experts, tmp_path):
    """Of Qwen3-MoE, and of Granite: TRL 1.16 looks for `num_experts` alone; where it is told, it is the reference."""
    trainers = []
    for cls in BOTH:
        model = build(SUPPORTED["qwen3_moe"]) if experts is None else granite(experts)
        if experts is None:
            model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
        trainers.append(make_trainer(cls, model, tmp_path))
    assert trainers[0].aux_loss_enabled and trainers[1].aux_loss_enabled == (experts != 0)
    if experts is not None:
        trainers[0].model.config.num_experts = experts
        trainers[0].aux_loss_enabled = bool(experts)
    assert_same_loss(trainers, loss_inputs(*awkward_batch()))
    if experts != 0:
        aux_losses = [trainer._metrics["train"]["aux_loss"][-1] for trainer in trainers]
        assert aux_losses[1] == pytest.approx(aux_losses[0]) and aux_losses[0] > 0


def test_old_policy_pass_stays_within_the_tokens_stock_holds_at_once(tmp_path):
    trainer = make_trainer(EfficientGRPOTrainer, build(SUPPORTED["qwen3"]), tmp_path)
    ids, mask = awkward_batch()
    seen = []
    forward = trainer.model.forward

    def counting(*args, **kwargs):
        seen.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    with torch.no_grad():
        whole = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION)[0]
        trainer.model.forward = counting
        parts = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION, batch_size=2)[0]
    assert len(seen) > 1 and max(seen) <= 2 * ids.shape[1]
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=1e-5)


def test_overridden_signature_is_trls():
    ours = inspect.signature(EfficientGRPOTrainer._get_per_token_logps_and_entropies)
    assert ours == inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_two_processes_with_uneven_work_equal_the_padded_path(name, tmp_path):
    """DDP on gloo; on one rank every completion is masked out, so it has nothing to compute but must not hang."""
    launch(Path(__file__).with_name("ddp_run.py"), tmp_path, name)
    results = torch.load(tmp_path / "results.pt")
    packed, padded = results["auto"], results["off"]
    assert packed["packed"] and not padded["packed"]
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4, abs=1e-6)
    assert_equal_gradients(packed["empty_gradient"], padded["empty_gradient"])
    for ours, stock in zip(packed["weights"], padded["weights"], strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
