"""How often the host waits for the device in a pass through prompt sharing, next to the padded pass of stock TRL.

`tests/trainers/grpo/test_syncs.py` counts whole steps of the trainers; these are the families of models, with and
without images.
"""

import functools
import sys

import pytest
import torch

from tests.prefix_sharing.helpers import (
    RECURRENT,
    SUPPORTED,
    awkward_batch,
    build,
    closed,
    completion_labels,
    prepared,
)
from tests.prefix_sharing.test_images import freeze_tower, with_images
from tests.trainers.dpo import test_trainer as dpo_tests
from tests.trainers.dpo.test_images import llava_trainer
from tests.trainers.grpo.test_syncs import Waits, places
from trl_fsdp_qlora.prefix_sharing.batch import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

OF_TEXT = ("qwen3", "gemma3", "qwen3_moe", "qwen3_5", "lfm2", "mamba2")
OF_IMAGES = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "idefics3", "gemma4")


@pytest.fixture(autouse=True)
def computed_on_the_host(monkeypatch):
    """What the emulated device has no code for: convolutions are cuDNN's, products over a dimension compiled as they
    come, and a logarithm of a sigmoid keeps something else on a CPU.
    """
    if "emulate" not in sys.modules:
        return
    emulate = sys.modules["emulate"]

    def on_the_host(operation, *args, **kwargs):
        args = [emulate.alias(x) if isinstance(x, torch.Tensor) else x for x in args]
        return emulate.to_fake(operation(*args, **kwargs), torch.device("cuda", 0))

    for operation in (torch.ops.aten.convolution.default, torch.ops.aten.prod.dim_int):
        monkeypatch.setitem(emulate.REPLACED, operation, functools.partial(on_the_host, operation))
    cuda = torch.device("cuda", 0)

    def log_sigmoid(x):
        return on_the_host(torch.nn.functional.logsigmoid, x), torch.empty(0, dtype=x.dtype, device=cuda)

    def log_sigmoid_backward(gradient, x, _buffer):
        return on_the_host(lambda g, x: g * torch.sigmoid(-x), gradient, x)

    monkeypatch.setitem(emulate.REPLACED, torch.ops.aten.log_sigmoid_forward.default, log_sigmoid)
    monkeypatch.setitem(emulate.REPLACED, torch.ops.aten.log_sigmoid_backward.default, log_sigmoid_backward)


def on_device(name, with_pictures: bool):
    """A model in bfloat16, its prompt sharing, and a batch; the tower of a model that sees is frozen, as with LoRA."""
    if with_pictures:
        model, batch = with_images(name)
        freeze_tower(model)
    else:
        model = build((SUPPORTED | {key: value[0] for key, value in RECURRENT.items()})[name])
        ids, mask = awkward_batch()
        batch = Batch(ids, mask, completion_labels(ids, mask))
    model.to("cuda", torch.bfloat16)
    vision = {
        key: x.to("cuda", torch.bfloat16 if x.is_floating_point() else x.dtype) for key, x in batch.vision.items()
    }
    tensors = (x.to("cuda") for x in (batch.input_ids, batch.attention_mask, batch.labels))
    sharing = prepared(model, compared=True)
    return model, sharing, Batch(*tensors, vision)


def stacks_of_a_pass(model, arguments) -> list:
    """Of the second of two passes with their backwards: the first sets up what is kept."""
    for _ in range(2):
        waits = Waits()
        with waits:
            output = model(**arguments, fused_lm_head=True)
            output.log_probs.sum().backward()
    return waits.stacks


@pytest.mark.parametrize(
    ("name", "with_pictures"), [*((name, False) for name in OF_TEXT), *((name, True) for name in OF_IMAGES)]
)
def test_one_wait_of_its_own(name, with_pictures):
    model, sharing, batch = on_device(name, with_pictures)
    with closed(sharing):
        of_stock = places(stacks_of_a_pass(model, batch.arguments()))
    ours = places(stacks_of_a_pass(model, batch.arguments()))
    print(f"waits of a pass: stock {of_stock.total()}, ours {ours.total()}")  # the table of docs/gpu.md
    assert sharing.figures.tokens, sharing.describe()
    our_waits = {line: count for line, count in ours.items() if "trl_fsdp_qlora/" in line}
    assert sum(our_waits.values()) <= 1, our_waits
    assert ours.total() <= of_stock.total() + 1, (of_stock, ours)


@pytest.mark.parametrize("with_pictures", [False, True], ids=["text", "pictures"])
def test_a_loss_of_dpo_waits_no_more_than_stocks(tmp_path, with_pictures):
    """The policy's pass and the reference's: each brings the batch's masks to the host once."""
    waits = []
    for classes in dpo_tests.BOTH:
        make = llava_trainer if with_pictures else functools.partial(dpo_tests.trainer, name="qwen3")
        trainer = make(*classes, folder=tmp_path / classes[0].__name__, use_cpu=False, bf16=True)
        trainer.model.train()
        batch = next(iter(trainer.get_train_dataloader()))
        for _ in range(2):
            of_step = Waits()
            with of_step:
                trainer.compute_loss(trainer.model, batch).backward()
        waits.append(places(of_step.stacks))
    assert trainer.sharing.figures.tokens, trainer.sharing.describe()
    (stocks, ours) = waits
    assert ours.total() <= stocks.total() + 1, (stocks, ours)
    our_waits = {line: count for line, count in ours.items() if "trl_fsdp_qlora/" in line}
    assert sum(our_waits.values()) <= 2, our_waits
