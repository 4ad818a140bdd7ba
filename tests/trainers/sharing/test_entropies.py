"""Tokens that a trainer selects by their entropy are those that stock selects, although equal contexts tie."""

import torch
from trl import GRPOTrainer

from tests.prefix_sharing.helpers import COMPLETION as COLUMNS
from tests.prefix_sharing.helpers import (
    COMPLETION_LENGTHS,
    MULTIMODAL,
    PROMPT_LENGTHS,
    SUPPORTED,
    build,
    make_batch,
)
from tests.prefix_sharing.test_images import COMPLETION, IMAGE, with_images
from tests.trainers.helpers import make_trainer
from trl_fsdp_qlora import EfficientGRPOTrainer


def test_a_quantile_on_a_tie_selects_what_stock_selects(tmp_path):
    stock, ours = (
        make_trainer(cls, build(SUPPORTED["qwen3"]), tmp_path, top_entropy_quantile=0.5)
        for cls in (GRPOTrainer, EfficientGRPOTrainer)
    )
    for seed in range(10):
        ids, mask = make_batch(PROMPT_LENGTHS, COMPLETION_LENGTHS, seed=seed)
        for first, last, same in ((0, 4, 4), (4, 7, 3)):  # completions that begin alike
            ids[first:last, -COLUMNS : same - COLUMNS] = ids[first, -COLUMNS : same - COLUMNS]
        if seed % 2:  # completions before their groups that were cut off are masked, as TRL masks them
            mask[[0, 4], -COLUMNS:] = 0
        with torch.no_grad():
            entropies = []
            for trainer in (stock, ours):
                score = trainer._get_per_token_logps_and_entropies
                _, entropies_BC, _ = score(trainer.model, ids, mask, COLUMNS, compute_entropy=True)
                entropies.append(entropies_BC)
        for quantile in torch.linspace(0.05, 0.95, 19).tolist():
            chosen = [stock.get_high_entropy_mask(entropy, mask[:, -COLUMNS:], quantile) for entropy in entropies]
            assert torch.equal(*chosen), (seed, quantile)
    assert ours.sharing.status.packs


def test_equal_words_about_other_images_have_own_entropies(tmp_path):
    """Of a trainer that selects tokens by their entropy, in which equal contexts tie."""
    _, batch = with_images("qwen3_vl")
    ids, mask = batch.input_ids, batch.attention_mask
    for rows in ((0, 3), (1, 4)):  # of groups that ask the same of other pictures
        ids[rows[1], -COMPLETION:] = ids[rows[0], -COMPLETION:]
    mask[[0, 1, 3, 4], -COMPLETION:] = 1
    entropies = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        model = build(MULTIMODAL["qwen3_vl"])
        model.config.image_token_id = IMAGE
        trainer = make_trainer(cls, model, tmp_path, top_entropy_quantile=0.5)
        vision = {**batch.vision, "num_images": batch.num_images}
        with torch.no_grad():
            _, entropies_BC, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, COMPLETION, compute_entropy=True, **vision
            )
        entropies.append(entropies_BC * mask[:, -COMPLETION:])
    assert trainer.sharing.figures.tokens
    assert (entropies[0][0] - entropies[0][3]).abs().max() > 1e-2
    assert (entropies[0] - entropies[1]).abs().max() <= 1e-4
