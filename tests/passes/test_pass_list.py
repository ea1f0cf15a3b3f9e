"""Every pass is in one list, in order; each can be switched off, and says what it changes."""

import ast
import importlib
import logging
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import millstream as ms
from millstream import kernels, passes
from millstream._torch.workarounds import without
from millstream.lower.alternatives.table import ALTERNATIVES
from millstream.lower.pass_list import PASSES, check_names
from millstream.lower.workarounds import CAPTURED, JOINT
from millstream.passes.gradients import split_gradients
from millstream.passes.graph_pass import Pass
from tests.kernels.stand_ins import own_kernels, pretended_gpu
from tests.kernels.test_registry import called_by
from tests.networks import assert_close

__all__ = ["own_kernels", "pretended_gpu"]

ROOT = Path(__file__).parents[2]
NAMES = [each.name for each in PASSES]
OURS = [each for each in PASSES if each not in {*CAPTURED, *JOINT}]
CHANGES = {
    "erase_node", "inserting_before", "inserting_after", "replace_all_uses_with", "replace_input_with", "update_arg",
    "eliminate_dead_code", "node_copy",
}  # fmt: skip
OTHERS = {
    "drop_marks": "part of two passes",
    "tidy": "part of several passes",
    "seed_draws": "part of two passes",
    "set_results": "for a pass, of what is traced",
    "take_control_flow": "translates: there is no program without",
    "cut": "translates: there is no program without",
    "plain_forward": "runs a graph: no program is made of it",
    "rewrite_products": "of the alternative row-products, which is switched off by its name",
    "rewrite_attention": "of the alternative split-attention, likewise",
    "rewrite_heads": "of the alternative head-products, likewise",
}
"""Functions that change a graph and are no passes, and why."""


def modules():
    for package in (passes, kernels):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("_kernel"):  # Triton is not everywhere
                yield importlib.import_module(found.name)


def test_each_pass_is_in_the_list():
    made = {value.name for module in modules() for value in vars(module).values() if isinstance(value, Pass)}
    assert made <= {*NAMES}
    assert len({*NAMES}) == len(NAMES)


def changing(tree):
    """Names of a module's functions that change a graph, by themselves or by others of the module."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found, size = set(), -1
    while len(found) > size:
        size = len(found)
        for function in functions:
            inside = [*ast.walk(function)]
            attributes = [node for node in inside if isinstance(node, ast.Attribute)]
            calls = {node.attr for node in attributes} & CHANGES
            sets = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)} & {"target", "args", "kwargs"}
            if calls or sets or {node.id for node in inside if isinstance(node, ast.Name)} & found:
                found.add(function.name)
    return [function for function in functions if function.name in found]


def test_what_changes_a_graph_is_a_pass():
    others = set()
    for path in sorted((ROOT / "src" / "millstream").rglob("*.py")):
        for function in changing(ast.parse(path.read_text(encoding="utf-8"))):
            takes_graph = any("fx.Graph" in ast.unparse(each.annotation) for each in function.args.args[:1])
            if takes_graph and not function.name.startswith("_"):
                is_pass = any("graph_pass(" in ast.unparse(each) for each in function.decorator_list)
                others |= set() if is_pass else {function.name}
    assert others == {*OTHERS}


def test_each_of_ours_is_in_the_reference():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    section = page.partition("## Passes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\S+)` \| (.+?) \|$", section, re.MULTILINE) == [(each.name, each.effect) for each in OURS]


def train(capture, own_kernels=True):
    """Losses of steps that each pass has something to do for, and the weights that they leave."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.RAdam(model.parameters(), foreach=True)
    unused = torch.ones(3)
    data = torch.randn(3, 2, 4)

    def step(x, more):
        both = torch.cat([x.flatten(), x[:0].flatten()]).view(2, -1)
        loss = (model(both) * torch.tensor([1.0, 2.0, 3.0]).to(x)).square().mean() + x.detach().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = {"own_kernels": own_kernels}
    run = ms.step(step, engine="serial", strict=True, options=options) if capture else step
    losses = [run(x, unused) for x in data]
    return losses, [*model.parameters()]


def told(caplog):
    return [record.message for record in caplog.records if record.name == "millstream.passes"]


def order_of(caplog):
    return [NAMES.index(message.partition(":")[0]) for message in told(caplog)]


@pytest.mark.parametrize("name", [None, *NAMES[: PASSES.index(split_gradients) + 1], "all"])
def test_a_step_computes_the_same_without_any(name, caplog):
    off = {None: (), "all": NAMES}.get(name, (name,))
    with without(off), caplog.at_level(logging.DEBUG, "millstream.passes"):
        assert_close(
            train(capture=True, own_kernels=not off), train(capture=False), 1e-4 if "exact-powers" in off else 1e-6
        )
    order = order_of(caplog)
    assert order == sorted(order)
    assert not {NAMES[each] for each in order} & {*off}
    if name is None:
        assert {"idle-nodes", "exact-powers", "unused-inputs"} <= {NAMES[each] for each in order}


@pytest.mark.parametrize("name", [None, *NAMES[-6:], "all"])
def test_a_model_computes_the_same_without_any(own_kernels, name, caplog):
    off = {None: (), "all": NAMES}.get(name, (name,))
    with without(off), caplog.at_level(logging.DEBUG, "millstream.passes"):
        called_by(own_kernels)
    order = order_of(caplog)
    assert order == sorted(order)
    assert not {NAMES[each] for each in order} & {*off}
    if name is None:
        assert {NAMES[each] for each in order} == {*NAMES[-6:]}


def test_a_name_of_nothing_is_told_once(caplog, monkeypatch):
    check_names.cache_clear()
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "epilouges,values,pytorch#198101,split-k")
    for _ in range(2):
        torch._dynamo.reset()
        ms.compile(torch.neg, engine="serial")(torch.ones(2))
    (message,) = told(caplog)
    assert message.startswith("MILLSTREAM_WITHOUT names 'epilouges', which cannot be left out.")
    assert "'epilogues'" in message


def test_a_pass_tells_which_lines_it_changes(caplog):
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x).neg())

    def drop_last(gm):
        last = [node for node in gm.graph.nodes if node.op == "call_method"][-1]
        last.replace_all_uses_with(last.args[0])
        gm.graph.erase_node(last)

    with caplog.at_level(logging.DEBUG, "millstream.passes"):
        Pass("some", "drops", drop_last)(graph)
        Pass("none", "does nothing", lambda gm: None)(graph)
    (message,) = told(caplog)
    assert message.startswith("some: 4 nodes, now 3\n  - %neg")


def test_each_alternative_is_in_the_reference():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    section = page.partition("## Alternatives")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(\S+)` \| (.+?) \|$", section, re.MULTILINE)
    assert told == [(each.name, each.effect) for each in ALTERNATIVES]
