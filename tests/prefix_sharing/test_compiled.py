"""Under torch.compile a packed row's layout and the scoring of its tokens stay out of the graphs."""

import pytest
import torch

from trl_fsdp_qlora.prefix_sharing.attention import install
from trl_fsdp_qlora.prefix_sharing.layout import pack
from trl_fsdp_qlora.scoring.logprobs import add_scoring_head

from .helpers import COMPLETION, SUPPORTED, build, make_batch, packed_log_probs

# Lengths, groups and scored tokens all differ.
BATCHES = [
    ([14, 14, 9, 9, 9], [9, 4, 6, 6, 6]),
    ([8, 8, 8, 8], [3, 2, 7, 9]),
    ([12, 11, 11], [5, 9, 1]),
    ([7, 7, 6, 6, 5], [9, 9, 8, 2, 4]),
]


@pytest.mark.slow
def test_new_batches_are_not_compiled_anew():
    model, graphs, counts = build(SUPPORTED["llama"]), [], []
    install(model)
    add_scoring_head(model, 0.9)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for lengths in BATCHES:
        layout = pack(*make_batch(*lengths), COMPLETION)
        got = packed_log_probs(compiled, layout)
        assert layout.layer_calls == ["cascade"] * 2  # counted, also inside a compiled model
        torch.testing.assert_close(got, packed_log_probs(model, layout), atol=1e-5, rtol=1e-5)
        counts.append(len(graphs))
    torch._dynamo.reset()
    # The second batch shows which sizes change; from then on the graphs serve every batch.
    assert counts[0] and counts[2:] == [counts[2]] * len(counts[2:]), counts
