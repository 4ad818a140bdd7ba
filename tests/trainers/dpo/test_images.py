"""DPO on pictures: a pair's picture is computed once, and loss and gradients are stock's."""

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from tests.trainers.sharing.test_images import ADAPTER, small_llava
from trl_fsdp_qlora import EfficientDPOConfig, EfficientDPOTrainer
from trl_fsdp_qlora.prefix_sharing.status import CannotPack, PassType, Scope

from .test_trainer import DEFAULTS, assert_same_loss


def llava_trainer(cls, config, folder, without_picture=(), **changes):
    model, processor, prompts, pictures = small_llava()
    rows = {
        "prompt": prompts,
        "chosen": [[{"role": "assistant", "content": "EFGH"[: 1 + i % 4]}] for i in range(8)],
        "rejected": [[{"role": "assistant", "content": "JKLMN"[: 5 - i % 4]}] for i in range(8)],
    }
    if without_picture:
        rows["images"] = [[] if i in without_picture else [picture] for i, picture in enumerate(pictures)]
    else:
        rows["image"] = pictures
    return cls(
        model=model,
        args=config(output_dir=str(folder), **(DEFAULTS | {"max_length": None} | changes)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=processor,
        peft_config=ADAPTER,
    )


BOTH = (DPOTrainer, DPOConfig), (EfficientDPOTrainer, EfficientDPOConfig)


def test_loss_metrics_and_gradients_are_stocks(tmp_path):
    trainers = [llava_trainer(*kind, tmp_path / kind[0].__name__) for kind in BOTH]
    assert_same_loss(trainers)
    assert (
        trainers[1].sharing.status.reason(Scope.IMAGES) is None
        and PassType(True, True) in trainers[1].sharing.status.compared
    )


def test_pictures_that_cannot_be_counted_run_as_in_stock(tmp_path, monkeypatch):
    trainers = [llava_trainer(*kind, tmp_path / kind[0].__name__) for kind in BOTH]

    def fails(*_):
        raise CannotPack("which images are whose is not known")

    monkeypatch.setattr(trainers[1].sharing.packed_model.images, "receive", fails)
    inputs = next(iter(trainers[0].get_train_dataloader()))
    losses = []
    for each in trainers:
        each.model.train()
        losses.append(each.compute_loss(each.model, inputs).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert not trainers[1].sharing.figures.tokens


def test_a_pair_without_a_picture_trains_in_every_step(tmp_path):
    """Batches were put into pairs before each pass, although only compared ones are, and their pictures counted."""
    trainers = [llava_trainer(*kind, tmp_path / kind[0].__name__, without_picture=(1, 5)) for kind in BOTH]
    batches = list(trainers[0].get_train_dataloader())
    pictures = {len(inputs["pixel_values"]) for inputs in batches}
    assert pictures == {4, 8}  # of eight rows
    for inputs in [*batches, *reversed(batches)]:
        losses = []
        for trainer in trainers:
            trainer.model.train()
            losses.append(trainer.compute_loss(trainer.model, inputs).item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (
        trainers[1].sharing.status.packs
        and trainers[1].sharing.status.reason(Scope.IMAGES) is None
        and trainers[1].sharing.figures.tokens
    )
