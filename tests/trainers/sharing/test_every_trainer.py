"""Two steps of each of TRL's trainers, with and without `share_prompts`: metrics, losses and gradients."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl.experimental import a2po, cpo, gkd, gmpo, gold, iw_opd, online_dpo, orpo, sdft, sdpo, tpo

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.prefix_sharing.helpers import build, llava_processor, tokenizer
from tests.prefix_sharing.test_images import MORE
from tests.tiny import these_first, tool_tokenizer
from tests.trainers.helpers import mean_token
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.share import models_of
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing, causal_language_model

BEGINNING = "ABCDEFGH*" * 3
PROMPTS = [f"{BEGINNING}IJKL=", f"{BEGINNING}MN=", "OPQRS=", f"{BEGINNING}T="]
CHOSEN = ["AB", "CDE", "F", "GH"]
REJECTED = ["AC", "CDFGH", "GABAB", "G"]


def pairs(**more):
    return Dataset.from_dict({"prompt": PROMPTS * 2, "chosen": CHOSEN * 2, "rejected": REJECTED * 2} | more)


def prompts(**more):
    return Dataset.from_dict({"prompt": [PROMPTS[0], PROMPTS[2]] * 4} | more)


def dialogues():
    """Two answers to each question."""
    questions = [prompt for prompt in PROMPTS for _ in range(2)]
    answers = [answer for both in zip(CHOSEN, REJECTED, strict=True) for answer in both]
    said = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers, strict=True)
    ]
    return Dataset.from_dict({"messages": said})


def zero_or_one(completions, **_columns):
    return [float(ord(completion[-1:] or "A") % 2) for completion in completions]


def answered(**more):
    """A prompt and an answer to it."""
    return Dataset.from_dict({"prompt": PROMPTS * 2, "completion": [*CHOSEN, *REJECTED]} | more)


DRAWS = {"max_completion_length": 6}
IN_GROUPS = DRAWS | {"num_generations": 4}
GROUPS = IN_GROUPS | {"distillation_topk": 20}
# A trainer and its config; the config's fields; its data; further arguments. The first six call the fused head.
TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"per_device_train_batch_size": 4}, pairs, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {}, lambda: answered(label=[True, False, False, True] * 2), {}),
    "sft": (trl.SFTTrainer, trl.SFTConfig, {}, answered, {}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, IN_GROUPS, prompts, {"reward_funcs": mean_token}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, IN_GROUPS | {"beta": 0.1}, prompts, {"reward_funcs": mean_token}),
    "gmpo": (gmpo.GMPOTrainer, gmpo.GMPOConfig, IN_GROUPS, prompts, {"reward_funcs": mean_token}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {"per_device_train_batch_size": 4}, pairs, {}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {"per_device_train_batch_size": 4}, pairs, {}),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {"per_device_train_batch_size": 4}, pairs, {}),
    "tpo": (
        tpo.TPOTrainer, tpo.TPOConfig, {"per_device_train_batch_size": 4}, lambda: pairs(reference=CHOSEN * 2), {},
    ),
    "a2po": (a2po.A2POTrainer, a2po.A2POConfig, DRAWS, prompts, {"reward_funcs": zero_or_one}),
    "online_dpo": (
        online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig, {"max_new_tokens": 6, "max_length": 64}, prompts,
        {"reward_funcs": mean_token},
    ),
    "gkd": (gkd.GKDTrainer, gkd.GKDConfig, {"lmbda": 0.0, "max_length": 64}, dialogues, {"teacher_model": None}),
    "gold": (
        gold.GOLDTrainer, gold.GOLDConfig, {"lmbda": 0.0, "max_length": 64} | DRAWS, dialogues,
        {"teacher_model": None},
    ),
    "iw_opd": (
        iw_opd.IWOPDTrainer, iw_opd.IWOPDConfig, {"max_length": 64} | DRAWS, dialogues, {"teacher_model": None},
    ),
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig, DRAWS, prompts, {"teacher_model": None}),
    "sdft": (
        sdft.SDFTTrainer, sdft.SDFTConfig, GROUPS,
        lambda: prompts(privileged_context=["TUV", "WXY"] * 4), {},
    ),
    "sdpo": (sdpo.SDPOTrainer, sdpo.SDPOConfig, GROUPS, prompts, {"reward_funcs": zero_or_one}),
}  # fmt: skip


class Recorder(TrainerCallback):
    """The gradients of each step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.gradients.append([g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in gradients])


