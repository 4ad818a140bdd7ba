"""Prompts that are attended to once per group, against whole rows computed anew."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.test_decoding import MODELS, PAD, PROMPTS, build, greedy, sampled
from trl_fsdp_qlora.prefix_sharing.attention import install
from trl_fsdp_qlora.rollout import decoding as decoding_module
from trl_fsdp_qlora.rollout.decoding import Decoding, distinct_rows
from trl_fsdp_qlora.rollout.shared_prompts import SharedPrompts

# Logits of about 5 after four layers of sums in another order; a key too many or too few moves them by tenths.
ROUNDING = 2e-5
ONCE = {"llama", "qwen3", "moe"}


def padded(prompts=PROMPTS):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def run(model, config, prompts=PROMPTS):
    ids, mask = padded(prompts)
    decoding = Decoding()
    first, decoding.place_R = distinct_rows(torch.cat([ids, mask], 1))
    out = model.generate(ids[first], attention_mask=mask[first], generation_config=config, custom_generate=decoding)
    return out, mask, decoding


@pytest.mark.parametrize("name", MODELS)
def test_who_attends_once_is_known(name):
    model = build(name)
    implementation = model.config._attn_implementation
    reason = run(model, greedy(max_new_tokens=3))[2].per_row
    assert (reason is None) == (name in ONCE)
    if name not in ONCE:
        assert "Sliding" in reason
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "prefix_sharing_sdpa"])
@pytest.mark.parametrize("name", sorted(ONCE))
@torch.no_grad()
def test_logits_equal_whole_rows(name, implementation):
    model = build(name)
    if implementation.startswith("prefix_sharing_"):
        install(model)
    else:
        model.set_attn_implementation(implementation)
    steps = []
    hook = model.register_forward_hook(lambda _, __, outputs: steps.append(outputs.logits[:, -1]))
    # Half of the prompts twice as often as the other half, in no order.
    prompts = [PROMPTS[i] for i in (4, 0, 4, 8, 0, 4)]
    out, mask, decoding = run(model, sampled(eos_token_id=[63], suppress_tokens=[63], max_new_tokens=7), prompts)
    hook.remove()
    assert decoding.per_row is None and model.config._attn_implementation == implementation
    mask = torch.cat([mask, mask.new_ones(len(mask), 7)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = model(out, attention_mask=mask, position_ids=positions).logits
    start = mask.shape[1] - 7
    assert len(steps) == 7
    for i, logits in enumerate(steps[1:]):
        torch.testing.assert_close(logits, expected[:, start + i], rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_pure_bfloat16_is_as_exact_as_the_models_own_forward():
    """Against float32 on the same weights: no further away than the bf16 model is with whole rows."""
    model = build().to(torch.bfloat16)
    steps = []
    hook = model.register_forward_hook(lambda _, __, outputs: steps.append(outputs.logits[:, -1]))
    out, mask, decoding = run(model, sampled(eos_token_id=[63], suppress_tokens=[63], max_new_tokens=12))
    hook.remove()
    assert decoding.per_row is None and steps[-1].dtype == torch.bfloat16
    mask = torch.cat([mask, mask.new_ones(len(mask), 12)], 1)
    row = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    own, exact = model(out, **row).logits.float(), copy.deepcopy(model).float()(out, **row).logits
    start = mask.shape[1] - 12
    of_ours = torch.stack([(x.float() - exact[:, start + i]).abs().mean() for i, x in enumerate(steps[1:])])
    of_stock = (own - exact)[:, start:-1].abs().mean((0, 2))
    assert of_stock.min() > 0
    assert of_ours.mean() < 1.5 * of_stock.mean()  # a key too many moves logits by tenths, bf16 by hundredths


def test_prompts_are_held_once_and_leave_with_their_rows(monkeypatch):
    held = []

    class Seen(SharedPrompts):
        def select(self, kept):
            super().select(kept)
            held.append((len(kept), len(self.prompts[0][0]), self.cache.layers[0].keys.shape[0], self.prompt_count))

    monkeypatch.setattr(decoding_module, "SharedPrompts", Seen)
    model = build()
    out, _, decoding = run(model, greedy())
    assert decoding.per_row is None and held
    for rows, prompts, own, count in held:
        assert own == rows and prompts == count <= min(rows, 3)
    assert min(count for *_, count in held) < 3  # a prompt left with the last of its rows
    monkeypatch.undo()
    ids, mask = padded()
    assert torch.equal(out, model.generate(ids, attention_mask=mask, generation_config=greedy()))


def test_the_implementation_comes_back_after_an_error():
    model = build()
    model.lm_head.register_forward_hook(lambda *_: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        run(model, greedy())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma2", {"sliding_window": 6, "layer_types": ["full_attention"] * 4}, "softcap"),
        ("llama", {"attention_dropout": 0.5}, "dropout"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary"),
    ],
    ids=["softcap", "dropout", "dynamic rotary"],
)
def test_what_is_not_plain_attention_runs_per_row(name, changes, said):
    model = build(name)
    config = type(model.config)(**{**model.config.to_dict(), **changes})
    model = AutoModelForCausalLM.from_config(config).train()
    assert said in run(model, greedy(max_new_tokens=2))[2].per_row


class Elsewhere:
    """A cache whose layers attend to copies of what they cache."""

    def __init__(self, cache):
        self.cache = cache

    def update(self, *args, **kwargs):
        return tuple(x.clone() for x in self.cache.update(*args, **kwargs))


LEFT_OUT = "its mask leaves out part of the prompt"


@pytest.mark.parametrize(
    ("part", "prompts", "reason"),
    [
        ("mask", PROMPTS, LEFT_OUT),
        ("mask", [PROMPTS[0]] * 3, LEFT_OUT),  # no padding
        ("keys", PROMPTS, "it attends to other keys than it caches"),
    ],
)
def test_a_layer_that_does_something_of_its_own_is_seen_in_the_prefill(part, prompts, reason, monkeypatch):
    from transformers.models.llama import modeling_llama

    model, stock = build(), modeling_llama.LlamaAttention.forward
    model.set_attn_implementation("eager")

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if part == "keys":
            past_key_values = Elsewhere(past_key_values)
        elif attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[-1] > 1:
            attention_mask = attention_mask.clone()
            attention_mask[..., -2] = torch.finfo(attention_mask.dtype).min
        return stock(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
        )

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    out, mask, decoding = run(model, greedy(), prompts)
    assert decoding.per_row == reason
    assert torch.equal(out, model.generate(padded(prompts)[0], attention_mask=mask, generation_config=greedy()))


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_prefill_in_chunks_of_padded_prompts(chunk, implementation):
    model = build()
    model.set_attn_implementation(implementation)
    config = greedy(prefill_chunk_size=chunk)
    out, mask, decoding = run(model, config)
    assert decoding.per_row is None
    ids, _ = padded()
    assert torch.equal(out, model.generate(ids, attention_mask=mask, generation_config=config))


def test_distinct_rows_come_in_their_order():
    rows = torch.tensor([[3, 1], [2, 2], [3, 1], [0, 9], [2, 2]])
    first, place = distinct_rows(rows)
    assert first.tolist() == [0, 1, 3] and place.tolist() == [0, 1, 0, 2, 1]
    assert torch.equal(rows[first][place], rows)
