"""What instructions read and write of variables, attributes, items and whole contents."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FrameType, FunctionType, WrapperDescriptorType
from typing import Any

from torch import Tensor, nn

from millstream.capture.lines import is_users, is_users_own
from millstream.capture.record import fleeting
from millstream.capture.record.interpreter.natives import (
    DEPTH,
    find_stored,
)
from millstream.capture.record.reads import (
    IS_HEAP_TYPE,
    MISSING,
    Found,
    Kind,
    content_of_cell,
    find_attribute,
    find_contents,
    find_global,
    find_in_class,
    find_item,
    find_length,
    is_a,
    own_dict,
)
from millstream.capture.record.record_store import PLAIN, Records


class RecordedAccesses(Records):
    """Records what each kind of instruction accesses; a method for each, named after its action."""

    _frame: FrameType  # that runs the instruction
    _argument: Any  # of the instruction

    # --- variables ----------------------------------------------------------------------------------------------------

    def _global_variable(self) -> None:
        self._read(find_global(self._frame, self._argument))

    def _name(self) -> None:
        if self._argument not in self._frame.f_locals or self._frame.f_locals is self._frame.f_globals:
            self._read(find_global(self._frame, self._argument))

    def _cell(self, cell: CellType) -> None:
        self._read([(cell, Kind.CELL, None, content_of_cell(cell), self._argument)])

    def _store_global(self, new: Any = None) -> None:
        space = self._frame.f_globals
        self._write([(space, Kind.ITEM, self._argument, space.get(self._argument, MISSING), space)], new)

    def _store_name(self, new: Any = None) -> None:
        if self._frame.f_locals is self._frame.f_globals:
            self._store_global(new)

    def _store_cell(self, *operands: Any) -> None:
        new, cell = operands[0], operands[-1]
        self._write([(cell, Kind.CELL, None, content_of_cell(cell), self._argument)], new)

    def _import_(self, *_: Any) -> None:
        self._read([(sys.modules, Kind.ITEM, self._argument, sys.modules.get(self._argument, MISSING), sys)])

    # --- attributes and items -----------------------------------------------------------------------------------------

    def _attribute(self, holder: Any) -> None:
        if self.watch is not None and self._argument == "forward" and is_a(holder, nn.Module):
            self._tell(self.watch.forwards, holder)
        elif self.watch is not None and self._argument == "variable" and type(holder).__name__ == "AccumulateGrad":
            self._tell(self.watch.reaches_leaf)
        self._read(self._find(holder, self._argument))

    def _find(self, holder: Any, name: str) -> Iterable[Found]:
        if name == "__dict__" and (held := own_dict(holder)) is not None:
            self._belongs(held, holder)
        if is_a(holder, Tensor):
            held = own_dict(holder) or {}
            found, of_class = self._look_up(Tensor, name)
            is_own = [] if of_class is not MISSING else [(held, Kind.ITEM, name, held.get(name, MISSING), holder)]
            return [(holder, Kind.TENSOR, name, None, holder), *found, *is_own]
        return find_attribute(holder, name, self._look_up)

    def _super_attribute(self, _function: Any, _kind: Any, holder: Any) -> None:
        self._read(self._look_up(holder if is_a(holder, type) else type(holder), self._argument)[0])

    def _item(self, holder: Any, key: Any) -> None:
        self._key(key)
        found = [*(find_contents(holder) if is_a(key, slice) else find_item(holder, key))]
        self._read(found)
        if is_a(holder, dict) and hasattr(type(holder), "__missing__"):  # which may put something there
            self._write(each for each in found if each[3] is MISSING)

    def _key(self, key: Any) -> None:
        """What a key holds is read, too, such as a list by which a tensor is indexed."""
        if not is_a(key, PLAIN):
            self._read(find_contents(key, DEPTH))

    def _slice(self, holder: Any, *_: Any) -> None:
        self._read(find_contents(holder))

    def _contains(self, key: Any, holder: Any) -> None:
        if type(key) is type and type(holder) in (tuple, list, set, frozenset, dict):
            self._compare(key, holder)
        self._note(fleeting.of_nan(key))
        self._key(key)
        self._read(find_item(holder, key) if is_a(holder, dict) else find_contents(holder))
        self._special(holder, "__contains__", "__iter__")
        self._ask(holder)

    def _match_keys(self, holder: Any, keys: Any) -> None:
        for key in keys:
            self._read(find_item(holder, key))

    def _match_class(self, holder: Any, kind: Any, names: Any) -> None:
        self._read([(holder, Kind.TYPE, None, type(holder), holder)])
        if is_a(kind, type):
            found, positions = self._look_up(kind, "__match_args__")
            self._read(found)
            for name in (*(positions if is_a(positions, tuple) else ()), *names):
                self._read(self._find(holder, name))

    def _store_attribute(self, *operands: Any) -> None:
        new, owner = operands[0], operands[-1]
        self._special(owner, "__setattr__")
        setter = self._look_up(type(owner), "__setattr__")[1]
        if is_a(setter, WrapperDescriptorType) and not is_a(owner, Tensor):  # and no method of the user's
            self._write(find_stored(owner, self._argument), new)
        elif is_a(owner, Tensor) and find_in_class(type(owner), self._argument)[1] is MISSING:
            held = own_dict(owner) or {}
            self._write([(held, Kind.ITEM, self._argument, held.get(self._argument, MISSING), owner)], new)

    def _delete_attribute(self, owner: Any) -> None:
        self._store_attribute(owner)

    def _store_item(self, new: Any, holder: Any, key: Any) -> None:
        self._key(key)
        self._special(holder, "__setitem__", "__delitem__")
        if is_a(holder, Tensor) or _is_users_method(holder, "__setitem__"):
            return
        self._write(find_contents(holder) if is_a(key, slice) else find_item(holder, key), new)

    def _delete_item(self, holder: Any, key: Any) -> None:
        self._store_item(None, holder, key)

    def _store_slice(self, _value: Any, holder: Any, *_: Any) -> None:
        self._write(find_contents(holder))

    # --- whole contents -----------------------------------------------------------------------------------------------

    def _length(self, holder: Any) -> None:
        self._read(find_length(holder))

    def _truth(self, value: Any) -> None:
        if not is_a(value, Tensor):
            self._special(value, "__bool__", "__len__")
            self._read(find_length(value))

    def _contents(self, value: Any) -> None:
        self._note(fleeting.of_order(value))
        self._set_contents(value)

    def _set_contents(self, value: Any) -> None:
        """The same where the order is of no matter."""
        self._special(value, "__iter__", "keys")
        self._read(find_contents(value))
        self._ask(value)

    def _advance(self, iterator: Any, *_: Any) -> None:
        self._special(iterator, "__next__")
        self._ask(iterator)

    def _ask(self, source: Any, kinds: Any = Iterator) -> None:
        """Something may be an iterator, which gives each item once."""
        if self.watch is None or not issubclass(type(source), kinds) or not is_users(self._at[0].co_filename):
            return
        origin = self.origin_of(source)
        if self.seems_before(source):
            self._tell(self.watch.asks, source, origin)

    def _kind(self, value: Any) -> None:
        self._read([(value, Kind.TYPE, None, type(value), value)])

    def _enter(self, manager: Any) -> None:
        self._special(manager, "__enter__", "__exit__")

    def _text(self, value: Any, *_: Any) -> None:
        self._note(fleeting.of_text(value))
        self._special(value, "__format__", "__str__", "__repr__")
        self._read(find_contents(value, DEPTH))

    def _identity(self, one: Any, other: Any) -> None:
        self._compare_both(one, other)
        if self._at[0].co_filename != copy.__file__:  # which asks whether a copy is another object
            self._note(fleeting.of_identity(one, other))

    def _compare_both(self, one: Any, other: Any) -> None:
        if type(one) is type and type(other) is type:
            self._compare(one, (other,))
            self._compare(other, (one,))

    def _compare(self, kind: type, others: Iterable[Any]) -> None:
        if self.watch is not None and is_users_own(self._at[0].co_filename):
            self._tell(self.watch.compares, kind, others)

    def _operator(self, *operands: Any) -> None:
        name = self._argument if is_a(self._argument, str) else ""
        if name == "mod" and is_a(operands[0], str | bytes):
            self._note(fleeting.of_text(operands[1]))
        if name in ("eq", "ne"):
            self._compare_both(*operands)
            if is_a(operands[0], list | tuple | dict):
                self._note(fleeting.of_nan(operands[0]))
        for operand in operands:
            self._special(operand, *(f"__{prefix}{name}__" for prefix in ("", "r", "i") if name))
            if not is_a(operand, Tensor):
                self._read(find_contents(operand, DEPTH))

    def _operator_in_place(self, target: Any, operand: Any) -> None:
        self._operator(target, operand)
        if is_a(target, list | deque):
            self._note(fleeting.of_order(operand))
        if not is_a(target, Tensor | tuple):
            self._write(find_contents(target))

    def _intrinsic(self, value: Any) -> None:
        if self._argument in (1, 2, 5):  # prints, imports all, a plus sign
            self._text(value)

    def _special(self, holder: Any, *names: str) -> None:
        """Methods that syntax calls are looked up in the class."""
        kind = type(holder)
        if issubclass(kind, Tensor):  # what a traced one has is a tensor's
            for name in names:
                self._read(self._look_up(Tensor, name)[0])
        elif kind.__flags__ & IS_HEAP_TYPE:
            self._read([(holder, Kind.TYPE, None, kind, holder)])
            for name in names:
                self._read(self._look_up(kind, name)[0])


def _is_users_method(holder: Any, name: str) -> bool:
    return is_a(find_in_class(type(holder), name)[1], FunctionType)
