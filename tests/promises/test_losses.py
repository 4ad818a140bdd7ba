"""A user's own loss sees what it sees in stock TRL: values of every token, gradients, metrics, attributes set later.

One import differs between the two runs of a case. Rows are the same; updates of two steps are compared.
"""

import pytest
import torch
import trl
from transformers import TrainerCallback

from tests import tiny
from tests.trainers.next_trl.steps import fixed_turn
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)

STOCK = (trl.GRPOTrainer, trl.GRPOConfig)
OURS = (EfficientGRPOTrainer, EfficientGRPOConfig)
# Micro-batches of a step that are scored together, one that is cut, and one by itself.
PLANS = {
    "alone": {"per_device_train_batch_size": 8},
    "merged": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "tokens_per_pass": 1000},
    "cut": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "tokens_per_pass": 60},
}


def episodes(prompts, trainer):
    """The policy's tokens, three of an environment, and the policy's again, of different lengths."""
    draw = torch.Generator().manual_seed(trainer.state.global_step)
    tokenizer = trainer.processing_class
    ids = []
    for row in range(len(prompts)):
        ids.append(torch.randint(3, len(tokenizer), (7 + row % 3,), generator=draw).tolist())
    return {
        "prompt_ids": [tokenizer(prompt[-1]["content"] * 6)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": None,
        "env_mask": [[1, 1, 0, 0, 0] + [1] * (len(row) - 5) for row in ids],
    }


def half_learned(completions, **_columns):
    """Rewards that differ in every second group."""
    return [float(row % 4) if row % 8 < 4 else 1.0 for row in range(len(completions))]


def trained(classes, folder, change=None, callback=None, plan="alone", **settings):
    """The update of two steps, and the trainer. `change` makes a subclass of a trainer's class."""
    trainer_class, config_class = classes
    cls = trainer_class if change is None else change(trainer_class)
    settings = {"max_steps": 2, **PLANS[plan], **settings}
    if classes is STOCK:
        settings.pop("tokens_per_pass", None)
    torch.manual_seed(0)
    run = tiny.trainer(
        cls, config_class, folder, peft_config=tiny.lora(), reward=half_learned, dataset=tiny.prompts(), **settings
    )
    run.rollout_func = episodes
    if callback is not None:
        run.add_callback(callback(run))
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    run.train()
    moved = [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]
    return torch.cat([part.flatten() for part in moved]), run


def assert_as_stock(folder, **case):
    stock, _ = trained(STOCK, folder / "stock", **case)
    ours, run = trained(OURS, folder / "ours", **case)
    assert (ours - stock).norm() <= 1e-3 * stock.norm()  # float32 sums in another order
    return run


def with_term(cls):
    """ECHO: a cross-entropy over the environment's tokens, of the values that the loss's own pass returned."""

    class WithTerm(cls):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.values = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.values

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss - 0.05 * (self.values[0] * (1 - inputs["tool_mask"])).sum()

    return WithTerm


def with_entropy_bonus(cls):
    class WithBonus(cls):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.values = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.values

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss - 0.05 * (self.values[1] * inputs["completion_mask"]).sum()

    return WithBonus


def other_words(input_ids):
    """The same rows with other tokens in them."""
    return torch.where(input_ids == 10, 11, input_ids)


def with_second_pass_after(cls):
    """A second pass of the policy over other rows of the same shape, after TRL's loss."""

    class Twice(cls):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            width = inputs["completion_ids"].shape[1]
            logps, *_ = self._get_per_token_logps_and_entropies(model, other_words(ids), mask, width)
            return loss - 0.05 * (logps * inputs["completion_mask"]).sum()

    return Twice


def with_second_pass_inside(cls):
    """The same inside of the pass that TRL's loss calls: its log-probabilities are changed by those of other rows."""

    class Inside(cls):
        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            values = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
            others = super()._get_per_token_logps_and_entropies(model, other_words(input_ids), *args, **kwargs)
            return (values[0] + 0.5 * others[0], *values[1:])

    return Inside


def with_gradients_of_its_own(cls):
    """The loss is scaled by the norm of its gradient, which is 0 in a micro-batch without an advantage."""

    class OfNorm(cls):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            return loss / (1 + torch.cat([gradient.flatten() for gradient in gradients]).norm())

    return OfNorm


def test_a_loss_that_takes_gradients_itself_equals_stock_uncut(tmp_path):
    groups = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    updates = []
    for plan in ({"tokens_per_pass": 0}, {"prefix_sharing": "off", "skip_zero_advantage": False}):
        folder = tmp_path / str(len(updates))
        updates.append(trained(OURS, folder, with_gradients_of_its_own, **groups, **plan)[0])
    assert (updates[0] - updates[1]).norm() <= 1e-3 * updates[1].norm()
    assert_as_stock(tmp_path, change=with_gradients_of_its_own)


CHANGES = [with_term, with_entropy_bonus, with_second_pass_after, with_second_pass_inside]


EVERY_CHANGE = [(change, plan) for change in CHANGES for plan in PLANS]
FIRST_CHANGES = [
    (with_term, "alone"),
    (with_term, "cut"),
    (with_entropy_bonus, "merged"),
    (with_second_pass_after, "cut"),
    (with_second_pass_inside, "merged"),
]


@pytest.mark.parametrize("change, plan", tiny.these_first(EVERY_CHANGE, *FIRST_CHANGES))
def test_a_subclass_with_a_term_of_its_own_trains_as_stock(tmp_path, change, plan):
    run = assert_as_stock(tmp_path, change=change, plan=plan)
    assert run.sharing.status.packs


def test_the_start_up_block_names_the_users_method(tmp_path):
    _, run = trained(OURS, tmp_path, with_term, max_steps=1)
    (line,) = [line for line in run.startup.block.splitlines() if "WithTerm._compute_loss" in line]
    assert "may read every token's values" in line


def test_completions_without_advantage_are_skipped_by_default(tmp_path):
    _, run = trained(OURS, tmp_path, max_steps=1)
    assert run.state.log_history[0]["tokens/scored_fraction"] < 0.6


@pytest.mark.parametrize("patched", ["instance", "class"])
def test_a_patched_loss_reads_every_token(tmp_path, monkeypatch, patched):
    """A tracker's wrapper, put on the object or on TRL's class."""
    read = []

    def wrapped(method):
        def compute(*args, **kwargs):
            values = method(*args, **kwargs)
            read.append(values[0].detach().ne(0).sum().item())
            return values

        return compute

    name = "_get_per_token_logps_and_entropies"

    class Patch(TrainerCallback):
        def __init__(self, run):
            if patched == "instance":
                setattr(run, name, wrapped(getattr(run, name)))

    if patched == "class":
        monkeypatch.setattr(trl.GRPOTrainer, name, wrapped(getattr(trl.GRPOTrainer, name)))
    assert_as_stock(tmp_path, callback=Patch)
    assert read[: len(read) // 2] == read[len(read) // 2 :]


SET_LATER = {"beta": 0.3, "top_entropy_quantile": 0.5, "loss_type": "cispo", "epsilon_high": 0.01}
# The quantile is one of a micro-batch, and rows are shuffled by group here and one by one in TRL.
EVERY_ATTRIBUTE = [
    (name, plan) for name in SET_LATER for plan in PLANS if name != "top_entropy_quantile" or plan == "alone"
]
FIRST_ATTRIBUTES = [("beta", "merged"), ("top_entropy_quantile", "alone"), ("loss_type", "cut")]


@pytest.mark.parametrize("name, plan", tiny.these_first(EVERY_ATTRIBUTE, *FIRST_ATTRIBUTES))
def test_an_attribute_that_a_callback_sets_counts_from_then_on(tmp_path, name, plan):
    """A KL warm-up, a quantile that is lowered: TRL's loss reads the attribute in each micro-batch."""

    class Set(TrainerCallback):
        def __init__(self, run):
            self.run = run

        def on_step_end(self, args, state, control, **_):
            setattr(self.run, name, SET_LATER[name])

    assert_as_stock(tmp_path, callback=Set, plan=plan)


def test_an_attribute_set_between_micro_batches_counts_at_once(tmp_path):
    """The plan of the step was made before. Rows of a group are in one micro-batch, and groups are as in stock."""

    class Set(TrainerCallback):
        def __init__(self, run):
            self.run = run

        def on_substep_end(self, args, state, control, **_):
            self.run.top_entropy_quantile = 0.5

        def on_step_end(self, args, state, control, **_):
            self.run.top_entropy_quantile = 1.0

    updates = []
    for settings in ({}, {"skip_zero_advantage": False, "tokens_per_pass": 0}):
        folder = tmp_path / str(len(updates))
        torch.manual_seed(3)
        updates.append(trained(OURS, folder, callback=Set, plan="merged", **settings)[0])
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-3, atol=1e-7)


def test_a_teacher_is_scored_by_the_pass(tmp_path):
    """A model that is neither the policy nor TRL's reference model."""

    def with_teacher(cls):
        class Distils(cls):
            def _compute_loss(self, model, inputs):
                loss = super()._compute_loss(model, inputs)
                ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
                width = inputs["completion_ids"].shape[1]
                passes = []
                for scored in (self.teacher, model):
                    passes.append(self._get_per_token_logps_and_entropies(scored, ids, mask, width)[0])
                return loss + 0.05 * ((passes[1] - passes[0].detach()) ** 2 * inputs["completion_mask"]).sum()

        from trl.trainer.utils import add_fused_lm_head

        teacher = tiny.tiny_model(seed=5)
        add_fused_lm_head(teacher, 1.0)
        Distils.teacher = teacher
        return Distils

    assert_as_stock(tmp_path, change=with_teacher)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_entropy_is_right_as_soon_as_a_step_has_ended(tmp_path, beta):
    """A thermostat steers by it. Without a KL term it is the mean over the tokens that were scored."""

    read = []

    class Thermostat(TrainerCallback):
        def __init__(self, run):
            self.run = run

        def on_step_end(self, args, state, control, **_):
            read.append(self.run._metrics["train"]["entropy"][-1])

    _, run = trained(OURS, tmp_path, callback=Thermostat, beta=beta)
    logged = [row["entropy"] for row in run.state.log_history if "entropy" in row]
    assert read == pytest.approx(logged, abs=5e-4)  # as rounded for the log


def test_an_rloo_subclass_with_an_entropy_bonus_equals_stock(tmp_path):
    """The entropies of a frozen head had no gradient, so the backward failed."""
    updates = []
    for classes in ((trl.RLOOTrainer, trl.RLOOConfig), (EfficientRLOOTrainer, EfficientRLOOConfig)):
        torch.manual_seed(0)
        cls, config = with_entropy_bonus(classes[0]), classes[1]
        run = tiny.trainer(cls, config, tmp_path / classes[0].__name__, peft_config=tiny.lora(), max_steps=2, beta=0.0)
        run._generate_single_turn = fixed_turn(with_logprobs=False)
        parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        run.train()
        moved = [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]
        updates.append(torch.cat([part.flatten() for part in moved]))
    assert (updates[1] - updates[0]).norm() <= 1e-3 * updates[0].norm()


def test_a_second_pass_of_a_star_po_is_that_of_the_policy(tmp_path):
    """A pass that no loss had requested counted as the old policy's, which A*-PO does not use: zeros."""
    seen = []

    class Bonus(AStarPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            for context in (torch.enable_grad(), torch.no_grad()):
                with context:
                    logps, *_ = self._get_per_token_logps_and_entropies(
                        model, ids, mask, inputs["completion_ids"].shape[1]
                    )
                seen.append(logps)
            return loss - 0.1 * seen[-2].sum()

    settings = {"num_generations": 1, "max_steps": 1, "value_samples": 2}
    tiny.trainer(Bonus, AStarPOConfig, tmp_path, peft_config=tiny.lora(), **settings).train()
    with_gradient, without = seen
    assert with_gradient.requires_grad and not without.requires_grad
    assert with_gradient.detach().any()
    torch.testing.assert_close(with_gradient.detach(), without, rtol=1e-4, atol=1e-5)


def test_a_subclass_of_t_spmo_reads_every_tokens_values(tmp_path):
    """Its own loss needs branching tokens alone; the others were zero."""
    read = []

    class Reads(TSPMOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            values = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            read.append(values[0].detach())
            return values

    updates = []
    for cls in (TSPMOTrainer, Reads):
        torch.manual_seed(0)
        run = tiny.trainer(cls, TSPMOConfig, tmp_path / cls.__name__, peft_config=tiny.lora(), max_steps=1)
        run.train()
        parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        updates.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    inputs = run._buffered_inputs[0]
    assert torch.equal(read[-1] != 0, inputs["completion_mask"].bool())
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-4, atol=1e-7)
