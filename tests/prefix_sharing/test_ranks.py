"""Sharing on two ranks: DDP, FSDP2 and ZeRO-3."""

from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.mark.processes
def test_both_ranks_give_one_answer_to_what_one_of_them_meets():
    launch(Path(__file__).with_name("ranks_worker.py"), "text", timeout=360)


@pytest.mark.processes
def test_recurrent_layers_under_zero_3_run_as_stock():
    """ZeRO-3 gathers in each call of a layer, which a packed row calls as often as its batch wants: ranks waited for
    each other.
    """
    pytest.importorskip("deepspeed")
    launch(Path(__file__).with_name("zero3_worker.py"), timeout=120)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_images_on_two_ranks_equal_one_process():
    launch(Path(__file__).with_name("ranks_worker.py"), "images", timeout=360)
