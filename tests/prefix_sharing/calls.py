"""Batches of rows of any kind, and what a call of a shared model is compared by with stock TRL's."""

import torch
from trl.trainer.utils import FusedCausalLMOutput

from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

from .helpers import VOCABULARY, assert_equal_gradients, closed, gradients

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
NO_CACHE = {"use_cache": False}


def random_tokens(count: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=draw)


def groups(draw) -> list[tuple[torch.Tensor, list[int]]]:
    """Three prompts behind one system prompt, three completions of each: tokens, and which of them are labels."""
    rows = []
    system = random_tokens(12, draw)
    for n in range(3):
        prompt = torch.cat([system, random_tokens(4 + n, draw)])
        for c in range(3):
            tokens = torch.cat([prompt, random_tokens(5 + 2 * c, draw)])
            rows.append((tokens, [*range(len(prompt), len(tokens))]))
    return rows


def awkward(draw) -> list[tuple[torch.Tensor, list[int]]]:
    """A row that is another's beginning, one twice, one that leaves it half-way, holes in labels, none, labels from
    the start.
    """
    system = random_tokens(10, draw)
    completion = random_tokens(9, draw)
    first, second = (torch.cat([system, random_tokens(n, draw)]) for n in (6, 3))
    whole = torch.cat([first, completion])
    behind_first = [
        whole,
        torch.cat([first, completion[:5]]),
        whole.clone(),
        torch.cat([first, completion[:4], random_tokens(5, draw)]),
    ]
    rows = [(tokens, [*range(len(first), len(tokens))]) for tokens in behind_first]
    start = len(second)
    rows.append((torch.cat([second, random_tokens(7, draw)]), [start, start + 1, start + 5]))
    rows.append((torch.cat([second, random_tokens(4, draw)]), []))
    rows.append((random_tokens(20, draw), [*range(1, 20)]))
    rows.append((random_tokens(2, draw), [1]))
    rows += [(torch.cat([second, random_tokens(1, draw)]), [start]) for _ in range(2)]
    return rows


def padded(rows, side: str, draw) -> dict[str, torch.Tensor]:
    """A batch of rows in any order, with random tokens in the padding."""
    rows = [rows[i] for i in torch.randperm(len(rows), generator=draw)]
    width = max(len(tokens) for tokens, _ in rows) + 2
    ids = torch.randint(3, VOCABULARY, (len(rows), width), generator=draw)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for i, (tokens, scored) in enumerate(rows):
        room = width - len(tokens)
        offset = {"right": 0, "left": room, "mixed": (3 * i) % (room + 1)}[side]
        ids[i, offset : offset + len(tokens)] = tokens
        mask[i, offset : offset + len(tokens)] = 1
        for token in scored:
            labels[i, offset + token] = tokens[token]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_batch(make_rows=groups, side="right", seed=0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return padded(make_rows(draw), side, draw)


def call(model, batch, **arguments) -> FusedCausalLMOutput:
    return model(**batch, **arguments, fused_lm_head=True)


def assert_equal_outputs(ours, stock, labels, tolerance=2e-5):
    is_scored = labels[:, 1:] != -100
    assert torch.equal(ours.label_mask, stock.label_mask) and torch.equal(ours.label_mask, is_scored)
    for name in (*FIELDS, "loss", "aux_loss"):
        mine = getattr(ours, name)
        theirs = getattr(stock, name)
        assert (mine is None) == (theirs is None), name
        if mine is None:
            continue
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, name
        if name == "is_top1":
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=1e-5, msg=name)
        assert mine.ndim == 0 or not mine[~is_scored].any(), name


def assert_shares(model, batch, may_run_padded=False, **arguments):
    """Values and gradients of the loss, of weighted log-probabilities and of their entropies; the pass was packed."""
    sharing = model.prompt_sharing if hasattr(model, "prompt_sharing") else model.get_base_model().prompt_sharing
    weight = torch.randn(2, *batch["labels"][:, 1:].shape, generator=torch.Generator().manual_seed(3))

    def run():
        output = call(model, batch, **arguments)
        entropy = 0.0 if output.entropy is None else (output.entropy * weight[1]).sum()
        (output.loss + (output.log_probs * weight[0]).sum() + entropy).backward()
        return output, gradients(model)

    with closed(sharing):
        stock, reference = run()
    ours, our_gradients = run()
    assert sharing.status.packs, sharing.describe()
    assert may_run_padded or 0 < sharing.figures.tokens < batch["input_ids"].numel()
    assert_equal_outputs(ours, stock, batch["labels"])
    assert_equal_gradients(our_gradients, reference, tolerance=2e-5)
    return sharing.figures


def without_labels(batch) -> dict[str, torch.Tensor]:
    return {name: x for name, x in batch.items() if name != "labels"}


def weighted(x: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """A sum of all entries of `(B, L, ...)` with random weights, which are zero at padding."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return (x * weight * mask_BL.reshape(*mask_BL.shape, *[1] * (x.ndim - 2))).sum()


def assert_same(model, run, is_packed=True):
    """`run(model)` returns what it returns in stock TRL, gradients too: tensors, and a number to run backward from."""
    base = causal_language_model(model)
    with closed(base.prompt_sharing):
        stock, loss = run(model)
        loss.backward()
    reference = gradients(model)
    ours, loss = run(model)
    loss.backward()
    sharing = base.prompt_sharing
    assert sharing.status.packs and (sharing.figures.tokens > 0) == is_packed, sharing.describe()
    for mine, theirs in zip(ours, stock, strict=True):
        # Rounding of float32 behind two layers with large weights, in sums of other shapes.
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=1e-5)
    assert_equal_gradients(gradients(model), reference, tolerance=2e-5)
    return sharing.figures
