"""Every supported family equals stock TRL, for every loss type, on every backend that claims it."""

import pytest
import torch
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing.attention import UnsupportedAttention, install
from trl_fsdp_qlora.prefix_sharing.layout import pack
from trl_fsdp_qlora.scoring.logprobs import add_scoring_head

from .helpers import (
    COMPLETION,
    LOSS_TYPES,
    SUPPORTED,
    assert_equal_gradients,
    awkward_batch,
    build,
    gradients,
    loss_inputs,
    make_trainer,
    packed_log_probs,
    stock_log_probs,
    with_stock_head,
)

# Which backend "auto" picks, layer by layer.
AUTO = {name: ["cascade"] * 2 for name in SUPPORTED} | {
    "qwen3_sliding": ["cascade", "two_part"],
    "gemma2": ["two_part"] * 2,
    "gemma3": ["two_part", "cascade"],
    "mistral_sliding": ["two_part"] * 2,
    "gpt_oss": ["two_part"] * 2,
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_log_probs_entropy_and_gradients_equal_stock(name):
    model = with_stock_head(build(SUPPORTED[name]))
    ids, mask = awkward_batch()
    weight = torch.randn(len(ids), COMPLETION, 2, generator=torch.Generator().manual_seed(5))
    logps, entropy = stock_log_probs(model, ids, mask)
    (torch.stack([logps, entropy], -1) * weight).sum().backward()
    reference = gradients(model)

    install(model)
    add_scoring_head(model, 0.9)
    with torch.no_grad():  # what does not ask for a packed row is untouched
        assert torch.equal(stock_log_probs(model, ids, mask)[0], logps)
    layout = pack(ids, mask, COMPLETION)
    served = []
    for backend in ("auto", "cascade", "two_part"):
        layout.layer_calls.clear()
        try:
            ours = packed_log_probs(model, layout, backend)
        except UnsupportedAttention:
            assert backend == "cascade" and "two_part" in AUTO[name]
            continue
        served.append(backend)
        if backend == "auto":
            assert layout.layer_calls == AUTO[name]
        # Rounding of float32 in sums of this length.
        torch.testing.assert_close(ours[0], logps, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(ours[1], entropy, atol=2e-5, rtol=1e-5)
        (torch.stack(ours, -1) * weight).sum().backward()
        assert_equal_gradients(gradients(model), reference)
    assert "two_part" in served


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_loss_type_equals_stock_trainer(name, tmp_path):
    ids, mask = awkward_batch()
    inputs = loss_inputs(ids, mask)
    stock = make_trainer(GRPOTrainer, build(SUPPORTED[name]), tmp_path)
    backends = ["two_part"] + ([] if "two_part" in AUTO[name] else ["cascade"])
    trainers = {
        backend: make_trainer(EfficientGRPOTrainer, build(SUPPORTED[name]), tmp_path, prefix_sharing=backend)
        for backend in backends
    }
    noise = torch.randn(len(ids), COMPLETION, generator=torch.Generator().manual_seed(7)) * mask[:, -COMPLETION:]
    with torch.no_grad():
        logps = stock._get_per_token_logps_and_entropies(stock.model, ids, mask, COMPLETION)[0]
    # Off-policy, and away from a reference, so that clipping and KL have a gradient.
    inputs |= {"old_per_token_logps": logps + 0.15 * noise, "ref_per_token_logps": logps - 0.2 * noise}
    for loss_type in LOSS_TYPES:
        results = {}
        for key, trainer in {"stock": stock, **trainers}.items():
            trainer.loss_type, trainer.beta = loss_type, 0.1
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            results[key] = loss.item(), gradients(trainer.model)
        for backend in backends:
            # VESPO weights a sequence by exp(k Σ log-ratio), which multiplies the rounding of all its log-probabilities.
            rel = 5e-5 if loss_type == "vespo" else 1e-5
            assert results[backend][0] == pytest.approx(results["stock"][0], rel=rel), (loss_type, backend)
            assert_equal_gradients(results[backend][1], results["stock"][1])
    for backend, trainer in trainers.items():
        assert trainer.prefix_sharing.active()
        assert trainer._metrics["train"][f"prefix_sharing/policy/layers_{backend}"][-1] == 1.0
