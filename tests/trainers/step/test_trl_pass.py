"""`step/trl_pass.py`: what a loss that leaves out tokens needs of TRL's pass."""

import pytest
import torch

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.trainers.step import trl_pass
from trl_fsdp_qlora.trainers.step.rows import padded_batch
from trl_fsdp_qlora.trainers.step.trl_pass import LossRequest


@pytest.fixture
def made(tmp_path):
    made = tiny.trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=tiny.lora())
    made.model.train()
    return made


def request_of(made):
    batch = made._prepare_inputs([made.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    return LossRequest(made.model, batch, scored_BC=batch["completion_mask"].bool())


def scored(made, request, change):
    arguments = padded_batch(request.inputs)
    arguments["input_ids"] = change(arguments["input_ids"])
    with made.trl_pass.requested(request):
        return made._get_per_token_logps_and_entropies(made.model, **arguments)


def test_other_rows_are_not_masked_by_the_losss_tokens(made, monkeypatch):
    """On a TRL that was not tested the pass may score the rows in another order."""
    request = request_of(made)
    monkeypatch.setattr(trl_pass, "is_tested", lambda: False)
    assert scored(made, request, lambda ids: ids)[0].shape == request.scored_BC.shape
    with pytest.raises(UserError):
        scored(made, request, lambda ids: ids.flip(0))


def test_a_loss_that_leaves_out_tokens_has_to_ask_for_the_others(made):
    request = request_of(made)
    with pytest.raises(UserError), made.trl_pass.requested(request):
        pass


def test_a_second_call_of_the_pass_has_gradients_of_its_own(made):
    """As in stock TRL: of the policy, with a gradient."""
    request = LossRequest(made.model, request_of(made).inputs, is_open=True)
    first = scored(made, request, lambda ids: ids)[0]
    further = made._get_per_token_logps_and_entropies(made.model, **padded_batch(request.inputs))[0]
    torch.testing.assert_close(further, first, rtol=1e-4, atol=1e-5)
    assert further.requires_grad and further is not first
