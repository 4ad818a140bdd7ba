"""V*, loss and gradients against `trl.experimental.a2po` on the same rewards and completions."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.experimental.a2po import A2POConfig, A2POTrainer

from tests.tiny import character_tokenizer
from trl_fsdp_qlora.trainers.a_star_po import trainer as trainer_module
from trl_fsdp_qlora.trainers.a_star_po.values import keyed

from .tiny import has_digit, problems

ROWS = 12


def replay(completions: dict[tuple, list[list[int]]]):
    """A `generate` that returns recorded completions, as often as `num_return_sequences` asks."""

    def generate(input_ids, attention_mask, generation_config, **_):
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            recorded = completions[tuple(ids[mask.bool()].tolist())]
            assert len(recorded) == generation_config.num_return_sequences
            rows += [ids.tolist() + completion for completion in recorded]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    return generate


@pytest.mark.parametrize("full", [True, False], ids=["full", "lora"])
def test_values_loss_and_gradients(tmp_path, make_trainer, model_dir, monkeypatch, full):
    sizes = {"rows": ROWS, "per_device_train_batch_size": ROWS, "value_batch_size": 5}
    ours = make_trainer(full=full, beta2=0.5, entropy_coef=0.0, **sizes)
    drawn = {}
    original = trainer_module.generate

    def recording(model, prompt_ids, *args, **kwargs):
        out = original(model, prompt_ids, *args, **kwargs)
        for prompt, completion in zip(prompt_ids, out, strict=True):
            drawn.setdefault(tuple(prompt), []).append(completion)
        return out

    monkeypatch.setattr(trainer_module, "generate", recording)
    ours.estimate_values()

    base = AutoModelForCausalLM.from_pretrained(model_dir)
    if not full:
        torch.manual_seed(0)
        base = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        adapter = {name: value for name, value in ours.model.state_dict().items() if "lora_" in name}
        assert not base.load_state_dict(adapter, strict=False).unexpected_keys
    config = A2POConfig(
        output_dir=str(tmp_path / "stock"),
        max_completion_length=8,
        beta2=0.5,
        filter_all_incorrect=False,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    theirs = A2POTrainer(base, has_digit, config, problems(ROWS), processing_class=character_tokenizer())
    theirs.ref_model.generate = replay(drawn)
    theirs._estimate_optimal_values()
    values = {row["prompt"]: ours.values.known[key] for key, row in keyed(problems(ROWS).to_list())}
    assert values.keys() == theirs._optimal_values.keys()
    assert len(set(values.values())) > 2
    for prompt, value in values.items():
        # Stock computes in float32 and reports the mean with a rounding of 1e-7.
        assert value == pytest.approx(theirs._optimal_values[prompt], abs=1e-6)

    for model in (ours.model, theirs.model):  # the policy away from the reference
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in model.train().parameters():
                if parameter.requires_grad:
                    parameter += 0.3 * torch.randn_like(parameter)
    rows = problems(ROWS).to_list()
    batch = ours._generate_and_score_completions(copy.deepcopy(rows))
    ids = [
        [row[mask.bool()].tolist() for row, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]
    completions = {tuple(prompt): [completion] for prompt, completion in zip(*ids, strict=True)}
    theirs.model.generate = replay(completions)
    their_batch = theirs._prepare_inputs(rows)
    torch.testing.assert_close(batch["advantages"], their_batch["rewards"] - their_batch["v_star"], atol=1e-6, rtol=0)

    ours.current_gradient_accumulation_steps = 1
    loss = ours._compute_loss(ours.model, batch)
    their_loss = theirs.compute_loss(theirs.model, their_batch)
    # The log-ratio must be visible in the loss, or the comparison would only see the target.
    assert abs(their_loss - (batch["advantages"] ** 2).mean()) > 1e-3
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = {name: p.grad for name, p in theirs.model.named_parameters() if p.grad is not None}
    our_gradients = {name: p.grad for name, p in ours.model.named_parameters() if p.grad is not None}
    assert gradients.keys() == our_gradients.keys()
    scale = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        # float32 through two different LM-head kernels
        torch.testing.assert_close(our_gradients[name], gradient, atol=2e-5 * scale.item(), rtol=1e-4, msg=name)
