"""Episodes of several rows: losses and gradients are those of a plain loop over the rows, one by one.

Covers `trainers/rollouts/episodes.py`.
"""

import itertools
import random
from contextlib import nullcontext
from inspect import signature

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import BitsAndBytesConfig
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora import tiny
from tests.prefix_sharing.helpers import (
    MULTIMODAL,
    VOCABULARY,
    assert_equal_gradients,
    build,
    closed,
    every_level_made,
    gradients,
    tokenizer,
)
from tests.tiny import LOSS_TYPES, these_first
from tests.trainers.helpers import mean_token
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.prefix_sharing import passes
from trl_fsdp_qlora.trainers.rollouts.episodes import checked_rows
from trl_fsdp_qlora.trainers.step.rows import joined, padded_batch

TOLERANCE = 2e-6  # of the largest gradient


@pytest.fixture(autouse=True, scope="module")
def deep_trees():
    """Every level of a tree is made, as in one of long rows."""
    with every_level_made():
        yield


def episode(seed, turns, head, thinking=3, answer=2, observation=4, vocabulary=VOCABULARY):
    """The rows of an episode whose thinking is gone from the history of later turns."""
    draw = random.Random(seed)

    def ids(count):
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    rows = []
    history = list(head)
    for _ in range(turns):
        thought, said = ids(thinking), ids(answer)
        mask = [0] * len(history) + [1] * (len(thought) + len(said))
        rows.append({"input_ids": history + thought + said, "sampled_mask": mask})
        history = history + said + ids(observation)
    return rows