def chat_tokenizer():
    tokens = tokenizer()
    tokens.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokens


def common(out) -> dict:
    return {
        "output_dir": str(out), "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False, "report_to": [],
        "gradient_checkpointing": False, "disable_tqdm": True, "max_steps": 2, "optim": "sgd", "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", "logging_steps": 1, "seed": 1,
    }  # fmt: skip


def adapters():
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def save_base(kind, name, folder):
    model = build(name)
    # Smaller weights than the other tests': long recurrences of large ones leave less than five digits of a gradient.
    for parameter in model.parameters():
        parameter.data.mul_(0.5 if parameter.ndim > 1 else 1.0)
    if kind == "gold":
        model.resize_token_embeddings(len(tool_tokenizer()))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def assemble(row, load, adapter, processing_class, out, **changes):
    """A trainer of a `row` of `TRAINERS`; `load` makes its model, and a teacher of a bit larger weights."""
    trainer_class, config_class, sizes, data, further = row
    torch.manual_seed(0)
    model = load()
    if "teacher_model" in further:
        further = {"teacher_model": load()}
        for parameter in further["teacher_model"].parameters():
            parameter.data.mul_(1.1)
    if adapter:
        further = further | {"peft_config": adapter}
    torch.manual_seed(0)
    return trainer_class(
        model=model,
        args=config_class(**(common(out) | sizes | changes)),
        train_dataset=data(),
        processing_class=processing_class,
        **further,
    )


def make_trainer(kind, folder, adapter, out, cls=None, **changes):
    """A trainer of [`TRAINERS`] of the base in `folder`; of `cls` in place of TRL's class, if that is given."""
    if kind == "reward":
        load = functools.partial(tf.AutoModelForSequenceClassification.from_pretrained, num_labels=1)
    else:
        load = tf.AutoModelForCausalLM.from_pretrained
    tokens = tool_tokenizer() if kind == "gold" else chat_tokenizer()
    load = functools.partial(load, folder, dtype=torch.float32)
    row = TRAINERS[kind] if cls is None else (cls, *TRAINERS[kind][1:])
    return assemble(row, load, adapters() if adapter else None, tokens, out, **changes)


@pytest.fixture
def counted(monkeypatch):
    """Tokens computed and padded of each call that prompt sharing answered."""
    calls = []

    def count(name):
        answer = vars(PromptSharing)[name]

        def counting(sharing, *args, **kwargs):
            output = answer(sharing, *args, **kwargs)
            if sharing.figures.tokens:
                calls.append((sharing.figures.tokens, sharing.figures.padded_tokens))
            return output

        monkeypatch.setattr(PromptSharing, name, counting)

    count("score")
    count("last_hidden_states")
    return calls


def the_sharings(trainer) -> list[PromptSharing]:
    return [causal_language_model(model).prompt_sharing for model in models_of(trainer)]


def assert_equal_steps(ours, stock):
    for of_step, of_stock in zip(ours, stock, strict=True):
        largest = max(g.abs().max() for g in of_stock)
        worst = max((a - b).abs().max() for a, b in zip(of_step, of_stock, strict=True))
        assert largest > 0 and worst <= 2e-5 * largest, worst / largest


# Seconds; and means over padding, too, whose logits are zero after `share_prompts`.
NOT_COMPARED = {
    "step_time", "logits/chosen", "logits/rejected",
    "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
}  # fmt: skip


def steps_of(trainer) -> list[dict]:
    """The metrics of each step."""
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return [{name: value for name, value in row.items() if name not in NOT_COMPARED} for row in steps]


def trained(trainer, shares: bool) -> list:
    """Train, after `share_prompts` if it `shares`; returns the gradients of each step."""
    if shares:
        share_prompts(trainer)
    recorder = Recorder()
    trainer.add_callback(recorder)
    torch.manual_seed(0)
    trainer.train()
    return recorder.gradients


