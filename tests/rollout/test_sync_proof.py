"""What the proof of a sync catches, on two policies whose log-probabilities are known."""

from contextlib import contextmanager

import pytest
import torch

from trl_fsdp_qlora.rollout.sync_proof import AdapterSnapshot, StaleRolloutError, SyncProof

ROWS, WIDTH = 8, 64


def policies(step: float, noise: float, seed: int = 0):
    """Log-probabilities under the new and the old policy, the engine's rounding, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    new = -2 + torch.randn(ROWS, WIDTH, generator=generator)
    old = new + step * torch.randn(ROWS, WIDTH, generator=generator)
    rounding = noise * torch.randn(ROWS, WIDTH, generator=generator)
    mask = torch.rand(ROWS, WIDTH, generator=generator) > 0.2
    return new, old, rounding, mask


def started(noise: float, half: bool = False) -> SyncProof:
    proof = SyncProof(half)
    new, _, rounding, mask = policies(0.0, noise, seed=7)
    proof.judge_batch(*proof.batch_sums(new + rounding, new, mask).tolist(), version=1)
    return proof


def judge(proof: SyncProof, sampled, new, old, mask, version=2) -> None:
    proof.judge_batch(*proof.batch_sums(sampled, new, mask).tolist(), version=version)
    proof.judge_version(*proof.version_sums(sampled, new, old, mask).tolist(), version=version)


def test_a_good_sync_passes_and_says_so():
    proof = started(1e-4)
    new, old, rounding, mask = policies(1e-2, 1e-4)
    judge(proof, new + rounding, new, old, mask)
    assert abs(proof.last["staleness"]) < 0.01
    assert proof.last["staleness_error"] < 0.01


def test_the_sums_are_brute_force():
    new, old, rounding, mask = policies(0.1, 0.01)
    sampled = new + rounding
    sampled[0, 0] = float("nan")
    mask[0, 0] = True
    tokens = absolute = squared = product = step = largest = 0.0
    for b in range(ROWS):
        for t in range(WIDTH):
            if mask[b, t] and not (b == t == 0):
                d, s = (sampled[b, t] - new[b, t]).item(), (old[b, t] - new[b, t]).item()
                tokens, absolute, squared = tokens + 1, absolute + abs(d), squared + d * d
                product, step, largest = product + d * s, step + s * s, max(largest, abs(d))
    assert SyncProof.batch_sums(sampled, new, mask).tolist() == pytest.approx([tokens, absolute, squared, largest])
    assert SyncProof.version_sums(sampled, new, old, mask).tolist() == pytest.approx([product, step])


@pytest.mark.parametrize(
    "answer, held",
    [
        ("old", "the version before"),
        ("twice", "neither"),  # an adapter scaled twice overshoots the step from the version before
    ],
)
def test_a_wrong_version_is_told_though_it_lies_inside_the_band(answer, held):
    proof = started(2e-2, half=True)
    new, old, rounding, mask = policies(2e-2, 2e-2)
    sampled = {"old": old, "twice": 2 * new - old}[answer] + rounding
    with pytest.raises(StaleRolloutError, match=held):
        for version in range(2, 20):
            judge(proof, sampled, new, old, mask, version)


def test_evidence_adds_up_until_it_tells():
    proof = started(2e-2, half=True)
    for version in range(2, 200):
        new, old, rounding, mask = policies(2e-3, 2e-2, seed=version)
        try:
            judge(proof, old + rounding, new, old, mask, version)
        except StaleRolloutError as error:
            assert version > 2
            assert "staleness" in str(error)
            return
    pytest.fail("198 stale syncs went unnoticed")


def test_small_good_steps_never_alarm():
    for seed in range(20):
        proof = started(2e-2, half=True)
        for version in range(2, 40):
            new, old, rounding, mask = policies(4e-3, 2e-2, seed=1000 * seed + version)
            judge(proof, new + rounding, new, old, mask, version)


def test_another_base_is_told_at_the_first_sync():
    new, old, rounding, mask = policies(0.5, 1e-5)
    proof = SyncProof(half=False)
    with pytest.raises(StaleRolloutError, match="another base"):
        proof.judge_batch(*proof.batch_sums(old + rounding, new, mask).tolist(), version=1)


def test_a_later_difference_outside_the_band_names_both_figures():
    proof = started(1e-5)
    new, old, _, mask = policies(0.1, 0.0)
    with pytest.raises(StaleRolloutError, match=r"by 0\.0\d+ nats on average; after the first sync it was 7.9"):
        proof.judge_batch(*proof.batch_sums(old, new, mask).tolist(), version=2)


def test_nan_never_passes():
    proof = SyncProof(half=True)
    with pytest.raises(StaleRolloutError):
        proof.judge_batch(4.0, float("nan"), float("nan"), float("nan"), version=1)


def test_snapshot_exchanges_and_comes_back():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    snapshot = AdapterSnapshot(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    snapshot.exchange()
    assert torch.equal(model.weight, before["weight"])
    snapshot.exchange()
    assert torch.equal(model.weight, before["weight"] + 1.0)
    assert torch.equal(model.bias, before["bias"])


def test_snapshot_gathers_what_zero3_partitions(monkeypatch):
    """A parameter is empty outside DeepSpeed's `GatheredParameters`, as on a rank that holds none of it."""
    zero = pytest.importorskip("deepspeed").zero
    model = torch.nn.Linear(3, 2, bias=False)
    weight = model.weight
    weight.ds_id, whole = 0, weight.data

    @contextmanager
    def gathered(parameters, modifier_rank=None):
        nonlocal whole
        assert len(parameters) == 1 and parameters[0] is weight
        weight.data = whole.clone()
        yield
        whole = weight.data if modifier_rank == 0 else whole  # what was changed without saying so is lost
        weight.data = torch.empty(0)

    monkeypatch.setattr(zero, "GatheredParameters", gathered)
    before = whole.clone()
    weight.data = torch.empty(0)
    snapshot = AdapterSnapshot(model)
    assert torch.equal(snapshot.weights[0][1], before)
    whole = before + 1.0  # an optimizer step
    snapshot.exchange()
    assert torch.equal(whole, before)
    snapshot.exchange()
    assert torch.equal(whole, before + 1.0)
