"""The public `verify`: it finds planted faults, leaves no trace, and answers for any call of a shared model."""

import pytest
import torch
from peft import get_peft_model

from tests.tiny import lora, these_first
from trl_fsdp_qlora import share_prompts, unshare_prompts, verify
from trl_fsdp_qlora.errors import PrefixSharingError
from trl_fsdp_qlora.prefix_sharing.attention import cascade

from .helpers import RECURRENT, SUPPORTED, awkward_batch, build, completion_labels, counting_padded_forwards


def fused_batch() -> dict[str, torch.Tensor]:
    ids, mask = awkward_batch()
    return {"input_ids": ids, "attention_mask": mask, "labels": completion_labels(ids, mask)}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_right_model_has_no_differences(name, labelled):
    assert name in {**SUPPORTED, **RECURRENT}
    model = share_prompts(build(name).train())
    batch = fused_batch()
    if not labelled:
        del batch["labels"]
    assert verify(model, batch) == []
    assert verify(model, batch, gradients=False) == []


WRAPS = [(wrap, of) for wrap in ("plain", "checkpointing", "re-entrant checkpointing") for of in ("LoRA", "full")]


@pytest.mark.parametrize(
    ("wrap", "trained"), these_first(WRAPS, ("plain", "full"), ("checkpointing", "full"), (WRAPS[-1][0], "LoRA"))
)
def test_wrong_values_and_gradients_are_returned_at_any_time(wrap, trained, monkeypatch):
    model = build("llama").train()
    if trained == "LoRA":
        model = get_peft_model(model, lora())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    if wrap != "plain":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": wrap.startswith("re-entrant")})
    share_prompts(model)
    batch = fused_batch()
    assert verify(model, batch) == []
    attend = cascade.attend

    def attend_without_gradient(call):
        call.value = call.value.detach()
        return attend(call)

    monkeypatch.setattr(cascade, "attend", attend_without_gradient)
    assert len(verify(model, batch)) == 1 and verify(model, batch, gradients=False) == []
    monkeypatch.setattr(cascade, "attend", lambda call: 1.1 * attend(call))
    assert verify(model, batch, gradients=False) != []
    monkeypatch.setattr(cascade, "attend", attend)
    assert verify(model, batch) == []


def test_a_fault_that_verify_finds_ends_no_packed_passes(monkeypatch):
    """The first pass of each type compares by itself."""
    model = share_prompts(build("llama"))
    attend = cascade.attend
    monkeypatch.setattr(cascade, "attend", lambda call: 1.1 * attend(call))
    assert verify(model, fused_batch())
    monkeypatch.setattr(cascade, "attend", attend)
    with torch.no_grad(), counting_padded_forwards(model) as padded:
        model(**fused_batch(), fused_lm_head=True)
    assert padded and model.prompt_sharing.figures.tokens


def test_what_cannot_be_compared_is_an_error_with_its_reason():
    model = build("llama")
    with pytest.raises(PrefixSharingError, match="share_prompts"):
        verify(model, fused_batch())
    share_prompts(model)
    holes = fused_batch()
    holes["attention_mask"][0, 17] = 0
    holes["labels"][0, 17] = -100
    with pytest.raises(PrefixSharingError):
        verify(model, holes)
    unshare_prompts(model)
    with pytest.raises(PrefixSharingError, match="share_prompts"):
        verify(model, fused_batch())