def train_both(make):
    """(steps, gradients) of stock's trainer, and of one that shares prompts; and that one."""
    runs = []
    for shares in (False, True):
        trainer = make()
        gradients = trained(trainer, shares)
        runs.append((steps_of(trainer), gradients))
    return *runs, trainer


def assert_steps_are_stocks(make, counted):
    (stock_steps, stock), (steps, ours), trainer = train_both(make)
    assert len(steps) == len(stock_steps) == 2
    for step, stock_step in zip(steps, stock_steps, strict=True):
        assert step["loss"] == pytest.approx(stock_step["loss"], rel=1e-5, abs=1e-6)
        assert step == pytest.approx(stock_step, rel=1e-3, abs=1e-4)
    assert_equal_steps(ours, stock)
    for sharing in the_sharings(trainer):
        assert sharing.status.packs and sharing.figures.tokens, sharing.describe()
    assert max(tokens / padded for tokens, padded in counted) < 0.6


# Fields of a config that change what a loss needs of a pass.
OPTIONS = {
    ("dpo", "ipo"): {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]},
    ("dpo", "ld_alpha"): {"ld_alpha": 0.5},
    ("kto", "apo"): {"loss_type": "apo_zero_unpaired"},
    ("sft", "dft"): {"loss_type": "dft"},
    ("rloo", "no reference"): {"beta": 0.0},
    ("grpo", "sequence"): {"importance_sampling_level": "sequence"},
}
WITHOUT_ADAPTER = ("a2po",)  # it takes none
# Each trainer once, on layers of every kind, and each way to call a model (by the fused head, for a class, for logits,
# by the backbone).
OFTEN = [
    ("gpt_oss", "dpo", True, "ipo"),
    ("qwen3_5", "kto", True, None),
    ("lfm2", "sft", True, None),
    ("gemma3", "rloo", False, None),
    ("qwen3", "grpo", True, None),
    ("qwen3", "gmpo", True, None),
    ("gemma3", "reward", False, None),
    ("qwen3", "cpo", True, None),
    ("gpt_oss", "orpo", False, None),
    ("qwen3", "tpo", True, None),
    ("qwen3", "a2po", False, None),
    ("qwen3", "online_dpo", True, None),
    ("qwen3", "gkd", True, None),
    ("qwen3", "gold", True, None),
    ("qwen3", "iw_opd", True, None),
    ("qwen3_5", "distillation", False, None),
    ("qwen3", "sdft", True, None),
    ("qwen3", "sdpo", True, None),
]
OF_EVERY_FAMILY = ("dpo", "kto", "sft", "grpo", "reward", "orpo", "distillation")
CASES = {
    *OFTEN,
    *(("qwen3", kind, True, None) for kind in TRAINERS if kind not in WITHOUT_ADAPTER),
    *(("qwen3", kind, False, None) for kind in TRAINERS),
    *itertools.product(("gemma3", "gpt_oss", "qwen3_5"), OF_EVERY_FAMILY, [False], [None]),
    *(("qwen3", *option) for option in [(kind, True, name) for kind, name in OPTIONS]),
    ("gpt_oss", "dpo", True, None),
}


@pytest.mark.parametrize(("name", "kind", "adapter", "option"), these_first(sorted(CASES, key=str), *OFTEN))
def test_two_steps_are_what_they_were(name, kind, adapter, option, tmp_path, counted):
    save_base(kind, name, tmp_path / "base")
    fields = OPTIONS.get((kind, option), {})
    assert_steps_are_stocks(
        lambda: make_trainer(kind, tmp_path / "base", adapter, tmp_path / "out", **fields), counted
    )


