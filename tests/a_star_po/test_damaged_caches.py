"""Cache files damaged at random: either the values are those that were stored or drawn again, or one clear line."""

import os
import random
import shutil
import sqlite3

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.a_star_po.estimators import SamplePlan
from trl_fsdp_qlora.a_star_po.stage_one import StageOne
from trl_fsdp_qlora.a_star_po.value_cache import ValueCache, ValueCacheError

from .cache_worker import items, true_rewards

# More by hand: DAMAGED_CACHES=200 DAMAGED_SEED=7 pytest tests/a_star_po/test_damaged_caches.py
CASES = int(os.environ.get("DAMAGED_CACHES", "60"))
SEED = int(os.environ.get("DAMAGED_SEED", "0"))
ITEMS = items(60)
PLAN = SamplePlan(maximum=8)
TABLES = {
    "contexts": ("context", "description", "created"),
    "entries": ("key", "context", "samples", "functions", "rewards", "checksum", "updated"),
    "owners": ("name", "machine", "pid", "started", "heartbeat"),
    "claims": ("key", "owner"),
}


def draw(asked, counts, seed):
    # The last of the eight samples, as many as are missing.
    return [true_rewards(item.prompt_ids)[8 - count :] for item, count in zip(asked, counts, strict=True)]


def fill(path):
    with ValueCache(path, lease_seconds=5) as cache:
        cache.contexts()
        cache.add_context("c", {"rewards": 1})
        stage_one = StageOne(
            cache, "c", PLAN, torch.ones(1), draw, 0, poll_seconds=0.01, patience_seconds=3, report_seconds=1
        )
        stage_one.fill(ITEMS)
        return stage_one.rewards(list(ITEMS))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "v"
    fill(path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO owners VALUES ('gone', 'elsewhere', 1, '1', 0.0)")
        db.execute("INSERT INTO claims VALUES (?, 'gone')", (next(iter(ITEMS)),))
    return path


def damage(path, chance):
    """One or a few damages of one kind, by what a disk, a kill or a hand may do."""
    kind = chance.choice(
        ["bytes", "zeros", "cut", "longer", "swapped", "value", "value", "value", "table", "wal", "log"]
    )
    data = bytearray(path.read_bytes())
    if kind == "bytes":
        for _ in range(chance.choice([1, 10, 1000])):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == "zeros":
        start = chance.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    elif kind == "cut":
        del data[chance.randrange(len(data)) :]
    elif kind == "longer":
        data += chance.randbytes(chance.randrange(1, 9000))
    elif kind == "swapped" and len(data) >= 3 * 4096:
        a, b = (4096 * page for page in chance.sample(range(1, len(data) // 4096), 2))
        data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]
    path.write_bytes(data)
    if kind in ("wal", "log"):
        path.with_name(path.name + ("-wal" if kind == "wal" else "-shm")).write_bytes(
            chance.randbytes(chance.randrange(1, 9000))
        )
    elif kind == "value":
        table = chance.choice(list(TABLES))
        column = chance.choice(TABLES[table])
        value = chance.choice([-1, 0, 2**62, 0.5, 1e300, "", "text", b"", chance.randbytes(8), chance.randbytes(64)])
        with sqlite3.connect(path) as db:
            some = (
                ""
                if chance.random() < 0.5
                else f" WHERE {TABLES[table][0]} IN (SELECT {TABLES[table][0]} FROM {table} LIMIT 1)"
            )
            db.execute(f"UPDATE OR REPLACE {table} SET {column}=?{some}", (value,))
    elif kind == "table":
        with sqlite3.connect(path) as db:
            db.execute(f"DROP TABLE {chance.choice(list(TABLES))}")
    return kind


@pytest.mark.parametrize("case", range(CASES))
def test_no_damage_gives_a_wrong_value_or_an_unclear_end(whole, tmp_path, case):
    path, chance = tmp_path / "v", random.Random(1000 * SEED + case)
    shutil.copy(whole, path)
    kind = damage(path, chance)
    try:
        found = fill(path)
    except ValueCacheError as error:
        # Named, with what to do; never SQLite's own error alone.
        assert str(path) in str(error) and ("value_cache" in str(error) or "disk space" in str(error)), kind
        return
    for key, item in ITEMS.items():
        np.testing.assert_array_equal(found[key], true_rewards(item.prompt_ids)[:, 0], err_msg=kind)
