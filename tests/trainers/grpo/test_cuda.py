"""Each feature on a CUDA device against stock TRL, or against itself run padded, on the same batch; and on two
devices.

Written without a device at hand; docs/gpu.md has what "on the emulated device" means for these tests.
"""

import copy

import pytest
import torch
from accelerate import dispatch_model
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import character_tokenizer, config, lora, save_tiny_model, tiny_model, trainer
from tests.trainers.a_star_po.tiny import has_digit, problems
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)
from trl_fsdp_qlora.compat.older_gpus import lacks_bf16

MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_of_several_gpus"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
pytestmark = MARKS
STOCK = (GRPOTrainer, GRPOConfig)
OURS = (EfficientGRPOTrainer, EfficientGRPOConfig)
T_SPMO = (TSPMOTrainer, TSPMOConfig)


def make(both, folder, **changes):
    """A trainer on the device, float32 and with LoRA by default."""
    result = trainer(*both, folder, **{"peft_config": lora(), "use_cpu": False, "bf16": False} | changes)
    result.model.train()
    result.current_gradient_accumulation_steps = 1
    return result


def a_star_po(folder, prompts: int, **changes) -> AStarPOTrainer:
    """A*-PO in bfloat16; one completion per prompt, so it has a model and a reward of its own."""
    settings = {"num_generations": 1, "bf16": True, "use_cpu": False, "max_steps": 2} | changes
    args = config(AStarPOConfig, folder, **settings)
    data = problems(prompts)
    options = {"processing_class": character_tokenizer(), "peft_config": lora()}
    return AStarPOTrainer(tiny_model(), has_digit, args, data, **options)


def drawn(ours):
    """A batch of two groups with advantages from a fixed seed."""
    batch = ours._prepare_inputs([ours.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    advantages = torch.randn(batch["advantages"].shape, generator=torch.Generator().manual_seed(0))
    batch["advantages"] = advantages.to(batch["advantages"].device)
    return batch


def loss_and_gradient(ours, batch):
    """Of one micro-batch, in mixed precision if the trainer's arguments ask for it."""
    ours.model.zero_grad()
    with ours.accelerator.autocast():
        loss = ours._compute_loss(ours.model, copy.copy(batch))
    loss.backward()
    gradients = [p.grad.flatten().float().cpu() for p in ours.model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def assert_equal(got, want):
    """Losses, and gradients within 1e-4 of the largest: float32 and another order of its sums."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    assert want[1].abs().max() > 0
    assert (got[1] - want[1]).abs().max() <= 1e-4 * want[1].abs().max()


def side_by_side(first, second):
    """Loss and gradient of two trainers with the first one's weights, on a batch that the second drew."""
    second.model.load_state_dict({name: x.cpu() for name, x in first.model.state_dict().items()})
    batch = drawn(second)
    return loss_and_gradient(first, batch), loss_and_gradient(second, batch)


def beside_stock(tmp_path, **changes):
    """Loss and gradient of stock and of ours, and our trainer."""
    ours = make(OURS, tmp_path / "ours", **changes)
    differences = side_by_side(make(STOCK, tmp_path / "stock", **changes), ours)
    assert ours.sharing.status.packs, ours.sharing.describe()
    return *differences, ours


def losses_of_a_run(ours) -> list[dict]:
    ours.train()
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == ours.args.max_steps and torch.tensor([row["loss"] for row in rows]).isfinite().all()
    return rows


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"torch_compile": True, "torch_compile_backend": "eager"},  # traced, not code-generated
    ],
    ids=["plain", "checkpointed", "reentrant", "compiled"],
)
def test_float32_equals_stock(tmp_path, changes):
    want, got, ours = beside_stock(tmp_path, **changes)
    assert_equal(got, want)
    losses_of_a_run(ours)


def test_bfloat16_is_as_near_to_float32_as_stock_is(tmp_path):
    (_, exact), _, _ = beside_stock(tmp_path / "fp32")
    (_, stock), (_, got), ours = beside_stock(tmp_path / "bf16", bf16=True)
    backend = "two_part" if lacks_bf16(ours.accelerator.device) else "cascade"
    assert ours._metrics["train"][f"prefix_sharing/policy/layers_{backend}"][-1] == 1
    # Both round every product; twice stock's own distance leaves room for another order of the sums.
    assert (got - exact).norm() <= 2 * (stock - exact).norm() + 1e-6


