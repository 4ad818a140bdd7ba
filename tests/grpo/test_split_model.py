"""A model split over two CUDA devices, which is what `python script.py` makes of one on a machine with several GPUs.

TRL loads a checkpoint given by its name with `device_map="auto"` unless a launcher started the script.
"""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import save_tiny_model, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer

from .test_cuda import MARKS, ROWS, assert_equal, drawn, loss_and_gradient, losses_of_a_run, made

pytestmark = [*MARKS, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def split(cls, config_cls, folder, model, **changes):
    """A trainer on a model that TRL loads by its name; the devices' memory is said to be too small for all of it."""
    size = sum(p.numel() * p.element_size() for p in tiny_model().parameters())
    room = {0: int(0.75 * size), 1: 2 * size}
    ours = made(cls, config_cls, folder, model=model, model_init_kwargs={"max_memory": room}, **changes)
    places = {p.device.index for p in ours.model.parameters()}
    assert places == {0, 1}, f"TRL and accelerate left everything on {places}"
    return ours


def compared(folder, checkpoint, cls, config_cls, **changes):
    """Loss and gradients of one batch: on one device, and split by `device_map="auto"`; the split trainer."""
    whole = made(cls, config_cls, folder / "whole", model=tiny_model().to("cuda:0"), **changes)
    ours = split(cls, config_cls, folder / "split", checkpoint, **changes)
    ours.model.load_state_dict(whole.model.state_dict())
    batch = drawn(whole)
    assert_equal(loss_and_gradient(ours, batch), loss_and_gradient(whole, batch))
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
}


@pytest.mark.parametrize("case", CASES)
def test_as_trl_loads_it(tmp_path, checkpoint, case):
    classes = (TSPMOTrainer, TSPMOConfig) if case == "nested rows" else (EfficientGRPOTrainer, EfficientGRPOConfig)
    ours = compared(tmp_path, checkpoint, *classes, **CASES[case])
    assert ours.prefix_sharing.active() == (case != "padded"), ours.prefix_sharing.describe()
    losses_of_a_run(ours)


def test_equals_stock_on_the_same_devices(tmp_path, checkpoint):
    stock = split(GRPOTrainer, GRPOConfig, tmp_path / "stock", checkpoint)
    ours = split(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "ours", checkpoint)
    ours.model.load_state_dict(stock.model.state_dict())
    batch = drawn(ours)
    assert_equal(loss_and_gradient(ours, batch), loss_and_gradient(stock, batch))


def test_with_an_untied_head_on_the_last_device(tmp_path):
    from accelerate import dispatch_model

    def untied():
        model = tiny_model()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "lm_head": 1}
    results, state, batch = [], None, None
    for model in (untied().to("cuda:0"), dispatch_model(untied(), places)):
        ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / str(len(results)), model=model)
        state = state if results else {name: x.cpu() for name, x in ours.model.state_dict().items()}
        ours.model.load_state_dict(state)
        batch = batch if results else drawn(ours)
        results.append(loss_and_gradient(ours, batch))
        assert ours.prefix_sharing.active(), ours.prefix_sharing.describe()
    assert_equal(results[1], results[0])
    assert len(ours._prepare_inputs([ours.train_dataset[i] for i in ROWS])["completion_ids"]) == 8  # and generates
