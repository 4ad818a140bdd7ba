"""`UpcomingRows` against the list of a loader's micro-batches: what is looked at early is what is given later."""

import random

import pytest

from trl_fsdp_qlora.experimental.one_generation_ahead.upcoming import UpcomingRows

LOADED = [[{"row": number}] for number in range(12)]


def of_rows(micro_batch: list[dict]) -> str:
    return str(micro_batch[0]["row"])


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_are_the_loaders_in_any_order_of_looks(seed):
    draw = random.Random(seed)
    rows = UpcomingRows(iter(LOADED), of_rows)
    given = []
    first_of_step = 0
    while len(given) < len(LOADED):
        if draw.random() < 0.3:
            rows.begin_step()
            first_of_step = len(given)
        place = draw.randrange(6)
        expected = LOADED[first_of_step + place] if first_of_step + place < len(LOADED) else None
        assert rows.peek(place) is expected
        given.append(next(rows))
        assert rows.digests == [of_rows(batch) for batch in LOADED[first_of_step : len(given)]]
    assert given == LOADED
    with pytest.raises(StopIteration):
        next(rows)


def test_a_loader_is_read_no_further_than_asked():
    read = []
    rows = UpcomingRows((read.append(batch) or batch for batch in LOADED), of_rows)
    next(rows)
    assert read == LOADED[:1]
    rows.peek(3)
    assert read == LOADED[:4]


def test_micro_batches_are_not_digested_if_none_is_compared():
    rows = UpcomingRows(iter(LOADED), of_rows)
    rows.digests = None
    assert next(rows) == LOADED[0] and rows.digests is None
    rows.begin_step()
    assert rows.digests is None
