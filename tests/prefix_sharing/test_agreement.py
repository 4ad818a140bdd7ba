"""Ranks answer together what one of them meets alone; the comparison of gradients leaves no trace."""

from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks(wrapper):
    launch(Path(__file__).with_name("agreement_worker.py"), wrapper, timeout=120)
