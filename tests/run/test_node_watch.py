"""A silent node is named; one that has finished, or is starting, is not."""

import pytest
import torch.distributed as dist

from trl_fsdp_qlora.run import node_watch
from trl_fsdp_qlora.run.node_watch import NodeWatch


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Broken:
    """A store whose host is gone from some moment on."""

    def __init__(self, store):
        self.store, self.gone = store, False

    def __getattr__(self, name):
        if self.gone:
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self.store, name)


@pytest.fixture
def pair():
    store, clock = Broken(dist.HashStore()), Clock()
    return store, clock, [NodeWatch(store, node, 2, 30.0, clock) for node in (0, 1)]


def test_a_node_that_counts_is_alive(pair):
    _, clock, watches = pair
    for clock.now in range(0, 300, 25):
        assert [watch.look() for watch in watches] == [None, None]


def test_a_silent_node_is_lost_with_its_name_once_the_time_is_over(pair):
    _, clock, (first, second) = pair
    second.names[1] = "b"
    second.store.set("name/1", "b")
    assert first.look() is None
    clock.now = 29.0
    assert first.look() is None
    clock.now = 31.0
    assert first.look() == "node 1 of 2 (b) has not answered for 31 s"


def test_a_node_that_has_finished_may_be_silent(pair):
    _, clock, (first, second) = pair
    first.look()
    second.finish(failed=False)
    for clock.now in (1.0, 100.0):
        assert first.look() is None


def test_a_node_that_failed_ends_the_others_once_they_could_have_spoken(pair):
    _, clock, (first, second) = pair
    first.look()
    second.finish(failed=True)
    for clock.now in (1.0, 10.0):
        assert first.look() is None
    clock.now = 11.5
    assert first.look().endswith("has ended with an error, which its own log names")


def test_without_the_store_its_host_is_lost(pair):
    store, clock, (_, second) = pair
    second.look()
    store.gone = True
    clock.now = 29.0
    assert second.look() is None
    clock.now = 31.0
    assert second.look().startswith("node 0 of 2 (")


def test_without_the_store_of_a_host_that_has_finished_nobody_is_lost(pair):
    store, clock, (first, second) = pair
    first.finish(failed=False)
    second.look()
    store.gone = True
    clock.now = 100.0
    assert second.look() is None


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_patience_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("TRL_FSDP_QLORA_NODE_PATIENCE", text)
    with pytest.raises(ValueError, match="unset it for 30"):
        node_watch.patience()


def test_on_one_node_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(node_watch, "_connect", lambda _: pytest.fail("connected"))
    with pytest.raises(RuntimeError, match="gloo"), node_watch.watching():
        raise RuntimeError("gloo: raised at once")
