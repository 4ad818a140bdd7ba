"""`on_main`: every rank gets the main rank's result, or its exception."""

from pathlib import Path

import pytest

from tests.distributed.launch import launch
from trl_fsdp_qlora.utils.ranks import on_main


def test_one_process_is_the_main_one():
    assert on_main(lambda: 3) == 3
    assert on_main(lambda: 3, here=False) is None  # it was not to run it


def test_an_exception_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        on_main(lambda: 1 // 0)


@pytest.mark.processes
def test_two_ranks_get_the_result_and_the_exception_of_one():
    launch(__file__)


def rank() -> None:
    from accelerate import PartialState

    mine = PartialState(cpu=True).process_index
    assert on_main(lambda: f"of rank {mine}") == "of rank 0"
    calls = []
    assert on_main(lambda: calls.append(mine) or "done") == "done"
    assert calls == [0] * (mine == 0)
    # Each rank runs it, and the main rank's result counts.
    assert on_main(lambda: mine, here=True) == 0
    with pytest.raises(FileNotFoundError, match="rank 0"):
        on_main(Path(f"/no such file of rank {mine}").read_text)


if __name__ == "__main__":
    rank()
