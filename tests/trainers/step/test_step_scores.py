"""An optimizer step in any number of passes: every loss's gradient is that of padded micro-batches, on every kind of
layer.
"""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig

from tests.prefix_sharing.helpers import assert_equal_gradients, build, closed, gradients, make_batch, small
from tests.prefix_sharing.test_images import COMPLETION as COMPLETION_OF_IMAGES
from tests.prefix_sharing.test_images import with_images
from tests.tiny import LOSS_TYPES, these_first
from tests.trainers.helpers import loss_inputs, make_trainer
from tests.trainers.sharing.test_equals_stock import lora
from tests.trainers.sharing.test_images import ADAPTER
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.compat.trl import split_pixel_values_by_grid
from trl_fsdp_qlora.engines.vllm.correction import WeightSyncCheck
from trl_fsdp_qlora.fsdp2_qlora.experts import QUANTIZES_WHILE_LOADING, packed_experts
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit
from trl_fsdp_qlora.prefix_sharing import passes

ROWS = 12
# Two groups of six, of two prompts of other lengths.
PROMPT_LENGTHS = [14] * 6 + [9] * 6
COMPLETION_LENGTHS = [9, 1, 4, 7, 6, 9, 6, 9, 2, 3, 8, 5]
FAMILIES = ("qwen3", "gemma3", "gpt_oss", "qwen3_5", "lfm2", "mamba2", "qwen3_vl")
# The rows of `test_images.ROWS` that make a step: two groups with an image each, one without, one with two images.
ROWS_WITH_IMAGES = [0, 1, 2, 0, 3, 4, 3, 5, 6, 7, 8, 10]
# Micro-batches, and the passes of the whole step.
CUTS = [(12, 1), (12, 2), (12, 3), (12, 12), (4, 2), (1, 2), (1, 3), (1, 12)]
FEW_CUTS = [(12, 1), (12, 3), (4, 2), (1, 3)]
# Of the largest gradient. Stock's own float32 gradients are off from float64's by up to 1.6e-6, and with VESPO, whose
# weights are exponentials, by 5.1e-6 (Qwen3, an AMD EPYC). Two float32 results differ by up to twice that, and another
# processor adds in other orders; recurrent layers' scans add most.
TOLERANCE = 1e-5
TOLERANCE_OF = {"vespo": 2e-5, "qwen3_5": 2e-5, "mamba2": 2e-5}
# PEFT adapts these layers of Mamba-2 and no others.
ADAPTED = {"mamba2": LoraConfig(r=4, target_modules=["in_proj"], init_lora_weights=False), "qwen3_vl": ADAPTER}
# Mixtures of experts with a router loss that is as large as the policy's.
OPTIONS = {name: {"router_aux_loss_coef": 0.1} for name in ("gpt_oss", "qwen3_moe")}


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch):
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)


def trainer_of(name, tmp_path, kind="lora", **changes):
    model = with_images(name)[0] if name == "qwen3_vl" else build(name)
    if kind != "lora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")
        model.save_pretrained(tmp_path / "base")
        config = tf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        load = {"quantization_config": config, "dtype": torch.float32}
        with experts_in_4bit() if kind == "nf4 experts" else nullcontext():
            model = type(model).from_pretrained(tmp_path / "base", **load)
    changes = OPTIONS.get(name, {}) | changes
    trainer = make_trainer(EfficientGRPOTrainer, model, tmp_path, ADAPTED.get(name) or lora(name), **changes)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models to bf16
            parameter.data = parameter.data.float()
    trainer.sharing.status.compared.update(itertools.product((False, True), repeat=2))
    return trainer


def inputs_of(trainer) -> dict[str, torch.Tensor]:
    """A batch with old log-probabilities near the policy's; with images if the model has a tower."""
    vision = {}
    if getattr(trainer.model.config, "vision_config", None) is None:
        inputs = loss_inputs(*make_batch(PROMPT_LENGTHS, COMPLETION_LENGTHS))
    else:
        batch = with_images("qwen3_vl")[1].rows(np.array(ROWS_WITH_IMAGES))
        inputs = loss_inputs(batch.input_ids, batch.attention_mask, COMPLETION_OF_IMAGES)
        vision = {**batch.vision, "num_images": batch.num_images}
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    with torch.no_grad(), closed(trainer.sharing):
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, **vision)[0]
    noise = 0.1 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(4))
    # No ratio is near an end of the clipped range (log 0.8 is -0.22): rounding would clip a token or not, and with it
    # a part of the gradient is there or not.
    noise = torch.where(noise.abs() < 0.1, noise, 0.5 * noise.sign())
    inputs["old_per_token_logps"] = logps + noise
    if vision:  # as a generation batch is cut into micro-batches
        inputs.update(split_pixel_values_by_grid(vision))
    return inputs


def sliced(inputs, count) -> list[dict[str, torch.Tensor]]:
    rows = ROWS // count

    def cut(x, i):
        is_number = isinstance(x, torch.Tensor) and x.ndim == 0
        return x if is_number else x[i * rows : (i + 1) * rows]

    return [{name: cut(x, i) for name, x in inputs.items()} for i in range(count)]


def step_gradients(trainer, micro_batches, tokens_per_pass) -> list[torch.Tensor]:
    """The gradients of an optimizer step over given micro-batches."""
    count = len(micro_batches)
    trainer.args.tokens_per_pass = tokens_per_pass
    # TRL draws completions in front of the first of them.
    trainer.args.steps_per_generation = count + 1
    trainer._buffered_inputs = [None, *micro_batches]
    trainer._step = 1
    trainer.current_gradient_accumulation_steps = count
    for number in range(count):
        trainer.accelerator.gradient_state._set_sync_gradients(number == count - 1)
        trainer.training_step(trainer.model, None, None)
    return gradients(trainer.model)


