"""Adapters of PEFT: those that compute each token by itself run packed, others as in stock TRL."""

import inspect

import peft
import pytest
import torch
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import lora, these_first, tiny_model
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.compat.peft import BY_TOKEN, looks_beyond_tokens
from trl_fsdp_qlora.tools.small_base import character_tokenizer

# What a kind needs to fit layers of width 32, next to its target modules.
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6]},
    "VBLORA": {"num_vectors": 16, "vector_length": 8},
    "WAVEFT": {"n_frequency": 64},
    "FOURIERFT": {"n_frequency": 64},
    "TINYLORA": {"init_weights": True},  # without it its vectors are memory that nobody wrote
}


def adapted(kind):
    """A tiny model with an adapter of a kind, whose numbers are random."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    options = {"target_modules": ["q_proj", "v_proj"], **OPTIONS.get(kind, {})}
    if "init_weights" in inspect.signature(config).parameters:
        options.setdefault("init_weights", False)
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), config(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def largest_effect_of_other_tokens(model) -> float:
    """The largest difference between the outputs of an adapted layer for a batch and for each token alone.

    It is relative to the largest output.
    """
    seen = []

    def record(layer, args, output):
        seen.append((layer, args[0], output))

    hooks = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, BaseTunerLayer)]
    with torch.no_grad():
        model(input_ids=torch.arange(4, 14).view(2, 5))
        for hook in hooks:
            hook.remove()
        assert seen
        effects = []
        for layer, batch, output in seen:
            for row in range(2):
                for token in range(5):
                    alone = layer(batch[row : row + 1, token : token + 1])
                    effects.append(((alone[0, 0] - output[row, token]).abs().max() / output.abs().max()).item())
    return max(effects)


@pytest.mark.parametrize("kind", these_first(sorted(BY_TOKEN), "LORA", "OFT", "TRAINABLE_TOKENS", "VBLORA"))
def test_a_kind_of_the_list_computes_each_token_by_itself(kind):
    model = adapted(kind)
    assert largest_effect_of_other_tokens(model) <= 2e-6
    assert looks_beyond_tokens(model) is None


def test_a_kind_that_looks_at_other_tokens_is_not_in_the_list():
    """Lily's router takes the mean over all tokens of a batch."""
    model = adapted("LILY")
    assert largest_effect_of_other_tokens(model) > 1e-3
    assert "LILY" in looks_beyond_tokens(model)
    assert "LILY" in looks_beyond_tokens(model.get_base_model())


PLUS = character_tokenizer()("+", add_special_tokens=False)["input_ids"]
ALORA = LoraConfig(
    r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, alora_invocation_tokens=PLUS
)
LOOK_AT_ROWS = {
    "aLoRA": ALORA,
    "Lily": peft.LilyConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_weights=False),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def shared_and_stock(adapters):
    """A model with LoRA adapters that shares prompts and its equal without, and a function that compares them."""
    models = []
    for shares in (True, False):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), lora())
        for name, config in adapters.items():
            model.add_adapter(name, config)
        add_fused_lm_head(model.get_base_model(), 1.0, outputs=("log_probs",))
        models.append(share_prompts(model.eval()) if shares else model.eval())
    prompt = torch.tensor([*PLUS, 4, 5, 6, 7, *PLUS, 8, 9]).expand(4, -1)
    completions = torch.randint(3, 15, (4, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([prompt, completions], 1)
    labels = ids.clone()
    labels[:, : prompt.shape[1]] = -100

    def difference(**arguments):
        """Of log-probabilities, and whether the pass was packed."""
        with torch.no_grad():
            shared, stock = (
                model(input_ids=ids, labels=labels, fused_lm_head=True, **arguments).log_probs for model in models
            )
        return (shared - stock).abs().max().item(), models[0].get_base_model().prompt_sharing.figures.tokens > 0

    return models, difference


def test_rows_with_adapters_of_their_own():
    """`adapter_names` in one call, after passes that were packed; the next call is packed again."""
    _, difference = shared_and_stock({"other": lora()})
    assert difference() == (pytest.approx(0, abs=1e-5), True)
    assert difference(adapter_names=["default", "other", "__base__", "other"]) == (0, False)
    assert difference(adapter_names=["other"] * 4) == (0, False)
    assert difference() == (pytest.approx(0, abs=1e-5), True)


@pytest.mark.parametrize("name", ["aLoRA", "Lily"])
def test_an_adapter_that_is_added_after_packed_passes(name):
    """Only the first pass is compared with stock's, so a later adapter is recognised by its kind."""
    models, difference = shared_and_stock({})
    assert difference() == (pytest.approx(0, abs=1e-5), True)
    for number, model in enumerate(models):
        torch.manual_seed(1)
        if name == "aLoRA":
            model.add_adapter("later", ALORA)
            model.set_adapter("later")
        else:
            models[number] = get_peft_model(model.unload(), LOOK_AT_ROWS[name]).eval()
    assert difference() == (0, False)
