"""A request for a comparison reaches the first call inside its block and in its thread, and no call inside of that."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from trl_fsdp_qlora.prefix_sharing.request import Request, requested, take_request
from trl_fsdp_qlora.prefix_sharing.status import CannotPack


def test_the_first_call_of_a_block_takes_the_request():
    assert take_request() is None
    request = Request(gradients=False)
    with requested(request):
        assert take_request() is request
        assert take_request() is None
    assert take_request() is None


def test_a_request_that_no_call_takes_ends_with_its_block():
    request = Request(gradients=True)
    with pytest.raises(ZeroDivisionError), requested(request):
        raise ZeroDivisionError
    assert take_request() is None and request.differences is None


def test_an_inner_request_leaves_the_outer_one_to_later_calls():
    outer = Request(gradients=False)
    inner = Request(gradients=False)
    with requested(outer):
        with requested(inner):
            assert take_request() is inner
        assert take_request() is outer


def test_another_thread_gets_no_request():
    with requested(Request(gradients=False)), ThreadPoolExecutor(1) as pool:
        assert pool.submit(take_request).result() is None


def test_a_batch_that_cannot_be_packed_leaves_its_reason():
    request = Request(gradients=False)
    with request.noting_why():
        raise CannotPack("its mask has holes")
    assert request.reason == "its mask has holes"
    with pytest.raises(ZeroDivisionError), request.noting_why():
        raise ZeroDivisionError
    assert request.reason == "its mask has holes"
