"""From what was recorded of a step to a graph that can be compiled: cleaned, with the inputs that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from millstream._torch.tensors import storage_id
from millstream.capture.record.paths import path_of
from millstream.capture.state.lift import (
    check_apart,
)
from millstream.capture.trace.numbers.known_arrays import writes_array
from millstream.capture.trace.numbers.questions import Input
from millstream.capture.trace.one_way import OneWay
from millstream.capture.trace.outcome.traced_tensors import writes_host
from millstream.capture.trace.recorded_effects.effect_recorder import text_changed
from millstream.capture.trace.request import (
    Traced,
)
from millstream.errors import CaptureError
from millstream.passes.cleanup import (
    drop_idle_nodes,
    drop_unused_inputs,
    hoist_transfers,
    let_views_copy,
    move_constants,
    subtract_powers_exactly,
    written_inputs,
    written_storages,
)
from millstream.passes.pure_bodies import make_bodies_pure


def finish(way: OneWay, gm: fx.GraphModule) -> Traced:
    """The trace of a way, or of several merged into it, with its graph cleaned.

    Raises:
        CaptureError: No graph can do what the step does.
    """
    leaving = way.leaving
    assert leaving.structure is not None
    if way.unsettled is not None:
        raise way.unsettled
    values = way.changes.numbers_now()
    arguments = {*map(id, way.request.arguments)}
    for read in way.record.reads:
        is_given = not way.record.given.isdisjoint((id(read.holder), id(read.owner)))
        if not is_given and any(id(each) in arguments for each in read.held()):
            raise CaptureError(
                f"{path_of(read, way.record)} is passed as an argument, too.",
                remedy="Pass a clone, or use it by its name only.",
            )
    make_bodies_pure(gm)
    drop_idle_nodes(gm)
    if way.questions.texts.made or way.has_text:
        if (where := way.questions.texts.unshown()) is not None:
            raise text_changed(where)
        leaving.effects.outline = way.recorder.outline, [_constants_of(node, gm) for node in gm.graph.nodes]
    subtract_powers_exactly(gm)
    move_constants(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    parts = (way.request.state, leaving.grad_buffers, way.questions.inputs, way.request.arguments)
    sizes = [len(part) for part in parts]
    starts = [sum(sizes[:part]) for part in range(4)]
    replaced = [placeholders[index] for index in leaving.replaced]
    transfers = hoist_transfers(gm, [*placeholders[starts[3] :], *replaced])
    _take_arrays(way.questions.inputs, gm, placeholders[starts[2] : starts[3]])
    written = written_storages(gm)
    targets = written_inputs(gm)
    state = zip(way.request.state, placeholders, strict=False)
    check_apart([(entry.name, entry.tensor) for entry, node in state if node in targets])
    let_views_copy(gm, written)
    is_written = [storage_id(node.meta["val"]) in written for node in placeholders]
    for index in way.request.host_scalars:
        if is_written[index]:
            raise writes_host(way.request.state[index])
    for node in placeholders[: starts[2]]:
        storage = storage_id(node.meta["val"])
        if storage in leaving.stored and storage in written:
            raise CaptureError(
                f"The step stores in {leaving.stored[storage]} a view of state that it writes.",
                remedy="Store a clone of it.",
            )
    devices = [transfers.get(node) for node in placeholders]
    kept = drop_unused_inputs(gm)
    read = [(number, index) for number, index in enumerate(leaving.replaced) if index in kept]
    for _, index in read:  # what calls bring comes last
        gm.graph.find_nodes(op="placeholder")[-1].append(placeholders[index])
    kept = [position for position in kept if position not in leaving.replaced]
    gm.recompile()
    gm.meta["exchanges"] = way.exchanges  # which the graph knows by number only
    state, gradients, numbers, arguments = (
        [position - start for position in kept if start <= position < start + size]
        for start, size in zip(starts, sizes, strict=True)
    )
    return Traced(
        gm=gm,
        state=state,
        gradients=gradients,
        numbers=numbers,
        arguments=[
            *((index, devices[starts[3] + index]) for index in arguments),
            *((len(way.request.arguments) + number, devices[index]) for number, index in read),
        ],
        replaced=[*leaving.replaced.items()],
        written=[is_written[position] for position in kept],
        left=leaving.left,
        kept=leaving.kept,
        structure=leaving.structure,
        outputs=leaving.outputs,
        questions=way.questions,
        values=values,
        effects=leaving.effects,
        wrapper_reads=way.wrapper_reads,
        looked_at=way.looked_at,
        asked=way.asked,
        optimizers=way.stepped,
        writes_arguments=any(is_written[starts[3] :]) or any(is_written[index] for index in leaving.replaced),
        sizes=way.sizes,
        num_converted=way.conversions.num_seen,
        record=way.record,
    )


def _take_arrays(inputs: list[Input], gm: fx.GraphModule, numbers: Sequence[fx.Node]) -> None:
    """Have NumPy's arrays where the graph wants them; refuse to write there."""
    arrays = {node: index for index, node in enumerate(numbers) if inputs[index].tensor.dim()}
    if any(storage_id(node.meta["val"]) in written_storages(gm) for node in arrays):
        raise writes_array()
    for node in hoist_transfers(gm, [*arrays]):
        inputs[arrays[node]] = replace(inputs[arrays[node]], tensor=node.meta["val"])


def _constants_of(node: fx.Node, gm: fx.GraphModule) -> tuple[str, ...]:
    """An operator and what it is given that no operator made."""
    if node.op == "get_attr" and isinstance(value := getattr(gm, str(node.target), None), Tensor):
        return (str(value.tolist()),)
    given = (part for part in tree_leaves((node.args, node.kwargs)) if not isinstance(part, fx.Node))
    return (str(node.target), *map(str, given))
