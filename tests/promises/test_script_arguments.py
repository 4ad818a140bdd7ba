"""What a script gives a trainer: refused in a line before the model is loaded, or taken as TRL takes it."""

import numpy
import pytest
import trl
from datasets import Dataset
from peft import LoraConfig

from tests.tiny import config, digit_share, lora, prompts, tiny_model, tiny_vision_model, trainer
from trl_fsdp_qlora import (
    EfficientDPOConfig,
    EfficientDPOTrainer,
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
)
from trl_fsdp_qlora.errors import UserError

NOT_LOADED = "there is no such model"
PAIRS = {"prompt": ["a"] * 3, "chosen": ["b"] * 3, "rejected": ["c"] * 3}
TEXTS = {"prompt": ["1+1=", None, *["2+2="] * 8]}
MESSAGES = {"prompt": [*[[{"role": "user", "content": "1+1="}]] * 9, None]}
NUMBERS = {"prompt": list(range(10))}


def grpo(out, model=NOT_LOADED, reward=digit_share, rows=None, **arguments):
    data = prompts() if rows is None else Dataset.from_dict(rows)
    return EfficientGRPOTrainer(model, reward, config(EfficientGRPOConfig, out), data, **arguments)


def dpo(out, model=NOT_LOADED, rows=PAIRS, **arguments):
    args = EfficientDPOConfig(str(out), use_cpu=True, bf16=False, report_to="none")
    return EfficientDPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows), **arguments)


@pytest.mark.parametrize(
    ("make", "arguments", "line"),
    [
        (grpo, {"model": None}, "model is None"),
        (dpo, {"model": None}, "model is None"),
        (grpo, {"reward": 5}, "reward_funcs has 5 (int)"),
        (grpo, {"reward": [digit_share, None, 5]}, "reward_funcs has 5 (int)"),
        (grpo, {"rows": TEXTS}, "row 2 of the training dataset has None in `prompt`"),
        (grpo, {"rows": MESSAGES}, "row 10 of the training dataset has None in `prompt`"),
        (grpo, {"rows": NUMBERS}, "row 1 of the training dataset has 0 in `prompt`"),
        (dpo, {"rows": {"prompt": ["a"], "rejected": ["b"]}}, "no `chosen` column; its columns are prompt, rejected"),
        (
            dpo,
            {"rows": PAIRS | {"rejected": ["c", "c", None]}},
            "row 3 of the training dataset has None",
        ),
        (dpo, {"ref_model": "owner/name"}, "ref_model='owner/name' is a name"),
    ],
)
def test_refused_in_one_line_before_a_model_is_loaded(tmp_path, make, arguments, line):
    with pytest.raises(UserError) as raised:
        make(tmp_path, **arguments)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_an_argument_that_trl_does_not_have_is_named(tmp_path):
    with pytest.raises(TypeError, match="GRPOTrainer has no argument 'ref_model'"):
        grpo(tmp_path, ref_model=tiny_model())


@pytest.mark.parametrize("cls", [EfficientGRPOConfig, EfficientRLOOConfig])
def test_a_batch_without_whole_groups_names_the_fields_set(tmp_path, cls):
    with pytest.raises(ValueError, match=r"per_device_train_batch_size 10 × gradient_accumulation_steps 1\)"):
        config(cls, tmp_path, per_device_train_batch_size=10)
    with pytest.raises(ValueError, match=r"^generation_batch_size \(16\)"):
        config(cls, tmp_path, generation_batch_size=16, num_generations=5)


def test_a_folder_that_is_not_there_has_what_to_resume_from(tmp_path):
    def resume_from(folder):
        return trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "run").train(folder)

    with pytest.raises(UserError) as raised:
        resume_from("nope")
    assert "resume_from_checkpoint=nope: there is no such folder; leave it out to start at step 0" in str(raised.value)
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match=r"auto takes the newest one in .*run, checkpoint-4"):
        resume_from("nope")


@pytest.mark.parametrize(
    ("stock", "ours", "args"),
    [
        (trl.GRPOTrainer, EfficientGRPOTrainer, EfficientGRPOConfig),
        (trl.RLOOTrainer, EfficientRLOOTrainer, EfficientRLOOConfig),
    ],
)
def test_a_patched_constructor_of_trl_is_called(tmp_path, monkeypatch, stock, ours, args):
    """A tracker's wrapper hides the names of the arguments that a script gives by their places."""
    made = []
    construct = stock.__init__

    def recorded(self, *positional, **named):
        made.append(type(self))
        construct(self, *positional, **named)

    monkeypatch.setattr(stock, "__init__", recorded)
    trainer(ours, args, tmp_path, peft_config=lora(), max_steps=1).train()
    assert made == [ours]


def test_all_linear_adapts_the_tower_if_rows_hold_pictures(tmp_path):
    """As stock TRL does; of a text run, the language model alone."""
    Image = pytest.importorskip("PIL.Image")
    picture = Image.fromarray(numpy.zeros((16, 16, 3), dtype=numpy.uint8))
    texts = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(4)]
    pictures = [row | {"images": [picture]} for row in texts]

    def adapted(cls, config_cls, rows) -> set[str]:
        model, processor = tiny_vision_model()
        args = config(config_cls, tmp_path, per_device_train_batch_size=4)
        adapter = LoraConfig(r=2, target_modules="all-linear")
        data = Dataset.from_list(rows)
        made = cls(model, digit_share, args, data, processing_class=processor, peft_config=adapter)
        return {name for name, parameter in made.model.named_parameters() if parameter.requires_grad}

    ours = (EfficientGRPOTrainer, EfficientGRPOConfig)
    of_stock = adapted(trl.GRPOTrainer, trl.GRPOConfig, pictures)
    assert adapted(*ours, pictures) == of_stock
    assert adapted(*ours, texts) == {name for name in of_stock if "language_model" in name}
