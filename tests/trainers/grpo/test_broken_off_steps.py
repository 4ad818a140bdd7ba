"""Optimizer steps that are interrupted, cut short or changed: no stale key, value or gradient is used, and none is
lost.

Each run is compared with one that computes every micro-batch by itself (`tokens_per_pass=0`).

Covers `prefix_sharing/prefix_cache.py`, `trainers/step/look_ahead.py`.
"""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.tiny import digit_share, lora, prompts, these_first, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import passes, prefix_cache
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing
from trl_fsdp_qlora.prefix_sharing.status import CannotPack
from trl_fsdp_qlora.trainers.step import look_ahead

# Rows of a micro-batch and `tokens_per_pass`: one micro-batch a pass with a trunk; several in one pass; a micro-batch
# in several passes.
SPLITS = {"kept": (1, 30), "merged": (1, 100000), "cut": (4, 20)}
# The pass that fails: the second half's; that of all; the second micro-batch's first one, behind the first one's four.
FAILING = {"kept": 2, "merged": 1, "cut": 5}
every_split = pytest.mark.parametrize("split", these_first(SPLITS, "kept", "cut"))
often_cut = pytest.mark.parametrize("split", these_first(SPLITS, "cut"))
often_kept = pytest.mark.parametrize("split", these_first(SPLITS, "kept"))


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch):
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)


def make(
    tmp_path, split, cls=EfficientGRPOTrainer, alone=False, config=EfficientGRPOConfig, peft_config=None, **changes
):
    rows, tokens_per_pass = SPLITS[split]
    settings = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 8 // rows,
        "tokens_per_pass": 0 if alone else tokens_per_pass,
        "max_steps": 2,
        "beta": 0.0,
        **({"loss_type": "grpo"} if "loss_type" in config.__dataclass_fields__ else {}),
        **changes,
    }
    return trainer(cls, config, tmp_path, peft_config=peft_config or lora(), **settings)


def trained(grpo) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in grpo.model.named_parameters() if p.requires_grad}


def train(grpo) -> None:
    grpo.train()


def assert_as_alone(tmp_path, split, run=train, cls=EfficientGRPOTrainer, tolerance=1e-4, **changes):
    """`run(trainer)` leaves the weights that it leaves if every micro-batch is computed by itself, up to a part of how
    far they move; returns the trainer."""
    weights = []
    for alone in (True, False):
        grpo = make(tmp_path, split, cls, alone, **changes)
        start = trained(grpo)
        torch.manual_seed(0)
        run(grpo)
        weights.append(trained(grpo))
    expected, actual = weights
    moved = max((expected[name] - start[name]).abs().max() for name in start)
    assert moved > 1e-4
    for name, weight in actual.items():
        assert (weight - expected[name]).abs().max() <= tolerance * moved, name
    assert grpo.look_ahead.scores is None and grpo.sharing.keeps_beginnings
    return grpo