@pytest.mark.parametrize("adapter", [True, False])
def test_a_trainer_that_is_made_after_share_prompts(adapter, tmp_path):
    """It puts its own head on the model, in front of prompt sharing, which wraps that head in the first pass."""
    losses = []
    for shares in (False, True):
        load = lambda shares=shares: share_prompts(build("qwen3")) if shares else build("qwen3")  # noqa: E731
        trainer = assemble(TRAINERS["sft"], load, adapters() if adapter else None, chat_tokenizer(), tmp_path)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = next(iter(trainer.get_train_dataloader()))
        losses.append([trainer.compute_loss(trainer.model, copy.deepcopy(batch)).item() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    (sharing,) = the_sharings(trainer)
    assert 0 < sharing.figures.tokens < 0.6 * sharing.figures.padded_tokens


def with_pictures(**columns):
    """Eight questions about three pictures, the same words about two of them; and further columns."""
    random = np.random.default_rng(0)
    first, second, third = (Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(3))
    asked = [[{"role": "user", "content": text}] for text in (f"{BEGINNING}=", f"{BEGINNING}=", "A+B=", "A+B=")]
    return Dataset.from_dict({"prompt": asked * 2, "image": [first, second, third, third] * 2} | columns)


def answers(*texts) -> list[list[dict]]:
    """Eight answers."""
    return [[{"role": "assistant", "content": text}] for text in texts] * (8 // len(texts))


# Of a trainer that takes pictures, its data; its config has the fields of `TRAINERS` but for the size of a batch.
SEEING_DATA = {
    "dpo": lambda: with_pictures(chosen=answers(*CHOSEN), rejected=answers(*REJECTED)),
    "kto": lambda: with_pictures(completion=answers(*CHOSEN, *REJECTED), label=[True, False, False, True] * 2),
    "sft": lambda: with_pictures(completion=answers(*CHOSEN, *REJECTED)),
    "rloo": with_pictures,
    "grpo": with_pictures,
    "gmpo": with_pictures,
    "distillation": with_pictures,
    "online_dpo": with_pictures,
    "gold": lambda: with_pictures(completion=answers(*CHOSEN, *REJECTED)),
}


def seeing(kind) -> tuple:
    """The row of `TRAINERS` of a trainer, with pictures."""
    trainer_class, config_class, sizes, _, further = TRAINERS[kind]
    return trainer_class, config_class, sizes | {"per_device_train_batch_size": 8}, SEEING_DATA[kind], further


# Each way to call a model, and what a trainer's own collator gives it.
SEEING_CASES = [(kind, adapter) for kind in SEEING_DATA for adapter in (True, False)]
SEEING_OFTEN = [("kto", True), ("distillation", False), ("online_dpo", True)]


@pytest.mark.parametrize(("kind", "adapter"), these_first(SEEING_CASES, *SEEING_OFTEN))
def test_two_steps_of_a_model_that_sees(kind, adapter, tmp_path, counted):
    if kind == "online_dpo" and trl.__version__.startswith("1.15."):
        pytest.skip("TRL 1.15's online DPO loses the images of a prompt")
    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    base = build(MORE["llava"])
    base.config.image_token_id = tokens.convert_tokens_to_ids("<image>")
    base.resize_token_embeddings(len(tokens))
    base.generation_config.suppress_tokens = [base.config.image_token_id]  # it would be an image without pixels
    base.save_pretrained(tmp_path / "base")

    def make():
        load = functools.partial(
            tf.LlavaForConditionalGeneration.from_pretrained, tmp_path / "base", dtype=torch.float32
        )
        of_language_and_tower = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapter_config = of_language_and_tower if adapter else None
        return assemble(seeing(kind), load, adapter_config, llava_processor(tokens), tmp_path / "out")

    assert_steps_are_stocks(make, counted)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("wrapper", these_first(["ddp", "fsdp2"], "ddp"))
def test_two_ranks(wrapper, tmp_path):
    """A teacher that is a model of its own, called by its backbone; one that is the student; and logits of pairs."""
    save_base("sdpo", "qwen3", tmp_path / "base")
    environment = fsdp_environment() if wrapper == "fsdp2" else None
    worker = "tests/trainers/sharing/trainers_worker.py"
    kinds = ("distillation", "sdpo", "orpo", "sdft")  # the last in full, with a copy as its teacher
    launch(worker, tmp_path / "base", tmp_path, *kinds, environment=environment, timeout=300)
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        for kind in kinds:
            stock, ours = (results[kind, shares] for shares in (False, True))
            assert ours["shared"] and ours["dtensors"] == stock["dtensors"] == (wrapper == "fsdp2")
            assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5, abs=1e-6)
            assert_equal_steps(ours["gradients"], stock["gradients"])
