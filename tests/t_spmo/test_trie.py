"""T-SPMO's credit against an enumeration of all prefixes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.t_spmo.credit import prefix_transitions


def padded(completions, pad=0):
    width = max(1, *map(len, completions))
    ids = torch.tensor([completion + [pad] * (width - len(completion)) for completion in completions])
    return ids, torch.tensor([[1] * len(c) + [0] * (width - len(c)) for c in completions])


def mean_below(prefix, completions, rewards):
    below = [r for c, r in zip(completions, rewards, strict=True) if r == r and c[: len(prefix)] == prefix]
    return sum(below) / len(below)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from([0.0, 0.5, 1.0, -2.0, float("nan")])),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=300, deadline=None)
def test_advantages_equal_enumeration(group):
    completions, rewards = [list(c) for c, _ in group], [r for _, r in group]
    ids, mask = padded(completions)
    got = prefix_transitions(ids, mask, torch.tensor(rewards))
    pairs = set()
    for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        for t in range(ids.shape[1]):
            want = 0.0
            if t < len(completion) and reward == reward:
                pairs.add(tuple(completion[: t + 1]))
                want = mean_below(completion[: t + 1], completions, rewards)
                want -= mean_below(completion[:t], completions, rewards)
            assert got.advantage[i, t].item() == pytest.approx(want, abs=1e-12)
    marked = [tuple(completions[i][: t + 1]) for i, t in got.representative.nonzero().tolist()]
    assert sorted(marked) == sorted(pairs)