def assert_cuts_give_stock_gradients(trainer, monkeypatch, cuts, tolerance, inputs=None):
    inputs = inputs_of(trainer) if inputs is None else inputs
    planned = []
    plan_step = trainer.sharing.plan_step

    def recorded(*args, **kwargs):
        planned.append(plan_step(*args, **kwargs))
        return planned[-1]

    monkeypatch.setattr(trainer.sharing, "plan_step", recorded)
    for count, pass_count in cuts:
        micro_batches = sliced(inputs, count)
        with closed(trainer.sharing):
            expected = step_gradients(trainer, micro_batches, 0)
        monkeypatch.setattr(
            passes.PassPlan, "fits", lambda self, limit, most=pass_count: len(self.rows_of_pass) == most
        )
        planned.clear()
        actual = step_gradients(trainer, micro_batches, 1)
        assert [len(plan.rows_of_pass) for plan in planned] == [pass_count]
        assert_equal_gradients(actual, expected, tolerance)


FAST = {("lora", "dapo", name) for name in ("qwen3", "mamba2")}
# Layers know nothing of the loss: each family with one loss, and each loss with attention and with a recurrence.
CASES = [
    *itertools.product(["lora", "nf4"], ["dapo"], FAMILIES),
    *(("lora", loss_type, name) for loss_type in LOSS_TYPES if loss_type != "dapo" for name in ("qwen3", "qwen3_5")),
]


@pytest.mark.parametrize(
    "kind, loss_type, name",
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.exhaustive) for case in CASES],
)
def test_any_number_of_passes(tmp_path, monkeypatch, name, loss_type, kind):
    level = "sequence" if loss_type == "luspo" else "token"
    trainer = trainer_of(name, tmp_path, kind, loss_type=loss_type, importance_sampling_level=level)
    tolerance = max(TOLERANCE_OF.get(name, TOLERANCE), TOLERANCE_OF.get(loss_type, TOLERANCE))
    assert_cuts_give_stock_gradients(trainer, monkeypatch, CUTS, tolerance)


@pytest.mark.parametrize("name", these_first(["qwen3_moe", "gpt_oss"], "gpt_oss"))
@pytest.mark.skipif(not QUANTIZES_WHILE_LOADING, reason="experts stay in 16 bit before transformers 5.23")
def test_experts_packed_into_4_bits(tmp_path, monkeypatch, name):
    trainer = trainer_of(name, tmp_path, "nf4 experts")
    assert packed_experts(trainer.model)
    assert_cuts_give_stock_gradients(trainer, monkeypatch, FEW_CUTS, TOLERANCE)


@pytest.mark.parametrize("extra", ["tools", "engine"])
def test_what_a_batch_has_of_tools_and_of_an_engine(tmp_path, monkeypatch, extra):
    """Tokens that a tool wrote; vLLM's log-probabilities, against which the loss's own values are weighed."""
    trainer = trainer_of("qwen3", tmp_path)
    inputs = inputs_of(trainer)
    if extra == "tools":
        inputs["tool_mask"] = inputs["completion_mask"].clone()
        inputs["tool_mask"][:, 2:4] = 0
    else:
        inputs["sampling_per_token_logps"] = inputs.pop("old_per_token_logps")
        trainer.use_vllm = True
        trainer.weight_sync_check = WeightSyncCheck(False, draws_ahead=False)
    assert_cuts_give_stock_gradients(trainer, monkeypatch, FEW_CUTS, TOLERANCE, inputs)


def test_a_layer_that_attends_twice_in_a_forward(tmp_path, monkeypatch):
    """Differential attention calls its function twice a layer: its prompts were not kept, and a pass without gradients
    failed.
    """
    trainer = trainer_of(small("DiffLlama"), tmp_path)
    assert_cuts_give_stock_gradients(trainer, monkeypatch, [(12, 12), (1, 12)], TOLERANCE)


@pytest.mark.parametrize("name", these_first(["qwen3_moe", "gpt_oss"], "qwen3_moe"))
def test_the_router_loss_of_each_micro_batch(tmp_path, monkeypatch, name):
    """It counts every token of a micro-batch, also those that another pass computed."""
    trainer = trainer_of(name, tmp_path, router_aux_loss_coef=10.0)
    assert trainer.aux_loss_enabled
    # All but the router loss is small next to it, so that its gradient decides.
    inputs = inputs_of(trainer)
    inputs["advantages"] = 0.01 * inputs["advantages"]
    losses = trainer._metrics["train"]["aux_loss"]
    for cut in FEW_CUTS:
        losses.clear()
        assert_cuts_give_stock_gradients(trainer, monkeypatch, [cut], TOLERANCE, inputs)
        expected = losses[: cut[0]]
        actual = losses[cut[0] :]
        assert actual == pytest.approx(expected, rel=1e-5) and min(expected) > 0


def test_the_router_loss_of_rows_without_a_label(tmp_path, monkeypatch):
    """Such rows are computed for the router loss alone."""
    trainer = trainer_of("qwen3_moe", tmp_path, router_aux_loss_coef=1.0)
    inputs = inputs_of(trainer)
    inputs["completion_mask"][[1, 4, 5, 8]] = 0
    assert_cuts_give_stock_gradients(trainer, monkeypatch, FEW_CUTS, TOLERANCE, inputs)
