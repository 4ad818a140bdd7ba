"""Two ranks with micro-batches smaller than a group against one process with whole groups."""

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import REPOSITORY, accelerate_launch
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import WORKER, difference, scenarios_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.exhaustive]

# The second of two steps begins with other weights, and with nothing of the first one.
GRPO = "grpo:max_steps=2"
ROW_BY_ROW = f"{GRPO},per_device_train_batch_size=1,gradient_accumulation_steps=4"
HYBRID = "model={root}/hybrid"
WHOLE = {
    "grpo": GRPO,
    "kl": f"{GRPO},beta=0.1",
    "hybrid": f"{GRPO},{HYBRID}",
}
CUT = {
    "grpo": ROW_BY_ROW,
    "merged": f"{ROW_BY_ROW},tokens_per_pass=1000",
    "too_long": f"{GRPO},tokens_per_pass=20,max_completion_length=12",
    "kl": f"{GRPO},per_device_train_batch_size=2,gradient_accumulation_steps=2,beta=0.1",
    "hybrid": f"{ROW_BY_ROW},{HYBRID}",
}
# The second rank has nothing to learn from, and meets the first one in its trunks.
IDLE = {
    "idle": f"{ROW_BY_ROW},idle=1",
    "idle_cut": f"{CUT['too_long']},idle=1",
}
# A mixture of experts, whose router loss depends on how a step is split into micro-batches.
MIXTURE = "model={root}/mixture,router_aux_loss_coef=1.0"
MIXTURES = {
    "mixture": f"{ROW_BY_ROW},{MIXTURE}",
    "mixture_merged": f"{CUT['merged']},{MIXTURE}",
    "mixture_cut": f"{CUT['too_long']},{MIXTURE}",
}
# Of the largest gradient, float32: cut passes and ranks add in other orders, and so do other processors (1.2e-5 on an
# Intel Xeon with AVX-512).
TOLERANCE = 2e-5
# An epoch of 12 micro-batches is a step of 8 and one of 4; and the optimizer also steps after the third of four.
LAST_IS_SHORT = "prompts=6,max_steps=-1,num_train_epochs=1,gradient_accumulation_steps=8,steps_per_generation=4"
EARLY = {
    "last_step": f"grpo:per_device_train_batch_size=1,{LAST_IS_SHORT}",
    "last_step_merged": f"grpo:per_device_train_batch_size=1,{LAST_IS_SHORT},tokens_per_pass=1000",
    "own_loop": f"{ROW_BY_ROW},early=3",
    "own_loop_merged": f"{CUT['merged']},early=3",
}
# Two ranks of DDP without anything shared between micro-batches, for both kinds of ranks.
ALONE = {
    "idle_alone": f"{IDLE['idle']},tokens_per_pass=0",
    "mixture_alone": f"{MIXTURES['mixture']},tokens_per_pass=0",
    "mixture_whole": f"{GRPO},max_completion_length=12,{MIXTURE},tokens_per_pass=0",
    "last_step_alone": f"{EARLY['last_step']},tokens_per_pass=0",
    "own_loop_alone": f"{EARLY['own_loop']},tokens_per_pass=0",
}
# Each micro-batch has a pass of its own.
ZERO_2 = {name: CUT[name] for name in ("grpo", "merged", "too_long")}
ON_TWO_RANKS = {**CUT, **IDLE, **MIXTURES, **EARLY, "checkpointed": f"{ROW_BY_ROW},gradient_checkpointing=true"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("cut")
    tiny.make_checkpoint(root / "hybrid", **tiny.HYBRID)
    tiny.make_checkpoint(root / "mixture", **tiny.MIXTURE)
    model = tiny.make_checkpoint(root / "model")
    results = {"model": model}
    for run, scenarios, processes, environment in (
        ("one", WHOLE, 1, {}),
        ("ddp", {**ON_TWO_RANKS, **ALONE}, 2, {}),
        ("fsdp2", ON_TWO_RANKS, 2, fsdp_environment()),
    ):
        ranks = scenarios_of(model, root / run, scenarios, processes, environment=environment)
        for scenario in scenarios:
            results[run, scenario] = [rank[scenario] for rank in ranks]
    return results


@pytest.mark.parametrize(
    ("run", "scenario"),
    [(run, scenario) for run in ("ddp", "fsdp2") for scenario in (*CUT, "checkpointed")],
)
def test_cut_groups_train_as_whole_ones(runs, run, scenario):
    whole = scenario if scenario in WHOLE else "grpo"
    expected = runs["one", whole][0]
    for actual in runs[run, scenario]:
        assert actual["shared"] and (actual["trunks"] > 0 or scenario == "merged")
        assert len(actual["gradients"]) == 2
        for wanted, gradients in zip(expected["gradients"], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= TOLERANCE
    assert difference(expected["adapter"], runs[run, scenario][0]["adapter"]) <= TOLERANCE


@pytest.mark.parametrize("scenario", ["idle", "idle_cut"])
@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_a_rank_without_anything_to_learn_trains_as_one_process(runs, run, scenario):
    for expected, actual in zip(runs["ddp", "idle_alone"], runs[run, scenario], strict=True):
        assert actual["trunks"] > 0
        assert len(actual["gradients"]) == 2
        for wanted, gradients in zip(expected["gradients"], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= TOLERANCE


@pytest.mark.parametrize(
    ("scenario", "alone"),
    [("mixture", "mixture_alone"), ("mixture_merged", "mixture_alone"), ("mixture_cut", "mixture_whole")],
)
@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_a_router_loss_over_passes(runs, run, scenario, alone):
    for expected, actual in zip(runs["ddp", alone], runs[run, scenario], strict=True):
        assert actual["trunks"] > 0 or scenario == "mixture_merged"
        assert len(actual["gradients"]) == 2
        for wanted, gradients in zip(expected["gradients"], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= TOLERANCE


@pytest.mark.parametrize("scenario", ["last_step", "last_step_merged", "own_loop", "own_loop_merged"])
@pytest.mark.parametrize("run", ["ddp", "fsdp2"])
def test_an_optimizer_that_steps_earlier(runs, run, scenario):
    """Gradients of all micro-batches before it are reduced over ranks in this step, each once."""
    alone = scenario.removesuffix("_merged") + "_alone"
    for expected, actual in zip(runs["ddp", alone], runs[run, scenario], strict=True):
        assert actual["trunks"] > 0 or "merged" in scenario
        assert len(actual["gradients"]) == 2
        for wanted, gradients in zip(expected["gradients"], actual["gradients"], strict=True):
            assert difference(wanted, gradients) <= TOLERANCE
    assert difference(runs["ddp", alone][0]["adapter"], runs[run, scenario][0]["adapter"]) <= TOLERANCE


def test_zero_2_shares_prompts_one_micro_batch_a_pass(runs, tmp_path):
    """A micro-batch whose backward waits for a later one's ended the run, and the gradients of a cut one came behind
    the step.
    """
    pytest.importorskip("deepspeed")
    model = runs["model"]
    expected = runs["one", "grpo"][0]
    out = tmp_path / "out"
    out.mkdir()
    scenarios = [f"{name}={scenario}" for name, scenario in ZERO_2.items()]
    run = accelerate_launch("zero2_cpu", WORKER, model, out, *scenarios, cwd=REPOSITORY, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ZERO_2:
        actual = torch.load(out / "rank0.pt", weights_only=False)[name]
        assert actual["shared"] and (actual["trunks"] > 0) == (name != "too_long")
        # DeepSpeed sums gradients in buckets of another order.
        assert difference(expected["adapter"], actual["adapter"]) <= 1e-4
