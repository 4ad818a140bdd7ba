"""Prompts that are attended to once per group, compared with whole rows."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests.trainers.decode.test_decoding import MODELS, PAD, PROMPTS, build, greedy, sampled
from trl_fsdp_qlora.compat.transformers import CACHE
from trl_fsdp_qlora.engines.decode import decoding as decoding_module
from trl_fsdp_qlora.engines.decode.decoding import Decoding, distinct_rows
from trl_fsdp_qlora.engines.decode.shared_prompts_on_cpu import SharedPrompts
from trl_fsdp_qlora.prefix_sharing.attention.layers import install

# Logits of about 5 after four layers of sums in another order; a key too many or too few moves them by tenths.
ROUNDING = 2e-5
ONCE = {"llama", "qwen3", "moe"}


def run(model, config, prompts=PROMPTS):
    """What the loop gives for prompts padded on the left, their ids and mask, and the loop."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    decoding = Decoding()
    first, decoding.prompt_R = distinct_rows(torch.cat([ids, mask], 1))
    out = model.generate(ids[first], attention_mask=mask[first], generation_config=config, custom_generate=decoding)
    return out, ids, mask, decoding


def stock(model, ids, mask, config):
    return model.generate(ids, attention_mask=mask, generation_config=config)


@torch.no_grad()
def logits_of_steps(model, prompts, tokens):
    """Logits `(R, tokens - 1, V)` of the steps behind the prefill, those of whole rows, and these rows."""
    steps = []
    hook = model.register_forward_hook(lambda _, __, outputs: steps.append(outputs.logits[:, -1]))
    endless = sampled(eos_token_id=[63], suppress_tokens=[63], max_new_tokens=tokens)
    out, _, mask, decoding = run(model, endless, prompts)
    hook.remove()
    assert decoding.per_row is None and len(steps) == tokens
    start = mask.shape[1]
    mask = torch.cat([mask, mask.new_ones(len(mask), tokens)], 1)
    row = {"input_ids": out, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    return torch.stack(steps[1:], 1), model(**row).logits[:, start:-1], (row, start)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "prefix_sharing_sdpa"])
@pytest.mark.parametrize("name", sorted(ONCE))
def test_logits_equal_whole_rows(name, implementation):
    model = build(name)
    if implementation.startswith("prefix_sharing_"):
        install(model)
    else:
        model.set_attn_implementation(implementation)
    # Half of the prompts twice as often as the other half, in no order.
    actual, expected, _ = logits_of_steps(model, [PROMPTS[i] for i in (4, 0, 4, 8, 0, 4)], 7)
    torch.testing.assert_close(actual, expected, rtol=0, atol=ROUNDING)
    assert model.config._attn_implementation == implementation


def test_pure_bfloat16_is_as_exact_as_the_models_own_forward():
    """Against float32 on the same weights: no further away than the bf16 model is with whole rows."""
    model = build().to(torch.bfloat16)
    ours, models, (row, start) = logits_of_steps(model, PROMPTS, 12)
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(**row).logits[:, start:-1]
    of_stock = (models.float() - exact).abs().mean()
    assert ours.dtype == torch.bfloat16 and of_stock > 0
    # A key too many moves logits by tenths, bf16 by hundredths.
    assert (ours.float() - exact).abs().mean() < 1.5 * of_stock


def test_prompts_are_held_once_and_leave_with_their_rows(monkeypatch):
    held = []

    class Seen(SharedPrompts):
        def select(self, kept):
            super().select(kept)
            held.append((len(kept), len(self.prompts[0][0]), self.cache.layers[0].keys.shape[0], self.prompt_count))

    monkeypatch.setattr(decoding_module, "SharedPrompts", Seen)
    model = build()
    out, *inputs, decoding = run(model, greedy())
    assert decoding.per_row is None and held
    for rows, prompts, own_tokens, count in held:
        assert own_tokens == rows and prompts == count <= min(rows, 3)
    assert min(count for *_, count in held) < 3  # a prompt left with the last of its rows
    assert (out == PAD).any() and torch.equal(out, stock(model, *inputs, greedy()))


OTHERS = {
    "softcap": ("gemma2", {"sliding_window": 6, "layer_types": ["full_attention"] * 4}),
    "dropout": ("llama", {"attention_dropout": 0.5}),
    "rotary": ("dynamic", {}),
    **{f"Sliding {name}": (name, {}) for name in ("qwen3-sliding", "mistral-sliding", "gemma2", "gpt-oss")},
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_not_plain_attention_runs_per_row(reason):
    name, changes = OTHERS[reason]
    config = MODELS[name]
    model = AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **changes})).train()
    assert reason.split()[0] in run(model, greedy(max_new_tokens=2))[-1].per_row


@pytest.mark.parametrize(
    ("part", "prompts", "reason"),
    [
        ("mask", PROMPTS, "its mask leaves out part of the prompt"),
        ("mask", [PROMPTS[0]] * 3, "its mask leaves out part of the prompt"),  # no padding
        ("keys", PROMPTS, "it attends to other keys than it caches"),
    ],
)
def test_a_layer_that_does_something_of_its_own_is_seen_in_the_prefill(part, prompts, reason, monkeypatch):
    model = build()
    unchanged = modeling_llama.LlamaAttention.forward
    model.set_attn_implementation("eager")

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if part == "keys":  # a cache that gives copies of what it caches
            cached = kwargs[CACHE].update
            kwargs[CACHE] = SimpleNamespace(update=lambda *args, **named: tuple(x.clone() for x in cached(*args)))
        elif attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[-1] > 1:
            attention_mask = attention_mask.clone()
            attention_mask[..., -2] = torch.finfo(attention_mask.dtype).min
        return unchanged(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    out, *inputs, decoding = run(model, greedy(), prompts)
    assert decoding.per_row == reason
    assert torch.equal(out, stock(model, *inputs, greedy()))


@pytest.mark.parametrize(
    "changes",
    [{"prefill_chunk_size": 1}, {"prefill_chunk_size": 4}, {"eos_token_id": None, "max_new_tokens": 6}],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prompts_in_chunks_and_rows_without_an_end(changes, implementation):
    model = build()
    config = greedy(**changes)
    model.set_attn_implementation(implementation)
    out, *inputs, decoding = run(model, config)
    assert decoding.per_row is None
    assert torch.equal(out, stock(model, *inputs, config))


def test_under_autocast_prompts_are_attended_to_per_row_and_the_implementation_comes_back():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        assert run(model, greedy(max_new_tokens=2))[-1].per_row == "autocast"
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as accelerate wraps it: seen in the prefill
    assert run(model, greedy(max_new_tokens=2))[-1].per_row == "autocast"
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, greedy())
    assert model.config._attn_implementation == "sdpa"  # it comes back after an error, too
