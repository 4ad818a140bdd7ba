"""Ties between tokens of one context at a quantile of entropies, compared with stock."""

import torch
from trl import GRPOTrainer

from tests.core.prefix_sharing.helpers import (
    COMPLETION,
    COMPLETION_LENGTHS,
    PROMPT_LENGTHS,
    SUPPORTED,
    build,
    make_batch,
    make_trainer,
)
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.scoring.contexts import share_values


def test_first_of_equal_contexts():
    ids = torch.tensor([[9, 1, 5, 6, 7], [8, 1, 5, 6, 7], [8, 1, 5, 4, 7], [8, 2, 5, 6, 7]])
    mask = torch.ones_like(ids)
    mask[:, 0] = 0  # what is under the padding does not count
    values = torch.arange(12.0).view(4, 3)
    assert share_values(values, ids, mask, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 8], [9, 10, 11]]
    keys = torch.tensor([[4], [5], [4], [4]])  # the second row is about another image
    assert share_values(values, ids, mask, 3, keys).tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 8], [9, 10, 11]]
    mask[0, 2:] = 0  # the first completion was cut off and is masked: no other token gets its zeros
    values[0] = 0
    assert share_values(values, ids, mask, 3).tolist() == [[0, 0, 0], [3, 4, 5], [3, 4, 8], [9, 10, 11]]


def test_a_quantile_that_falls_on_a_tie_selects_what_stock_selects(tmp_path):
    stock, ours = (
        make_trainer(cls, build(SUPPORTED["qwen3"]), tmp_path, top_entropy_quantile=0.5)
        for cls in (GRPOTrainer, EfficientGRPOTrainer)
    )
    for seed in range(10):
        ids, mask = make_batch(PROMPT_LENGTHS, COMPLETION_LENGTHS, seed=seed)
        for first, last, same in ((0, 4, 4), (4, 7, 3)):  # completions that begin alike
            ids[first:last, -COMPLETION : same - COMPLETION] = ids[first, -COMPLETION : same - COMPLETION]
        if seed % 2:  # completions before their groups that were cut off are masked, as TRL masks them
            mask[[0, 4], -COMPLETION:] = 0
        with torch.no_grad():
            entropies = []
            for trainer in (stock, ours):
                score = trainer._get_per_token_logps_and_entropies
                _, entropies_BC, _ = score(trainer.model, ids, mask, COMPLETION, compute_entropy=True)
                entropies.append(entropies_BC)
        for quantile in torch.linspace(0.05, 0.95, 19).tolist():
            chosen = [stock.get_high_entropy_mask(entropy, mask[:, -COMPLETION:], quantile) for entropy in entropies]
            assert torch.equal(*chosen), (seed, quantile)
    assert ours.sharing.is_active