def episodes(turns=(3, 1, 2, 4), seed=5):
    heads = [[7, 8, 9, 10, 11, 12], [20, 21, 22]]
    return [episode(seed + i, count, heads[i // 2 % 2]) for i, count in enumerate(turns)]


def make_trainer(folder, rows, model=None, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    """A GRPO trainer whose `rollout_func` returns these rows, again and again."""
    defaults = {
        "per_device_train_batch_size": len(rows), "num_generations": 2, "max_completion_length": 40, "max_steps": 1,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1, "temperature": 0.9, "compact_generation": False,
    }  # fmt: skip
    config = config_cls(str(folder), **{**defaults, **changes})
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    served = iter(rows * 100)
    return cls(
        build("qwen3") if model is None else model,
        mean_token,
        config,
        Dataset.from_dict({"prompt": ["A+B=", "CD="] * 8}),
        processing_class=tokenizer(),
        peft_config=adapter,
        rollout_func=lambda prompts, trainer: {"rows": [next(served) for _ in prompts]},
    )


class PlainLoop(GRPOTrainer):
    """TRL's trainer, whose pass runs the rows of `all_episodes` one by one, each as a call of its own."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options):
        values = []
        all_rows = []
        for ids, mask in zip(input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:], strict=True):
            rows = self.rows_of(ids.tolist())
            all_rows += rows
            of_rows = torch.cat([self.of_row(model, row) for row in rows], 1)
            values.append(torch.nn.functional.pad(of_rows, (0, logits_to_keep - of_rows.shape[1])) * mask)
        logps_BC, entropies_BC = torch.stack(values, 1)
        return logps_BC, entropies_BC, self.router_loss(model, all_rows) if self.aux_loss_enabled else None

    def router_loss(self, model, rows):
        """That of one call with all rows; of padded rows the mean over calls with as many rows as TRL's batch."""
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        count = self.args.per_device_train_batch_size if self.args.prefix_sharing == "off" else len(rows)
        losses = []
        for part, mask_of_part in zip(input_ids.split(count), mask.split(count), strict=True):
            losses.append(model(input_ids=part, attention_mask=mask_of_part, output_router_logits=True).aux_loss)
        return torch.stack(losses).mean()

    def of_row(self, model, row):
        """Log-probabilities and entropies of the sampled tokens of a row, `(2, N)`."""
        ids = torch.tensor([row["input_ids"]])
        log_probs = (model(input_ids=ids).logits[0, :-1].float() / self.temperature).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        chosen = log_probs.gather(1, ids[0, 1:, None])[:, 0]
        return torch.stack([chosen, entropies])[:, torch.tensor(row["sampled_mask"][1:]).bool()]

    def rows_of(self, completion):
        """The rows of the episode whose sampled tokens a completion begins with, the longest such episode."""
        by_tokens = {tuple(sampled_tokens(rows)): rows for rows in self.all_episodes}
        fitting = [tokens for tokens in by_tokens if tuple(completion[: len(tokens)]) == tokens]
        return by_tokens[max(fitting, key=len)]


def sampled_tokens(rows):
    return [t for row in rows for t, m in zip(row["input_ids"], row["sampled_mask"], strict=True) if m]


def plain_loss(trainer, all_episodes, inputs):
    """TRL's loss of these inputs, of a pass that runs the rows one by one."""
    loop = object.__new__(PlainLoop)
    vars(loop).update(vars(trainer), all_episodes=all_episodes)
    inputs = {name: x for name, x in inputs.items() if name != "rows"}
    with closed(trainer.sharing):
        return loop._compute_loss(trainer.model, inputs)


def draw(trainer):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    rows = [trainer.train_dataset[i // 2] for i in range(trainer.args.per_device_train_batch_size)]
    return trainer._prepare_inputs(rows * trainer.args.gradient_accumulation_steps)


def assert_equal_losses(trainer, rows, tolerance=TOLERANCE):
    inputs = draw(trainer)
    assert "rows" in inputs
    assert_equals_the_loop(trainer, rows, inputs, tolerance)
    return inputs


def assert_equals_the_loop(trainer, rows, inputs, tolerance=TOLERANCE):
    expected = plain_loss(trainer, rows, inputs)
    expected.backward()
    reference = gradients(trainer.model)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(gradients(trainer.model), reference, tolerance)


OPTIONS = {
    "reference": {"beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.1},
    "high entropy": {"top_entropy_quantile": 0.5},
    "padded": {"prefix_sharing": "off"},
    "padded, reference": {"prefix_sharing": "off", "beta": 0.1},
    "masked": {"mask_truncated_completions": True},
    "old policy": {"num_iterations": 2, "steps_per_generation": 1},
}


@pytest.mark.parametrize("name", these_first(OPTIONS, "reference", "padded, reference"))
def test_options(tmp_path, name):
    rows = episodes()
    rows[2][-1]["input_ids"][-1] = rows[3][-1]["input_ids"][-1] = tokenizer().eos_token_id
    trainer = make_trainer(tmp_path, rows, **OPTIONS[name])
    inputs = assert_equal_losses(trainer, rows)
    loop = object.__new__(PlainLoop)
    vars(loop).update(vars(trainer), all_episodes=rows)
    for kind, weights in (("ref", trainer.model.disable_adapter()), ("old", nullcontext())):
        if f"{kind}_per_token_logps" in inputs:
            with weights, torch.no_grad(), closed(trainer.sharing):
                expected = loop._get_per_token_logps_and_entropies(trainer.model, **padded_batch(inputs))[0]
            torch.testing.assert_close(inputs[f"{kind}_per_token_logps"], expected, rtol=1e-5, atol=1e-5)
    assert (f"{name[:3]}_per_token_logps" in inputs) == (name in ("reference", "old policy"))


FAMILIES = ("qwen3", "qwen3_5", "qwen3_next", "gemma3", "gpt_oss", "sees")
# With weights as large as here stock's own gradients of gated delta rules are 1e-5 from those in float64.
TOLERANCES = dict.fromkeys(("qwen3_5", "qwen3_next"), 1e-5)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A function that makes the model of a family: its weights as they are, or in 4 bits (nf4).

    The weights are float32, so that a difference is one of the passes and not of rounding; LoRA's own code is the same
    over a base in 16 bits.
    """
    folder = tmp_path_factory.mktemp("models")

    def make(name, base="whole"):
        model = build(MULTIMODAL["qwen2_5_vl"] if name == "sees" else name)
        if base == "whole":
            return model
        model.save_pretrained(folder / name)
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        packed = type(model).from_pretrained(
            folder / name, quantization_config=BitsAndBytesConfig(**nf4), dtype=torch.float32
        )
        assert any(type(module).__name__ == "Linear4bit" for module in packed.modules())
        return packed

    return make


def make_float(trainer):
    """TRL casts the adapters of quantized models to bf16; here they are float32, so that no rounding differs."""
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


LOSSES = [*((loss_type, "token") for loss_type in LOSS_TYPES), ("grpo", "sequence"), ("luspo", "sequence")]
PRODUCT = list(itertools.product(LOSSES, FAMILIES, ("whole", "nf4")))
QUICK = [
    (("dapo", "token"), "gemma3", "whole"),
    (("vespo", "token"), "qwen3", "whole"),
    (("grpo", "token"), "qwen3", "nf4"),
    (LOSSES[-1], "qwen3_5", "whole"),
]


@pytest.mark.parametrize("loss, name, base", these_first(PRODUCT, *QUICK))
def test_losses_of_models(tmp_path, model_of, loss, name, base):
    """Each loss and level over rows of each family of models, the base whole or in 4 bits, against the plain loop."""
    loss_type, level = loss
    rows = episodes()
    # A router loss is one of a whole call and none of a row, see the next test.
    trainer = make_trainer(
        tmp_path,
        rows,
        model_of(name, base),
        loss_type=loss_type,
        importance_sampling_level=level,
        router_aux_loss_coef=0.0,
    )
    make_float(trainer)
    assert_equal_losses(trainer, rows, TOLERANCES.get(name, TOLERANCE))
    assert trainer.sharing.figures.tokens


ROUTED = [("qwen3_moe", "whole"), ("qwen3_moe", "nf4"), ("qwen3_next", "whole"), ("gpt_oss", "whole")]


@pytest.mark.parametrize("prefix_sharing", ["auto", "off"])
@pytest.mark.parametrize("name, base", these_first(ROUTED, ROUTED[0]))
def test_router_losses(tmp_path, model_of, name, base, prefix_sharing):
    """The router loss is that of stock calls with the rows of the micro-batch, as TRL's is of its batch."""
    model = model_of(name, base)
    model.config.output_router_logits = True
    rows = episodes()
    trainer = make_trainer(tmp_path, rows, model, router_aux_loss_coef=0.5, prefix_sharing=prefix_sharing)
    make_float(trainer)
    assert trainer.aux_loss_enabled
    assert_equal_losses(trainer, rows, TOLERANCES.get(name, TOLERANCE))


def test_a_slice_that_only_fills_up_is_not_in_the_router_loss():
    """A rank with fewer slices than another computes its last row again."""
    outputs = [FusedCausalLMOutput(log_probs=torch.zeros(1, 2), aux_loss=torch.tensor(x)) for x in (1.0, 3.0, 100.0)]
    assert joined(outputs, 2).aux_loss == 2.0
    assert len(joined(outputs, 2).log_probs) == 3  # its backward runs on every rank


def test_rloo_has_no_episodes():
    """TRL's RLOO takes neither tools nor a `rollout_func`, so none of its episodes has several rows."""
    assert not {"tools", "environment_factory", "rollout_func"} & signature(RLOOTrainer.__init__).parameters.keys()


STEPS = [(4, 1, None), (2, 2, None), (1, 4, None), (1, 4, 25), (4, 1, 30), (4, 1, 1)]


@pytest.mark.parametrize("size, accumulation, tokens_per_pass", these_first(STEPS, *STEPS[2:5]))
@pytest.mark.parametrize("prefix_sharing", ["auto", "off"])
def test_micro_batches(tmp_path, size, accumulation, tokens_per_pass, prefix_sharing, monkeypatch):
    """A step of several micro-batches, looked ahead and cut, is the sum of the plain loops' gradients."""
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)
    rows = episodes()
    trainer = make_trainer(
        tmp_path,
        rows,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        tokens_per_pass=tokens_per_pass,
        prefix_sharing=prefix_sharing,
        beta=0.1,
    )
    assert_equal_step(trainer, rows)


STEPS_OF_ROUTED = [(name, *step) for name in ("qwen3_moe", "qwen3_next", "gpt_oss") for step in STEPS]


@pytest.mark.parametrize(
    "name, size, accumulation, tokens_per_pass", these_first(STEPS_OF_ROUTED, ("qwen3_moe", *STEPS[4]))
)
def test_router_losses_of_micro_batches(tmp_path, name, size, accumulation, tokens_per_pass, monkeypatch):
    """Each micro-batch has the router loss of its own rows, also if several run in one pass or one is cut.

    Two of the twelve rows of the cut one only fill up.
    """
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)
    model = build(name)
    model.config.output_router_logits = True
    rows = episodes()
    trainer = make_trainer(
        tmp_path,
        rows,
        model,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        tokens_per_pass=tokens_per_pass,
        router_aux_loss_coef=0.5,
    )
    assert_equal_step(trainer, rows)


def assert_equal_step(trainer, rows):
    """The weights move by the sum of the plain loops' gradients."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    trainer.train()
    steps = [(old - p.detach()) / 1e-2 for old, p in zip(before, trained, strict=True)]
    with torch.no_grad():
        for p, old in zip(trained, before, strict=True):
            p.copy_(old)
    trainer.model.train()
    for inputs in trainer._buffered_inputs:
        plain_loss(trainer, rows, inputs).backward()
    # A step of 1e-2 in float32 rounds the gradient.
    assert_equal_gradients(steps, gradients(trainer.model), 2e-5)


def test_metrics_and_the_page(tmp_path):
    """The mean number of rows, the share of the rows' tokens that is computed, and a text of each episode's rows."""
    rows = episodes()
    trainer = make_trainer(tmp_path, rows, skip_zero_advantage=False)
    trainer.keeps_drawn_rows = True
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "episodes/rows_mean" in entry)
    assert entry["episodes/rows_mean"] == 10 / 4
    needed = [tuple(row["input_ids"][:-1]) for episode in rows for row in episode]  # the last token is only a label
    distinct = {row[: i + 1] for row in needed for i in range(len(row))}
    assert entry["episodes/tokens_fraction"] == pytest.approx(len(distinct) / sum(map(len, needed)), abs=1e-3)
    text = trainer.drawn_rows["extra"]["rows"][0]
    assert text.startswith("--- row 1: 11 tokens\n[seen] ") and "\n[sampled] " in text
    assert "--- row 2: 17 tokens, the first 6 as in row 1\n" in text


def test_one_row_is_todays_completion(tmp_path):
    """Rows of one-row episodes give the same batch as prompt_ids, completion_ids and logprobs."""
    rows = [[{**episode(seed, 1, [5, 6, 7])[0], "logprobs": None}] for seed in range(4)]
    served = [(row["input_ids"][:3], row["input_ids"][3:]) for (row,) in rows]
    plain = {
        "prompt_ids": [prompt for prompt, _ in served],
        "completion_ids": [completion for _, completion in served],
        "logprobs": None,
    }
    batches = []
    for output in ({"rows": rows}, plain):
        trainer = make_trainer(tmp_path, rows)
        trainer.rollout_func = lambda prompts, trainer, output=output: output
        torch.manual_seed(0)
        batches.append(draw(trainer))
    assert batches[0].keys() == batches[1].keys()
    for name, x in batches[0].items():
        assert torch.equal(x, batches[1][name]), name


@st.composite
def random_trees(draw_value):
    """Four episodes of rows that branch anywhere: equal rows, rows that begin others, no tokens between turns."""
    tokens = st.lists(st.integers(3, 6), max_size=4)  # few tokens, so that rows share beginnings by chance, too
    trees = []
    for _ in range(4):
        rows = []
        for _ in range(draw_value(st.integers(1, 5))):
            history = [3, *draw_value(tokens)]
            if rows and draw_value(st.booleans()):
                earlier = draw_value(st.sampled_from(rows))["input_ids"]
                history = earlier[: draw_value(st.integers(1, len(earlier)))]
            ids = history + draw_value(tokens)
            mask = [0] * len(history) + draw_value(
                st.lists(st.integers(0, 1), min_size=len(ids) - len(history), max_size=len(ids) - len(history))
            )
            rows.append({"input_ids": [*ids, 7], "sampled_mask": [*mask, 1]})
        trees.append(rows)
    return trees


@pytest.fixture(scope="module")
def any_trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("fuzz"), episodes())


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(rows=random_trees())
def test_random_trees(any_trainer, rows):
    any_trainer.rollout_func = lambda prompts, trainer: {"rows": rows}
    any_trainer.state.global_step = 0
    any_trainer._step = 0
    # The reference finds an episode by its tokens.
    assume(any(len(episode) > 1 for episode in rows))
    assume(len({tuple(sampled_tokens(episode)) for episode in rows}) == 4)
    assert_equal_losses(any_trainer, rows)


def test_a_checkpoint_between_two_generations(tmp_path):
    """A run that resumes with half of its generation batch left ends with the weights of one that did not stop."""
    changes = {
        "per_device_train_batch_size": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
        "save_strategy": "steps", "save_steps": 1, "loss_type": "grpo",
    }  # fmt: skip
    rows = episodes((3, 1, 2, 4))
    whole = make_trainer(tmp_path / "run", rows, **changes)
    whole.train()
    resumed = make_trainer(tmp_path / "run", rows, **changes)
    resumed.rollout_func = lambda *_: pytest.fail("the checkpoint holds what is left")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    assert "rows" in resumed._buffered_inputs[1]
    for (name, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_t_spmo_refuses_rows(tmp_path):
    rows = episodes()
    trainer = make_trainer(tmp_path, rows, cls=TSPMOTrainer, config_cls=TSPMOConfig)
    with pytest.raises(UserError, match="T-SPMO"):
        draw(trainer)


WRONG = [
    ([[{"input_ids": "abc", "sampled_mask": [0, 1, 1]}]], "episode 0, row 0: input_ids is no list of token ids"),
    (
        [[{"input_ids": [3, 4], "sampled_mask": [0, 1, 1]}]],
        "episode 0, row 0: sampled_mask has one entry for each of 2",
    ),
    ([[{"input_ids": [3, 4], "sampled_mask": [1, 1]}]], "which no token predicts"),
    ([[{"input_ids": [3, 4], "sampled_mask": [0, 0]}]], "episode 0: sampled_mask has no 1"),
    ([[{"input_ids": [3, 4], "sampled_mask": [0, 1], "logprobs": [1.0, 2.0]}]], "row 0: logprobs has one entry"),
    ([[{"input_ids": [3, 4]}]], "a dictionary with input_ids and sampled_mask"),
    ([], "one list for each of 1 prompts, and not 0"),
    ([7], "episode 0: a list of rows is needed, and not int"),
]


@pytest.mark.parametrize("rows, message", WRONG)
def test_wrong_rows(rows, message):
    with pytest.raises(UserError, match=message) as error:
        checked_rows(rows, 1)
    assert "\n" not in str(error.value)


@pytest.mark.processes
@pytest.mark.parametrize("scenario", these_first(["packed", "row by row", "cut", "padded"], "packed"))
def test_ranks_with_uneven_episodes(tmp_path, scenario):
    """One rank's episodes have one row and the other's up to six; gradients are those of one process."""
    words = "tests/trainers/step/rows_worker.py", tiny.make_checkpoint(tmp_path / "model"), tmp_path, scenario
    launch(*words, processes=1, timeout=240)
    launch(*words, processes=2, timeout=240, environment=fsdp_environment())
    names = ("rank0_of_1", "rank0_of_2", "rank1_of_2")
    alone, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in names)
    assert first["rows"] == 4 and second["rows"] > 12
    for rank in (first, second):
        assert rank["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        for ours, reference in zip(rank["gradients"], alone["gradients"], strict=True):
            assert ours.keys() == reference.keys()
            assert_equal_gradients(list(ours.values()), list(reference.values()), 1e-5)
