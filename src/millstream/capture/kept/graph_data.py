"""A traced graph as plain data, and made again of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from millstream._torch.tensors import FakeTensor, FakeTensorMode
from millstream.capture.kept.descriptions import TraceNotKept
from millstream.lower.kept.key import bytes_of

MOST_CONSTANT_BYTES = 16 << 20
"""Of tensors that the trace has made constants."""

_META = ("stack_trace", "in_backward")
_MODULES = "nn_module_stack"
_NAMESPACES = ("aten", "prims", "prim")


def encode_graph(gm: fx.GraphModule) -> dict[str, Any]:
    """Take a graph apart.

    Raises:
        NotKept: It has in it what cannot be told.
    """
    if any(gm.meta.get("exchanges", ())):
        raise TraceNotKept("its processes communicate")
    constants: dict[str, Any] = {}
    memory: dict[int, int] = {}
    nodes = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            constants[str(node.target)] = _encode_constant(getattr(gm, str(node.target), None))
        args, kwargs = _encode(node.args), _encode(dict(node.kwargs))
        nodes.append((node.op, node.name, _encode_target(node), args, kwargs, _encode_meta(node, memory)))
    if sum(len(each[0]) for each in constants.values()) > MOST_CONSTANT_BYTES:
        raise TraceNotKept("it has large constants")
    return {"nodes": nodes, "constants": constants}


def decode_graph(content: dict[str, Any], fakes: Fakes | None = None) -> fx.GraphModule:
    """Make the graph again, over fake tensors of its own, or of these."""
    fakes = fakes or Fakes()
    root = torch.nn.Module()
    for name, constant in content["constants"].items():
        root.register_buffer(name, _decode_constant(constant))
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in content["nodes"]:
        node = graph.create_node(op, _decode_target(target), _decode(args, known), _decode(kwargs, known), name=name)
        if node.name != name:
            raise TraceNotKept(f"a node cannot be called {name}")
        known[name] = node
        node.meta.update(_decode_meta(meta, fakes))
    gm = fx.GraphModule(root, graph)
    gm.meta["exchanges"] = []
    return gm


def _encode_target(node: fx.Node) -> Any:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return ("operator", target.namespace, target._schema.name.partition("::")[2], target._overloadname)
    if target is operator.getitem:
        return ("item",)
    raise TraceNotKept(f"it has {target} in it")


def _decode_target(target: Any) -> Any:
    if isinstance(target, str):
        return target
    if target == ("item",):
        return operator.getitem
    _, namespace, name, overload = target
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is fx.Node:
        return ("node", value.name)
    if kind in (tuple, list, dict, torch.Size) or isinstance(value, list | tuple | dict):
        if isinstance(value, dict):
            return ("dict", [(key, _encode(item)) for key, item in value.items()])
        return ("list" if isinstance(value, list) else "tuple", [*map(_encode, value)])
    if kind in _PLAIN:
        return value
    if kind is slice:
        return ("slice", [*map(_encode, (value.start, value.stop, value.step))])
    raise TraceNotKept(f"it has a {kind.__qualname__} in it")


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _decode(value: Any, known: dict[str, fx.Node]) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, held = value
    if kind == "node":
        return known[held]
    if kind == "dict":
        return {key: _decode(item, known) for key, item in held}
    parts = [_decode(item, known) for item in held]
    return parts if kind == "list" else slice(*parts) if kind == "slice" else tuple(parts)


def _encode_meta(node: fx.Node, memory: dict[int, int]) -> dict[str, Any]:
    meta = {key: node.meta[key] for key in _META if key in node.meta}
    if _MODULES in node.meta:
        meta[_MODULES] = [*node.meta[_MODULES]]
    if "val" in node.meta:
        meta["val"] = _encode_value(node.meta["val"], memory)
    others = node.meta.keys() - {*meta, "tensor_meta", "original_aten"}
    if others:
        raise TraceNotKept(f"a node has {sorted(others)}")
    return meta


def _decode_meta(meta: dict[str, Any], fakes: Fakes) -> dict[str, Any]:
    found = {key: meta[key] for key in _META if key in meta}
    if _MODULES in meta:
        found[_MODULES] = {name: (name, torch.nn.Module) for name in meta[_MODULES]}
    if "val" in meta:
        found["val"] = _decode_value(meta["val"], fakes)
    return found


def _encode_value(value: Any, memory: dict[int, int]) -> Any:
    if isinstance(value, tuple | list):
        return ("list" if isinstance(value, list) else "tuple", [_encode_value(each, memory) for each in value])
    if not isinstance(value, Tensor):
        return _encode(value)
    if not isinstance(value, FakeTensor):
        raise TraceNotKept("a value is no plain tensor")
    return ("tensor", describe_tensor(value, memory))


def describe_tensor(value: Tensor, memory: dict[int, int]) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """Describe a tensor but for its values, as ``Fakes.make`` takes that.

    Args:
        value: The tensor.
        memory: The numbers of memory that was met before, to which its own is added.

    Raises:
        TraceNotKept: It is not strided, or a size is a symbol.
    """
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise TraceNotKept("a value is no plain tensor")
    storage = value.untyped_storage()
    sizes = [*value.shape, *value.stride(), value.storage_offset(), storage.nbytes()]
    if not all(type(size) is int for size in sizes):
        raise TraceNotKept("a size is a symbol")
    place = memory.setdefault(storage._cdata, len(memory)), storage.nbytes()
    return place, (
        value.dtype,
        value.device,
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.requires_grad,
    )


def _decode_value(value: Any, fakes: Fakes) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, held = value
    if kind == "tensor":
        place, spec = held
        return fakes.make(place, *spec)
    parts = [_decode_value(each, fakes) for each in held]
    return parts if kind == "list" else tuple(parts)


class Fakes:
    """Makes tensors without values, some of which lie in the same memory."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def make(
        self,
        place: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        shape: tuple[int, ...] = (),
        stride: tuple[int, ...] = (),
        offset: int = 0,
        requires_grad: bool = False,
    ) -> Tensor:
        """One of them.

        Args:
            place: Number of its memory, and the bytes that this has.
            dtype: Its dtype.
            device: Its device.
            shape: Its shape.
            stride: Its strides.
            offset: Where in the memory it begins, in elements.
            requires_grad: Whether it requires a gradient.
        """
        number, num_bytes = place
        if number not in self._storages:
            self._storages[number] = torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()
        with torch.no_grad():
            made = torch.empty(0, dtype=dtype, device="meta")
            made.set_(self._storages[number], offset, shape, stride)  # type: ignore[call-overload]
        return FakeTensor(self._mode, made.requires_grad_(requires_grad), device)


def _encode_constant(value: Any) -> tuple[bytes, Any, Any]:
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.requires_grad:
        raise TraceNotKept(f"a constant is a {type(value).__qualname__}, or not on the host")
    return bytes_of(value), value.dtype, tuple(value.shape)


def _decode_constant(constant: tuple[bytes, Any, Any]) -> Tensor:
    data, dtype, shape = constant
    made = torch.empty(shape, dtype=dtype)
    if data:
        made.view(-1).copy_(torch.frombuffer(bytearray(data), dtype=dtype))
    return made
