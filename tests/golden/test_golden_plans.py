"""Plans as text. A change in a plan shows up as a diff of these files.

After a change that is meant, write them again with ``MILLSTREAM_GOLDEN=write`` in the environment, and read the diff.
"""

import os
import random
from pathlib import Path

import pytest

from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.graph import format_plan, parse_plan
from millstream.schedule import plan_graph, plan_serial
from millstream.testing import blocks_graph, random_graph, spread_plan, towers_graph, wavefront_graph

FOLDER = Path(__file__).parent

BLOCK = blocks_graph(random.Random(3), 1, num_bytes=1 << 24)
RECURRENT = wavefront_graph(2, 2, num_bytes=1 << 23)

PLANS = {
    "serial_towers": plan_serial(towers_graph(2, 3)),
    "serial_random": plan_serial(random_graph(random.Random(1), 12)),
    "list_block": plan_graph(BLOCK, Roofline().estimate(BLOCK), 4, "list"),
    "packed_block": plan_graph(BLOCK, Roofline().estimate(BLOCK), 4, "list", packed=True),
    "chains_recurrent": plan_graph(RECURRENT, Roofline().estimate(RECURRENT), 3, "chains"),
    "spread_random": spread_plan(random_graph(random.Random(2), 8), 3, random.Random(2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_text(name):
    path = FOLDER / f"{name}.plan"
    if os.environ.get("MILLSTREAM_GOLDEN") == "write":
        path.write_text(format_plan(PLANS[name]), encoding="utf-8")
    golden = path.read_text(encoding="utf-8")
    assert format_plan(PLANS[name]) == golden
    assert parse_plan(golden) == PLANS[name]
    check_plan(PLANS[name])


def test_every_golden_file_is_tested():
    assert {path.stem for path in FOLDER.glob("*.plan")} == set(PLANS)