class At(TrainerCallback):
    """Calls `what(trainer, control)` behind micro-batch number `event` of a run, once."""

    def __init__(self, grpo, event, what):
        self.trainer = grpo
        self.left = event
        self.what = what
        grpo.add_callback(self)

    def on_substep_end(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            self.what(self.trainer, control)


class Broken(Exception):
    pass


def broken(*_):
    raise Broken


def stop(grpo, control):
    control.should_training_stop = True


@every_split
@pytest.mark.parametrize("event", these_first(["loss", "callback", "stop"], "loss"))
def test_a_run_that_broke_off_between_micro_batches_continues(tmp_path, split, event):
    def run(grpo):
        behind = 1 if split == "cut" else 3
        if event == "loss":
            compute_loss = grpo._compute_loss
            calls = []

            def fails_once(model, inputs):
                loss = compute_loss(model, inputs)
                calls.append(loss)
                if len(calls) == behind + 1:
                    raise Broken
                return loss

            grpo._compute_loss = fails_once
        else:
            At(grpo, behind, stop if event == "stop" else broken)
        if event == "stop":
            grpo.train()
        else:
            with pytest.raises(Broken):
                grpo.train()
        with torch.no_grad():  # the weights were changed since
            for weight in grpo.model.parameters():
                weight.add_(0.01 * weight.requires_grad)
        grpo.train()

    assert_as_alone(tmp_path, split, run)


@often_kept
def test_an_evaluation_between_two_micro_batches(tmp_path, split):
    def run(grpo):
        At(grpo, 1 if split == "cut" else 3, lambda grpo, control: grpo.evaluate())
        grpo.train()

    assert_as_alone(tmp_path, split, run, eval_strategy="no", cls=WithEvaluation)


@every_split
def test_a_pass_that_cannot_be_computed_in_the_middle_of_a_step(tmp_path, split, monkeypatch):
    """What the passes before it owe to a beginning that they share was lost."""
    run_planned = PromptSharing.run_planned
    begun = []

    def fails_in_the_middle(sharing, call):
        forward = call.instructions.forward
        if sharing.status.compared and not forward.view.scores_nothing and forward.record.problems is None:
            begun.append(forward)
            if len(begun) == FAILING[split]:
                raise CannotPack("no backend can compute it")
        return run_planned(sharing, call)

    monkeypatch.setattr(PromptSharing, "run_planned", fails_in_the_middle)
    weights = []
    for alone in (True, False):
        grpo = make(tmp_path, split, alone=alone, max_steps=1, num_generations=8)
        start = trained(grpo)
        begun.clear()
        grpo.train()
        weights.append(trained(grpo))
    assert len(begun) == FAILING[split] and not grpo.sharing.keeps_beginnings
    moved = max((weights[0][name] - start[name]).abs().max() for name in start)
    for name, weight in weights[1].items():
        assert (weight - weights[0][name]).abs().max() <= 1e-4 * moved, name


class WithEvaluation(EfficientGRPOTrainer):
    def __init__(self, model, reward, config, dataset, **kwargs):
        super().__init__(model, reward, config, dataset, eval_dataset=prompts(4), **kwargs)


@often_kept
def test_an_epoch_that_ends_between_two_micro_batches(tmp_path, split):
    """Transformers adds the gradients of the micro-batches before to the next step."""

    def end(grpo, control):
        control.should_epoch_stop = True

    def run(grpo):
        At(grpo, 1 if split == "cut" else 3, end)
        grpo.train()

    # An epoch is one step.
    assert_as_alone(tmp_path, split, run, dataset=prompts(2))


class StepsEarly(EfficientGRPOTrainer):
    """Somebody's own loop: the optimizer steps behind the third micro-batch, too."""

    def training_step(self, model, inputs, num_items_in_batch):
        early = self._step == (1 if self.args.per_device_train_batch_size > 1 else 3) - 1
        if early:
            self.accelerator.gradient_state._set_sync_gradients(True)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if early:
            self.optimizer.step()
            model.zero_grad()
        return loss


@often_kept
def test_an_optimizer_that_steps_earlier_than_planned(tmp_path, split):
    assert_as_alone(tmp_path, split, cls=StepsEarly)


class ChangesAdvantages(EfficientGRPOTrainer):
    def _compute_loss(self, model, inputs):
        # Those of completions that would be left out, too.
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] + 0.5})


class ChangesInPlace(EfficientGRPOTrainer):
    def _compute_loss(self, model, inputs):
        if (self._step + 1) % self.args.gradient_accumulation_steps == 0:
            inputs["advantages"].add_(0.5)
        return super()._compute_loss(model, inputs)


