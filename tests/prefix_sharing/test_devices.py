"""What depends on the device a layer lies on: index tensors are made for each, and kernels are asked for what they have."""

from types import SimpleNamespace

import pytest
import torch

from trl_fsdp_qlora.prefix_sharing import attention, cascade, two_part

from .test_attention import make_layout

META = torch.device("meta")


def tensors(value):
    """All tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


def call_on(layout, device):
    query = torch.empty(1, 2, layout.tokens, 4, device=device)
    return SimpleNamespace(layout=layout, query=query, base="sdpa", window=2)


@pytest.mark.parametrize(
    "derived",
    [
        lambda layout, device: two_part._families(layout, device),
        lambda layout, device: two_part._mask(call_on(layout, device), 2, 4, torch.empty(1, device=device)),
        lambda layout, device: cascade._varlen._lengths(layout, device),
    ],
    ids=["two_part_blocks", "two_part_mask", "cascade_lengths"],
)
def test_layers_on_two_devices_get_tensors_of_their_own(derived):
    """A model split over devices: the second device's layers must not be given what the first one's were."""
    layout = make_layout("ragged groups")
    for device in (torch.device("cpu"), META):
        found = list(tensors(derived(layout, device)))
        assert found and {x.device for x in found} == {device}


def test_the_mask_of_a_nested_row_too():
    layout = make_layout("nothing shared")
    layout.end_T = torch.full((layout.tokens,), layout.tokens).numpy()
    for device in (torch.device("cpu"), META):
        assert attention._tree_mask(call_on(layout, device), 0, 3).device == device


@pytest.mark.parametrize(("capability", "served"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cascade_asks_for_the_compute_capability(capability, served, monkeypatch):
    """Volta and Turing have no flash kernel in torch: `auto` must take another backend before it is called."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 4, 8, 64))
    reason = cascade.refuses(SimpleNamespace(query=query, value=query, window=None, softcap=None, sinks=None))
    assert (reason is None) == served
    assert served or f"has {capability[0]}.{capability[1]}" in reason
