"""Nodes that differ are told apart at launch; two gloo ranks stand for two nodes."""

import json
import re
from dataclasses import replace

import pytest

from tests.distributed.launch import launch
from trl_fsdp_qlora.run import nodes

A = nodes.Node("a", (0, 1), {"python": "3.11.9", "torch": "2.13.0", "bitsandbytes": None}, "c0de", "5c12")


def test_this_node_says_what_it_runs():
    node = nodes.this_node()
    assert node.versions["torch"] and node.versions.keys() == {"python", *nodes.PACKAGES}
    assert len(node.code) == 12 and node == nodes.this_node()


def test_the_digest_follows_the_code(tmp_path):
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    before = nodes._digest([source], tmp_path)
    source.write_text("x = 2\n")
    assert nodes._digest([source], tmp_path) != before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"versions": {**A.versions, "torch": "2.12.0"}},
            r"b \(ranks 2-3\) has torch 2\.12\.0, a .* 2\.13\.0.*On b: pip install 'torch==2\.13\.0'",
        ),
        (
            {"versions": {**A.versions, "bitsandbytes": "0.50"}},
            r"has bitsandbytes 0\.50, a .* none.*On b: pip uninstall bitsandbytes",
        ),
        ({"versions": {**A.versions, "python": "3.12.1"}}, r"Make b's environment with Python 3\.11\.9"),
        ({"code": "beef"}, r"other code .*beef and c0de.*same commit"),
        ({"script": "beef"}, r"another script"),
    ],
)
def test_what_differs_is_named_with_what_to_do(other, message):
    b = replace(A, name="b", ranks=(2, 3))
    assert nodes.difference([A, b]) is None
    assert re.search(message, nodes.difference([A, replace(b, **other)]))


def test_one_node_is_not_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "gather_object", lambda _: pytest.fail("gathered"))
    nodes.check_nodes(tmp_path / "not-made")
    assert not (tmp_path / "not-made").exists()


@pytest.mark.processes
def test_two_nodes(tmp_path):
    launch("tests/run/nodes_worker.py", tmp_path, environment={"LOCAL_WORLD_SIZE": "1"})
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    found[1]["own"] = found[1]["own"].replace("of1", "of0")
    assert found[0] == found[1]  # every rank raises the same, so none waits for another
    assert found[0]["shared"] is None and list((tmp_path / "shared").iterdir()) == []
    assert (
        "is not one folder" in found[0]["own"] and "Set output_dir to a folder that all nodes share" in found[0]["own"]
    )
    assert "cannot be written on the first node" in found[0]["file"]
    assert "has torch 0.1, " in found[0]["versions"]