class LooksTwice(EfficientGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 0.5 * super()._compute_loss(model, inputs) + 0.5 * super()._compute_loss(model, inputs)


class LeavesOneOut(EfficientGRPOTrainer):
    def _compute_loss(self, model, inputs):
        if self._step % self.args.gradient_accumulation_steps == 1:
            return sum(p.sum() * 0 for p in self.model.parameters() if p.requires_grad)
        return super()._compute_loss(model, inputs)


def half_equal(completions, prompts, **_):
    """Every second group has nothing to learn from, so nothing of it is computed as it was drawn."""
    groups = {}
    for prompt in prompts:
        groups.setdefault(str(prompt), len(groups))
    shares = digit_share(completions)
    return [1.0 if groups[str(prompt)] % 2 else share for prompt, share in zip(prompts, shares, strict=True)]


@often_kept
@pytest.mark.parametrize(
    "cls", these_first([ChangesAdvantages, ChangesInPlace, LooksTwice, LeavesOneOut], ChangesAdvantages, LooksTwice)
)
def test_a_subclass_between_the_batch_and_its_loss(tmp_path, split, cls):
    changes = {"reward": half_equal} if cls in (ChangesAdvantages, ChangesInPlace) else {}
    assert_as_alone(tmp_path, split, cls=cls, **changes)


@often_kept
@pytest.mark.parametrize(
    "accumulation, steps_per_generation, max_steps",
    these_first([(8, 4, 2), (4, 8, 3), (4, 6, 3), (6, 4, 3)], (8, 4, 2)),
)
def test_generation_batches_of_another_length(tmp_path, split, accumulation, steps_per_generation, max_steps):
    changes = {"gradient_accumulation_steps": accumulation, "steps_per_generation": steps_per_generation}
    changes["num_generations"] = 2
    assert_as_alone(tmp_path, split, max_steps=max_steps, **changes)


@often_cut
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, split):
    """In the middle of a generation batch; the same arithmetic, so no tolerance."""
    rows, _ = SPLITS[split]
    changes = {"steps_per_generation": 16 // rows, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    whole = make(tmp_path, split, **changes)
    whole.train()
    resumed = make(tmp_path, split, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = trained(whole)
    for name, weight in trained(resumed).items():
        assert weight.equal(expected[name]), name


@often_kept
def test_a_last_step_of_fewer_micro_batches(tmp_path, split):
    """Of 3 prompts times 4 completions an epoch has 12 micro-batches of one row: a step of 8 and one of 4."""
    steps_per_generation = 1 if split == "cut" else 4
    assert_as_alone(
        tmp_path,
        split,
        max_steps=-1,
        num_train_epochs=2,
        dataset=prompts(3),
        steps_per_generation=steps_per_generation,
    )


def test_a_cut_micro_batch_draws_the_same_dropout_twice(tmp_path, monkeypatch):
    """The gradient was that of other values than the loss was taken of."""
    values = []  # of the passes without a graph
    again = []  # of those with one
    run_planned = PromptSharing.run_planned

    def watched(*args):
        output = run_planned(*args)
        (again if torch.is_grad_enabled() else values).append(output.log_probs.detach())
        return output

    monkeypatch.setattr(PromptSharing, "run_planned", watched)
    adapter = lora()
    adapter.lora_dropout = 0.5
    grpo = make(tmp_path, "cut", peft_config=adapter, max_steps=1)
    grpo.sharing.status.compared.update(itertools.product((False, True), repeat=2))
    grpo.train()
    assert len(values) == len(again) > 2
    for first, second in zip(values, again, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_cut_micro_batch_are_counted_over_its_passes(tmp_path):
    grpo = make(tmp_path, "cut", max_steps=1)
    grpo.train()
    last = grpo._buffered_inputs[-1]
    rows, width = last["completion_ids"].shape
    figures = grpo.sharing.figures
    assert figures.padded_tokens == rows * (width + last["prompt_ids"].shape[1]) > figures.tokens > 0


@often_kept
def test_what_is_kept_is_freed_with_its_last_pass(tmp_path, split, monkeypatch):
    kept = {}  # weak references to what each cache keeps of a prefix
    alive = []  # what outlived its prefix
    keep = prefix_cache.PrefixCache.keep
    drop = prefix_cache.PrefixCache.drop

    def watched(cache, prefix, slot, value):
        keep(cache, prefix, slot, value)
        kept.setdefault((id(cache), prefix), []).append(weakref.ref(value))

    def watched_drop(cache, prefixes, trunks):
        drop(cache, prefixes, trunks)
        gc.collect()
        for prefix in prefixes:
            alive.extend(ref for ref in kept.pop((id(cache), prefix), ()) if ref() is not None)

    monkeypatch.setattr(prefix_cache.PrefixCache, "keep", watched)
    monkeypatch.setattr(prefix_cache.PrefixCache, "drop", watched_drop)
    grpo = make(tmp_path, split, gradient_checkpointing=False)
    grpo.train()
    gc.collect()
    assert not alive, "kept longer than its last pass"
    assert not [ref for refs in kept.values() for ref in refs if ref() is not None], "it outlives its step"
    assert kept or split == "merged"


def test_reentrant_checkpointing_of_a_cut_micro_batch(tmp_path, caplog):
    """Its layers keep no graph: found in the second forward, it ended the run."""
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    weights = []
    for alone in (True, False):
        grpo = make(tmp_path, "cut", alone=alone, **checkpointing)
        grpo.train()
        weights.append(trained(grpo))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight)
    assert caplog.text.count("use_reentrant=False") == 1


LAST_COLUMN = torch.tensor([-1])
# A TRL that scores other tokens, and one that gives the model an argument more.
OTHER_CALLS = {
    "labels": lambda arguments: {**arguments, "labels": arguments["labels"].index_fill(1, LAST_COLUMN, -100)},
    "output_hidden_states": lambda arguments: {**arguments, "output_hidden_states": False},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_call_that_differs_from_the_plan_trains_as_if_alone(tmp_path, monkeypatch, caplog, name):
    stock = GRPOTrainer._get_per_token_logps_and_entropies

    @functools.wraps(stock)
    def of_another_trl(self, model, *args, **kwargs):
        return stock(self, lambda **arguments: model(**OTHER_CALLS[name](arguments)), *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", of_another_trl)
    look_ahead.logger.warning_once.cache_clear()
    assert_as_alone(tmp_path, "kept")
    assert name in caplog.text