@pytest.mark.parametrize("method", ["s_grpo", "t_spmo"])
def test_packed_equals_padded(tmp_path, method):
    """The same tokens are drawn for a step, whichever way they are computed; T-SPMO's completions share beginnings."""
    both, changes = (OURS, {"token_selection": "s_grpo"}) if method == "s_grpo" else (T_SPMO, {})
    results = []
    batch = None
    for sharing in ("auto", "off"):
        ours = make(both, tmp_path / sharing, prefix_sharing=sharing, **changes)
        if batch is None:
            state = copy.deepcopy(ours.model.state_dict())
            batch = drawn(ours)
            batch["completion_ids"][:, 0] = batch["completion_ids"][0, 0]
        ours.model.load_state_dict(state)
        results.append(loss_and_gradient(ours, batch))
        assert ours.sharing.status.packs == (sharing == "auto")
    assert_equal(*results)


def test_half_precision_and_a_star_po_train(tmp_path):
    for precision in ("fp16", "bf16"):
        ours = make(OURS, tmp_path, phase_metrics="peaks", **{precision: True})
        assert all(row["memory/forward_backward_peak_mib"] > 0 for row in losses_of_a_run(ours))
        assert ours.sharing.status.packs, ours.sharing.describe()
    losses_of_a_run(a_star_po(tmp_path, prompts=8, per_device_train_batch_size=4))


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the package flash-attn")
def test_flash_attention_2_shares_prompts(tmp_path):
    if lacks_bf16(torch.device("cuda")):
        pytest.skip("flash-attn wants compute capability 8.0")
    model = tiny_model().to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    ours = make(OURS, tmp_path, model=model, bf16=True)
    assert [row["prefix_sharing/policy/layers_cascade"] for row in losses_of_a_run(ours)] == [1.0] * 3


# --- split over two devices -----------------------------------------------------------------------------------------
# TRL loads a checkpoint by its name with `device_map="auto"` unless a launcher started the script.

TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def split(both, folder, **changes):
    """A trainer on a model that TRL loads by its name; the devices' memory is set too small for all of it."""
    size = sum(p.numel() * p.element_size() for p in tiny_model().parameters())
    options = {
        "model": save_tiny_model(folder / "model"),
        "model_init_kwargs": {"max_memory": {0: int(0.75 * size), 1: 2 * size}},
    }
    ours = make(both, folder, **options, **changes)
    assert {p.device.index for p in ours.model.parameters()} == {0, 1}
    return ours


CASES = {
    "cascade": {},
    "two_part": {"prefix_sharing": "two_part"},
    "padded": {"prefix_sharing": "off"},
    "KL term": {"beta": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "S-GRPO": {"token_selection": "s_grpo"},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "nested rows": {},
    "stock": {},
}


@TWO_DEVICES
@pytest.mark.parametrize("case", CASES)
def test_a_split_model_equals_one_device_and_stock(tmp_path, case):
    both = T_SPMO if case == "nested rows" else OURS
    ours = split(both, tmp_path / "split", **CASES[case])
    if case == "stock":
        other = split(STOCK, tmp_path / "stock")
    else:
        other = make(both, tmp_path / "whole", model=tiny_model().to("cuda:0"), **CASES[case])
    want, got = side_by_side(other, ours)
    assert_equal(got, want)
    assert ours.sharing.status.packs == (case != "padded"), ours.sharing.describe()
    losses_of_a_run(ours)


@TWO_DEVICES
def test_with_an_untied_head_on_the_last_device(tmp_path):
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    trainers = []
    for dispatch in (False, True):
        model = tiny_model()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        placed = dispatch_model(model, places | {"model.norm": 1, "lm_head": 1}) if dispatch else model.to("cuda:0")
        trainers.append(make(OURS, tmp_path / str(dispatch), model=placed))
    assert_equal(*side_by_side(*trainers))
    assert all(ours.sharing.status.packs for ours in trainers)
