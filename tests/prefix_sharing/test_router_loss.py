"""Router losses from the tokens of a packed row, compared with transformers' loss over the padded batch."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trl_fsdp_qlora.prefix_sharing.router_loss import router_loss, router_sums

from .helpers import awkward_batch, completion_labels, pack, read_batch

EXPERTS = 5
LAYERS = 3
TOP_K = 2


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_losses_and_gradients_equal_those_of_the_padded_batch(batches):
    ids, mask = awkward_batch()
    labels = completion_labels(ids, mask)
    packed_row = pack(ids, mask, labels, is_whole=True)
    assert packed_row.tokens < mask.sum()
    draw = torch.Generator().manual_seed(0)
    logits_LTE = torch.randn(LAYERS, packed_row.tokens, EXPERTS, generator=draw, requires_grad=True)
    sums = router_sums(tuple(logits_LTE), packed_row, TOP_K, batches)
    losses_M = router_loss(sums, TOP_K)
    weight_M = torch.arange(1.0, batches + 1)
    (losses_M * weight_M).sum().backward()
    gradient, logits_LTE.grad = logits_LTE.grad, None

    # Each token of the padded batch has the logits of the packed one that replaces it; those of padding count nowhere.
    padded_LBCE = torch.full((LAYERS, *ids.shape, EXPERTS), 99.0)
    offsets_B = read_batch(ids, mask, labels).offsets_B
    for row, index_L in enumerate(packed_row.forest.index_BL):
        index = torch.from_numpy(index_L[index_L >= 0])
        first = int(offsets_B[row])
        padded_LBCE[:, row, first : first + len(index)] = logits_LTE[:, index]
    expected = []
    for padded, mask_of_batch in zip(padded_LBCE.chunk(batches, dim=1), mask.chunk(batches), strict=True):
        of_layers = tuple(layer.flatten(0, 1) for layer in padded)
        expected.append(load_balancing_loss_func(of_layers, EXPERTS, TOP_K, mask_of_batch))
    expected_M = torch.stack(expected)
    (expected_M * weight_M).sum().backward()
    torch.testing.assert_close(losses_M, expected_M, atol=1e-6, rtol=1e-5)  # float32 sums in another order
    torch.testing.assert_close(gradient, logits_LTE.grad, atol=1e-7, rtol=1e-4)


def test_sums_of_passes_add_up_to_those_of_the_batch():
    ids, mask = awkward_batch()
    labels = completion_labels(ids, mask)
    logits_BCE = torch.randn(*ids.shape, EXPERTS, generator=torch.Generator().manual_seed(0))

    def sums_of(rows: slice) -> torch.Tensor:
        """Every token of these rows has the logits of its place, so nothing may be shared but in one row."""
        packed_row = pack(ids[rows], mask[rows], labels[rows], is_whole=True)
        places = torch.from_numpy(packed_row.row_T), torch.from_numpy(packed_row.column_T)
        return router_sums((logits_BCE[rows][places],), packed_row, TOP_K)

    # The first rows share a prompt, and the others share nothing with them.
    torch.testing.assert_close(sums_of(slice(0, 4)) + sums_of(slice(4, 10)), sums_of(slice(0, 10)))
