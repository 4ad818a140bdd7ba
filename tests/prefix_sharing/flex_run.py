"""FlexAttention compiled for rows of many layouts, forward and backward; prints the graphs that there are after each row.

In a process without an emulated device's dispatch mode, which Dynamo cannot enter. Numbers are not looked at: where no kernel
runs there are none.
"""

import json

import torch

from tests.prefix_sharing.test_attention import LAYOUTS, Call, draw, make_batch, pack
from trl_fsdp_qlora.prefix_sharing import flex


def main() -> None:
    graphs = []
    for window, softcap in ((None, 30.0), (None, None), (3, None)):
        for prompts, completions in LAYOUTS.values():
            ids, mask = make_batch(prompts, completions, prompt=5, completion=3)
            layout = pack(ids, mask, 3)  # on the host: without kernels nothing can be read from a device
            leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in draw(layout, 4, 2, size=32)]
            call = Call(*leaves, layout)
            call.window, call.softcap = window, softcap
            out = flex.attend(call)
            assert out.shape == (1, layout.tokens, 4, 32), out.shape
            grads = torch.autograd.grad(out.sum(), leaves)
            assert [x.shape for x in grads] == [x.shape for x in leaves]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    print(json.dumps({"graphs": graphs, "breaks": sum(torch._dynamo.utils.counters["graph_break"].values())}))


if __name__ == "__main__":
    main()
