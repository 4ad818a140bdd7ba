"""The figures of docs/scaling.md come from the formula that four ranks' counters confirmed."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.benchmark_modules import benchmark

ROOT = Path(__file__).resolve().parent.parent
scaling = benchmark("scaling")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())


def test_the_formula_still_gives_what_was_measured(tmp_path):
    """The counters were taken once (`--measure`); a formula that changes has to agree with them."""
    whole = AutoModelForCausalLM.from_pretrained(scaling.make_checkpoint(tmp_path, **scaling.SHAPE))
    units = scaling.units_of(whole, scaling.SMALL_RANK, compute_bytes=4)
    measured = RESULTS["measured_on_four_gloo_ranks"]
    for layout, mesh in scaling.LAYOUTS.items():
        assert scaling.expected(units, mesh) == measured[layout], layout
    assert measured["hsdp"]["network_gathered"] == 0 < measured["fsdp2"]["network_gathered"]


def test_packed_bytes_are_those_of_the_layers():
    """Against bitsandbytes itself; the last block of maxima is not full."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from trl_fsdp_qlora.fsdp2_qlora.packed_linear import to_bytes

    for double in (True, False):
        layer = bitsandbytes.nn.Linear4bit(100, 512, bias=False, compress_statistics=double, quant_type="nf4")
        assert scaling.packed_bytes(512, 100, double) == to_bytes(layer.to("cpu"))[1].total_bytes


def test_the_table_of_the_page_is_the_formula():
    rows = scaling.tables()
    assert rows == RESULTS["formula"]
    row_of = {(row["model"], row["nodes"]): row for row in rows}
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\d+B) \| (.+) \| (.+) MiB \| (.+) MiB \| (.+) GiB \| (.+) GiB \|$", page, re.MULTILINE)
    assert len(table) == 3
    for model, *cells, inside in table:
        gathered = row_of[model, 8]["hsdp"]
        assert f"{(gathered['generation_gathered'] + gathered['training_gathered']) / 2**30:.1f}" == inside
        for nodes, *on_the_page in zip(*(cell.split(", ") for cell in cells), strict=True):
            row = row_of[model, int(nodes)]
            mib = [row[layout]["network_reduced"] / 2**20 for layout in ("ddp", "hsdp")]
            gib = (row["fsdp2"]["network_gathered"] + row["fsdp2"]["network_reduced"]) / 2**30
            assert [f"{mib[0]:.0f}", f"{mib[1]:.0f}", f"{gib:.1f}"] == on_the_page
