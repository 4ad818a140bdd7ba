"""Claims that nobody will ever end, in a cache whose rows say odd things."""

import logging
import multiprocessing
import sqlite3
import time

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.a_star_po.estimators import SamplePlan
from trl_fsdp_qlora.a_star_po.liveness import Owner
from trl_fsdp_qlora.a_star_po.stage_one import StageOne
from trl_fsdp_qlora.a_star_po.value_cache import ValueCache, ValueCacheError

from .cache_worker import items

ITEMS = items(4)


def ones(asked, counts, seed):
    return [np.ones((count, 1)) for count in counts]


def stage_one(cache, draw=ones, **settings):
    return StageOne(cache, "c", SamplePlan(maximum=2), torch.ones(1), draw, 0, poll_seconds=0.01, **settings)


def plant(path, owner: tuple | None, name="ghost"):
    ValueCache(path).close()
    with sqlite3.connect(path) as db:
        if owner is not None:
            db.execute("INSERT INTO owners VALUES (?, ?, ?, ?, ?)", (name, *owner))
        db.executemany("INSERT INTO claims VALUES (?, ?)", [(key, name) for key in ITEMS])


@pytest.mark.parametrize(
    "owner",
    [
        ("elsewhere", 1, "1", time.time() + 1e6),
        ("elsewhere", 1, "1", "never"),
        ("elsewhere", "one", "1", time.time()),
        ("elsewhere", 1, "1", float("inf")),
        None,
    ],
    ids=["future heartbeat", "heartbeat is text", "pid is text", "infinite heartbeat", "no owner"],
)
def test_claims_of_nobody_are_taken_over(tmp_path, owner):
    plant(tmp_path / "v", owner)
    with ValueCache(tmp_path / "v") as cache:
        report = stage_one(cache, patience_seconds=5).fill(ITEMS)
        assert report.samples == 8 and len(cache) == 4


def hold(path, ready, end):
    with ValueCache(path) as cache:
        cache.claim(list(ITEMS))
        ready.set()
        end.wait(60)


@pytest.mark.processes
def test_a_living_process_that_finishes_nothing_is_named_and_the_wait_ends(tmp_path, caplog):
    ValueCache(tmp_path / "v").close()
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "v", ready, end))
    holder.start()
    assert ready.wait(60)
    caplog.set_level(logging.WARNING)
    try:
        with ValueCache(tmp_path / "v") as cache:
            waiting = stage_one(cache, patience_seconds=0.5, report_seconds=0.1)
            with pytest.raises(ValueCacheError, match=rf"any of the last 4 prompts .*process {holder.pid} holds them"):
                waiting.fill(ITEMS, shows=True)
        assert f"waiting for 4 prompts that process {holder.pid} is sampling" in caplog.text
    finally:
        end.set()
        holder.join(60)


def test_in_lockstep_a_rank_that_waits_for_too_long_stops_all(tmp_path):
    """A rank that has nothing to do itself raises where another says that it is stuck."""
    with ValueCache(tmp_path / "v") as cache:
        stage_one(cache).fill(ITEMS)
        with pytest.raises(ValueCacheError, match="no process has finished"):
            stage_one(cache, any_rank=lambda state: 3).fill(ITEMS)


def test_an_owner_is_alive_within_a_lease_of_now():
    elsewhere = Owner("n", "elsewhere", 1, "1")
    alive = [elsewhere.is_alive(100.0 + age, 100.0, 10.0) for age in (-11, -9, 0, 9, 11)]
    assert alive == [False, True, True, True, False]


@pytest.mark.parametrize("damage", ["{", "[1]", '"text"', "", b"\xff\xfe", None, 7, "[" * 100_000])
def test_damaged_descriptions_are_passed_over_with_a_line(tmp_path, damage, caplog):
    with ValueCache(tmp_path / "v") as cache:
        cache.add_context("a", {"rewards": 1})
        cache.add_context("b", {"rewards": 2})
        cache._db.execute("PRAGMA ignore_check_constraints=1")
        if damage is None:
            cache._db.execute("UPDATE contexts SET description=zeroblob(3) WHERE context='a'")
        else:
            cache._db.execute("UPDATE contexts SET description=? WHERE context='a'", (damage,))
        assert cache.contexts() == {"b": {"rewards": 2}}
        assert "passing over a damaged description" in caplog.text
        cache.add_context("a", {"rewards": 1})
        assert cache.contexts() == {"a": {"rewards": 1}, "b": {"rewards": 2}}
