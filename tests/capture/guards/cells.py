# ruff: noqa: E501
"""The table: what a step reads (holder x read) and how that changes between calls, one cell each, as Python source.

Every ``#`` in a source stands for the number of the cell within a program, so that several fit into one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One way to read something, and one way to change it.

    Attributes:
        holder: What holds the value.
        read: What is read of it.
        change: What is done between two calls.
        setup: Source that runs once.
        value: An expression with the value that the step reads, a number or a tensor.
        alter: Statements that change it.
        reset: Statements that take the change back; empty where the same value can't be had again.
    """

    holder: str
    read: str
    change: str
    setup: str
    value: str
    alter: str
    reset: str = ""

    def __str__(self) -> str:
        return f"{self.holder} / {self.read} / {self.change}"


# --- anything, in any holder ------------------------------------------------------------------------------------------

_PLAIN = {  # holder: setup, how to read it, how to assign it
    "closure": ("box# = {}", "box#", "box# = {}"),
    "global": ("G# = {}", "G#", "G# = {}"),
    "namespace": ("ns# = types.SimpleNamespace(v={})", "ns#.v", "ns#.v = {}"),
    "object": ("class C#: pass\no# = C#()\no#.v = {}", "o#.v", "o#.v = {}"),
    "slots": ("class S#: __slots__ = ('v',)\ns# = S#()\ns#.v = {}", "s#.v", "s#.v = {}"),
    "dataclass": ("@dataclasses.dataclass\nclass D#:\n    v: object\nd# = D#({})", "d#.v", "d#.v = {}"),
    "class": ("class K#: pass\nK#.v = {}", "K#.v", "K#.v = {}"),
    "inherited": ("class B#: pass\nB#.v = {}\nclass I#(B#): pass\ni# = I#()", "i#.v", "B#.v = {}"),
    "module attribute": ("class M#(nn.Module): pass\nm# = M#()\nm#.__dict__['v'] = {}", "m#.v", "vars(m#)['v'] = {}"),
    "function attribute": ("def f#(): pass\nf#.v = {}", "f#.v", "f#.v = {}"),
    "dict": ("dict# = dict(v={})", "dict#['v']", "dict#['v'] = {}"),
    "list": ("list# = [{}]", "list#[0]", "list#[0] = {}"),
    "nested": ("nest# = [dict(a=types.SimpleNamespace(v={}))]", "nest#[0]['a'].v", "nest#[0]['a'].v = {}"),
    "tuple": ("ns# = types.SimpleNamespace(v=({}, 1))", "ns#.v[0]", "ns#.v = ({}, 1)"),
    "deque": ("deq# = deque([{}])", "deq#[-1]", "deq#[-1] = {}"),
    "user dict": ("ud# = UserDict(v={})", "ud#['v']", "ud#['v'] = {}"),
    "chain map": ("cm# = ChainMap(dict(), dict(v={}))", "cm#['v']", "cm#['v'] = {}"),
    "default": ("def h#(v={}): return v", "h#()", "h#.__defaults__ = ({},)"),
    "keyword default": ("def h#(*, v={}): return v", "h#()", "h#.__kwdefaults__['v'] = {}"),
    "partial": ("p# = functools.partial(lambda v: v, v={})", "p#()", "p#.keywords['v'] = {}"),
    "parameter attribute": ("w#p = nn.Parameter(torch.ones(2))\nw#p.v = {}", "(w#p * 1, w#p.v)[1]", "w#p.v = {}"),
    "optimizer attribute": ("opt#o = torch.optim.SGD([w#], 0.1)\nopt#o.v = {}", "opt#o.v", "opt#o.v = {}"),
    "context variable": ("cv# = contextvars.ContextVar('cv#')\ncv#.set({})", "cv#.get()", "cv#.set({})"),
    "property": (
        "class P#:\n    @property\n    def v(self): return self._v\np# = P#()\np#._v = {}", "p#.v", "p#._v = {}"
    ),
    "__getattr__": (
        "class A#:\n    def __init__(self, v): self.inner = dict(v=v)\n    def __getattr__(self, name): "
        "return self.inner[name]\na# = A#({})", "a#.v", "a#.inner['v'] = {}",
    ),
    "Python module": (
        "mod# = sys.modules['settings_#'] = types.ModuleType('settings_#')\nmod#.__file__, mod#.v = __file__, {}",
        "mod#.v", "mod#.v = {}",
    ),
    "weak reference": (
        "class W#: pass\ntarget# = W#()\ntarget#.v = {}\nweak# = weakref.ref(target#)\nns# = types.SimpleNamespace(r=weak#)",
        "ns#.r().v", "target#.v = {}",
    ),
    "buffer": (
        "class U#(nn.Module): pass\nm# = U#()\nm#.register_buffer('v', {} if isinstance({}, Tensor) else None)",
        "m#.v", "m#.v = {}",
    ),
}  # fmt: skip

_TENSOR = "torch.ones(2, 2)"
_READS = {  # read: expression over the tensor, changes
    "shape": ("{}.shape[0]", ("rebind torch.ones(3, 2)", "data torch.ones(3, 2)", "resize_(3, 2)")),
    "size()": ("{}.size(0)", ("rebind torch.ones(3, 2)", "data torch.ones(3, 2)")),
    "len": ("len({})", ("rebind torch.ones(3, 2)", "data torch.ones(3, 2)", "resize_(3, 2)")),
    "numel": ("{}.numel()", ("rebind torch.ones(4, 2)",)),
    "dim": ("{}.dim()", ("rebind torch.ones(2, 2, 2)", "unsqueeze_(0)")),
    "dtype": ("(1 + ({}.dtype is torch.float64))", ("rebind torch.ones(2, 2).double()",)),
    "floating": ("(1 + {}.is_floating_point())", ("rebind torch.ones(2, 2).long()",)),
    "stride": ("{}.stride()[0]", ("rebind torch.ones(2, 2).t()", "data torch.ones(2, 2).t()", "t_()")),
    "contiguous": ("(1 + {}.is_contiguous())", ("rebind torch.ones(2, 2).t()", "t_()")),
    "offset": ("(1 + {}.storage_offset())", ("rebind torch.ones(3, 2)[1:]", "data torch.ones(3, 2)[1:]")),
    "device": ("(1 + ({}.device.type == 'meta'))", ("rebind torch.ones(2, 2, device='meta')",)),
    "requires_grad": ("(1 + {}.requires_grad)", ("requires_grad_()", "rebind torch.ones(2, 2, requires_grad=True)")),
    "grad": ("(1 + ({}.grad is None))", ("grad torch.ones(2, 2)",)),
    "none": ("(1 if {} is None else 2)", ("rebind None",)),
    "type": ("(1 + isinstance({}, nn.Parameter))", ("rebind nn.Parameter(torch.ones(2, 2))",)),
    "values": ("{}.sum()", ("rebind torch.full((2, 2), 3.0)", "data torch.full((2, 2), 3.0)", "mul_(2)")),
}
_EVERYWHERE = ("shape", "requires_grad", "none", "values")
_SOME = ("closure", "object", "dict", "module attribute", "buffer", "slots")
_NO_TENSORS = ("default", "keyword default", "weak reference", "parameter attribute", "optimizer attribute")


def _changing(change: str, get: str, assign: str) -> str:
    kind, _, value = change.partition(" ")
    if kind == "rebind":
        return assign.format(value)
    return f"{get}.{kind} = {value}" if value and kind in ("data", "grad") else f"{get}.{change}"


def _tensor_cells() -> list[Cell]:
    cells = []
    for holder, (setup, get, assign) in _PLAIN.items():
        if holder in _NO_TENSORS:
            continue
        for read, (expression, changes) in _READS.items():
            for change in changes if holder in _SOME else changes[:1]:
                if (holder in _SOME or read in _EVERYWHERE) and not (holder == "buffer" and "Parameter" in change):
                    alter = _changing(change, get, assign)
                    tensor = setup.format(*[_TENSOR] * setup.count("{}"))
                    again = assign.format(_TENSOR) if change.startswith("rebind") else ""
                    cells.append(
                        Cell(holder, f"{read} of a tensor", change, tensor, expression.format(get), alter, again)
                    )
    return cells


def _value_cells() -> list[Cell]:
    cells = []
    for holder, (setup, get, assign) in _PLAIN.items():
        if holder in ("buffer", "context variable") and holder == "buffer":
            continue
        cells.append(
            Cell(holder, "a number", "rebind", setup.format("1.5"), get, assign.format("2.5"), assign.format("1.5"))
        )
    for holder in ("closure", "object", "dict", "global"):
        setup, get, assign = _PLAIN[holder]
        cells += [
            Cell(holder, "a branch", "rebind", setup.format("True"), f"(2 if {get} else 3)", assign.format("False")),
            Cell(holder, "a type", "rebind", setup.format("1"), f"(2 if type({get}) is int else 3)", assign.format("1.0")),
            Cell(holder, "a string", "rebind", setup.format("'ab'"), f"len({get})", assign.format("'abc'")),
            Cell(
                holder, "a function", "rebind",
                setup.format("lambda: 1.5"), f"{get}()", assign.format("lambda: 2.5"), assign.format("lambda: 1.5"),
            ),
            Cell(
                holder, "a method", "rebind",
                "class O#:\n    def __init__(self, v): self.v = v\n    def get(self): return self.v\n"
                + setup.format("O#(1.5).get"), f"{get}()", assign.format("O#(2.5).get"),
            ),
            Cell(
                holder, "an enum", "rebind",
                "E# = enum.Enum('E#', dict(a=1, b=2))\n" + setup.format("E#.a"), f"{get}.value", assign.format("E#.b"),
            ),
        ]  # fmt: skip
    return cells


# --- containers -------------------------------------------------------------------------------------------------------

_C = "container"
_CONTAINERS = [
    Cell("list", "len", "append", "l# = [1.0]", "len(l#)", "l#.append(2.0)", "l#.pop()"),
    Cell("list", "sum", "item", "l# = [1.0, 2.0]", "sum(l#)", "l#[1] = 5.0", "l#[1] = 2.0"),
    Cell("list", "order", "reverse", "l# = [1.0, 3.0]", "(l#[0] - 2 * l#[1])", "l#.reverse()", "l#.reverse()"),
    Cell("list", "iteration", "clear", "l# = [2.0, 3.0]", "(1 + sum(v for v in l#))", "l#.clear()"),
    Cell("list", "in", "append", "l# = [1.0]", "(2 if 7 in l# else 3)", "l#.append(7)", "l#.remove(7)"),
    Cell("dict", "len", "add", "d# = dict(a=1.0)", "len(d#)", "d#['b'] = 2.0", "del d#['b']"),
    Cell("dict", "in", "add", "d# = dict(a=1.0)", "(2 if 'b' in d# else 3)", "d#['b'] = 2.0", "del d#['b']"),
    Cell("dict", "get", "add", "d# = dict(a=1.0)", "d#.get('b', 3.0)", "d#['b'] = 2.0", "del d#['b']"),
    Cell("dict", "get", "remove", "d# = dict(b=1.0, a=1.0)", "d#.get('b', 3.0)", "del d#['b']"),
    Cell("dict", "sum", "item", "d# = dict(a=1.0)", "sum(d#.values())", "d#['a'] = 3.0", "d#['a'] = 1.0"),
    Cell(
        "dict", "order", "move to the end", "d# = dict(a=1.0, b=3.0)",
        "(lambda a, b: a - 2 * b)(*d#.values())", "d#['a'] = d#.pop('a')", "d#['b'] = d#.pop('b')",
    ),
    Cell(
        "ordered dict", "order", "move to the end", "d# = OrderedDict(a=1.0, b=3.0)",
        "(lambda a, b: a - 2 * b)(*d#.values())", "d#.move_to_end('a')", "d#.move_to_end('b')",
    ),
    Cell("ordered dict", "values", "item", "d# = OrderedDict(a=1.0)", "d#['a']", "d#['a'] = 3.0", "d#['a'] = 1.0"),
    Cell("default dict", "len", "add", "d# = defaultdict(float, a=1.0)", "len(d#)", "d#['b']"),
    Cell("counter", "count", "update", "c# = Counter(a=1)", "(1 + c#['a'] + c#['b'])", "c#.update('ab')"),
    Cell("set", "max", "add", "s# = {1.0}", "max(s#)", "s#.add(3.0)", "s#.remove(3.0)"),
    Cell("set", "in", "remove", "s# = {1, 2}", "(2 if 2 in s# else 3)", "s#.remove(2)", "s#.add(2)"),
    Cell("frozen set", "len", "rebind", "n# = types.SimpleNamespace(s=frozenset([1]))", "len(n#.s)", "n#.s = frozenset('ab')"),
    Cell("deque", "sum", "append", "q# = deque([1.0], maxlen=3)", "sum(q#)", "q#.append(2.0)"),
    Cell("deque", "order", "rotate", "q# = deque([1.0, 3.0])", "q#[0]", "q#.rotate()", "q#.rotate()"),
    Cell("array of NumPy", "item", "assign", "a# = np.array([1.0, 2.0])", "float(a#[0])", "a#[0] = 3.0", "a#[0] = 1.0"),
    Cell("array of NumPy", "shape", "rebind", "n# = types.SimpleNamespace(a=np.ones(2))", "n#.a.shape[0]", "n#.a = np.ones(3)"),
    Cell("array of NumPy", "item", "long", "a# = np.ones(5000)", "float(a#[4000])", "a#[4000] = 3.0", "a#[4000] = 1.0"),
    Cell("array.array", "item", "assign", "a# = array.array('d', [1.0])", "a#[0]", "a#[0] = 3.0", "a#[0] = 1.0"),
    Cell("array.array", "len", "append", "a# = array.array('d', [1.0])", "len(a#)", "a#.append(3.0)", "a#.pop()"),
    Cell("bytearray", "item", "assign", "a# = bytearray(b'abc')", "a#[0]", "a#[0] = 7", "a#[0] = 97"),
    Cell("memory view", "item", "assign", "a# = bytearray(b'abc')\nv# = memoryview(a#)", "v#[0]", "a#[0] = 7", "a#[0] = 97"),
    Cell("ctypes", "value", "assign", "c# = ctypes.c_double(1.5)", "c#.value", "c#.value = 2.5", "c#.value = 1.5"),
    Cell("ctypes array", "item", "assign", "c# = (ctypes.c_double * 2)(1.5, 2)", "c#[0]", "c#[0] = 2.5", "c#[0] = 1.5"),
    Cell("named tuple", "field", "rebind", "N# = namedtuple('N#', 'a b')\nn# = dict(t=N#(1.5, 2))", "n#['t'].a", "n#['t'] = N#(2.5, 2)"),
    Cell("long list", "item", "assign", "l# = [1.0] * 2000", "l#[1500]", "l#[1500] = 2.0", "l#[1500] = 1.0"),
    Cell("long list", "len", "append", "l# = [1.0] * 2000", "len(l#) / 1000", "l#.append(1.0)", "l#.pop()"),
    Cell("long dict", "item", "assign", "d# = dict.fromkeys(range(2000), 1.0)", "d#[1500]", "d#[1500] = 2.0", "d#[1500] = 1.0"),
    Cell("long dict", "in", "add", "d# = dict.fromkeys(range(2000))", "(2 if -1 in d# else 3)", "d#[-1] = 0", "del d#[-1]"),
    Cell("long deque", "item", "assign", "q# = deque([1.0] * 2000)", "q#[1500]", "q#[1500] = 2.0", "q#[1500] = 1.0"),
    Cell("long set", "in", "add", "s# = set(range(2000))", "(2 if -1 in s# else 3)", "s#.add(-1)", "s#.remove(-1)"),
    Cell("long tuple", "item", "rebind", "n# = dict(t=(1.0,) * 2000)", "n#['t'][0]", "n#['t'] = (2.0,) * 2000"),
    Cell(
        "dict with methods", "item", "assign", "class T#(dict):\n    def at(self, key): return self[key]\nt# = T#(a=1.5)",
        "t#.at('a')", "t#['a'] = 2.5", "t#['a'] = 1.5",
    ),
    Cell("user list", "len", "append", "u# = UserList([1.0])", "len(u#)", "u#.append(2.0)", "u#.pop()"),
]  # fmt: skip


# --- classes of classes, methods that syntax calls, modules, parsers --------------------------------------------------

_META = "class M#(type):\n    w = 1.5\n    @property\n    def v(cls): return cls.w\nclass K#(metaclass=M#): pass"
_MOD = "mod# = types.ModuleType('mod#')\nmod#.v = 1.5"
_PARSER = "par# = argparse.ArgumentParser()\npar#.add_argument('--v', type=float, default=1.5)"
_RETURNS = "(lambda value: lambda *_: value)"
_BY_SYNTAX = {  # method: how syntax calls it, what it returns, and then
    "__getitem__": ("k#[0]", "1.5", "2.5"),
    "__add__": ("(k# + 1)", "1.5", "2.5"),
    "__len__": ("len(k#)", "1", "2"),
    "__contains__": ("(2 if 5 in k# else 3)", "True", "False"),
    "__getattr__": ("k#.more", "1.5", "2.5"),
}
_CLASSES = [
    Cell("metaclass", "an attribute", "rebind", _META, "K#.w", "M#.w = 2.5", "M#.w = 1.5"),
    Cell("metaclass", "a property", "rebind", _META, "K#.v", "M#.w = 2.5", "M#.w = 1.5"),
    Cell("metaclass", "a property", "replace", _META, "K#.v", "M#.v = property(lambda cls: 2.5)"),
    Cell("metaclass", "of an object", "rebind", _META + "\nk# = K#()", "type(k#).v", "M#.w = 2.5", "M#.w = 1.5"),
    Cell("metaclass", "a method by syntax", "rebind", "class M#(type):\n    def __len__(cls): return 1\nclass K#(metaclass=M#): pass", "len(K#)", "M#.__len__ = lambda cls: 2"),
    *(
        Cell("class", name, "replace", f"class K#: pass\nK#.{name} = {_RETURNS}({value})\nk# = K#()", get, f"K#.{name} = {_RETURNS}({then})")
        for name, (get, value, then) in _BY_SYNTAX.items()
    ),
    Cell("Python module", "getattr of a computed name", "rebind", _MOD, "getattr(mod#, ''.join(['v']))", "mod#.v = 2.5", "mod#.v = 1.5"),
    Cell("Python module", "vars", "rebind", _MOD, "vars(mod#)[''.join(['v'])]", "mod#.v = 2.5", "mod#.v = 1.5"),
    Cell("Python module", "__dict__", "rebind", _MOD, "mod#.__dict__[''.join(['v'])]", "mod#.v = 2.5", "mod#.v = 1.5"),
    Cell("Python module", "getattr in a helper", "rebind", _MOD + "\ndef of#(holder, name): return getattr(holder, name)", "of#(mod#, 'v')", "mod#.v = 2.5", "mod#.v = 1.5"),
    Cell("Python module", "getattr of an attribute", "rebind", _MOD + "\nns# = types.SimpleNamespace(m=mod#)", "getattr(ns#.m, ''.join(['v']))", "mod#.v = 2.5", "mod#.v = 1.5"),
    Cell("parser", "get_default", "set_defaults", _PARSER, "par#.get_default('v')", "par#.set_defaults(v=2.5)", "par#.set_defaults(v=1.5)"),
    Cell("parser", "parse_args", "set_defaults", _PARSER, "par#.parse_args([]).v", "par#.set_defaults(v=2.5)", "par#.set_defaults(v=1.5)"),
]  # fmt: skip


# --- names that are computed, and attributes that appear --------------------------------------------------------------

_NS = "ns# = types.SimpleNamespace(v=1.5, u=1.0)"
_DC = "@dataclasses.dataclass\nclass D#:\n    v: float = 1.5\nd# = D#()"
_KEYS = "key# = ''.join(['v'])\n"
_TO, _BACK = "ns#.v = 2.5", "ns#.v = 1.5"
_WITHIN = (
    "keys# = [''.join(['v']), ''.join(['with', 'in'])]\n"
    "ns# = types.SimpleNamespace(within=types.SimpleNamespace(v=1.5, u=1.0))\n"
    "class C#:\n    def held(self): return self._held\nc# = C#()\nc#._held = ns#.within\n"
    "def walk#(holder, path):\n    for name in path: holder = getattr(holder, name)\n    return holder"
)
_BY_NAMES = {
    "getattr of getattr": "getattr(getattr(ns#, keys#[1]), keys#[0])",
    "getattr of vars": "getattr(vars(ns#)[keys#[1]], keys#[0])",
    "__dict__ of __dict__": "ns#.__dict__[keys#[1]].__dict__[keys#[0]]",
    "reduce": "functools.reduce(getattr, keys#[::-1], ns#)",
    "a loop": "walk#(ns#, keys#[::-1])",
    "a path": "operator.attrgetter('.'.join(keys#[::-1]))(ns#)",
    "what a method returns": "getattr(c#.held(), keys#[0])",
}
_COMPUTED = [
    Cell("namespace", "getattr", "rebind", _NS, "getattr(ns#, 'v')", _TO, _BACK),
    Cell("namespace", "getattr of a computed name", "rebind", _KEYS + _NS, "getattr(ns#, key#)", _TO, _BACK),
    Cell("namespace", "getattr of a formatted name", "rebind", _NS, "getattr(ns#, f\"{'v'}\")", _TO, _BACK),
    Cell("namespace", "attrgetter", "rebind", "get# = operator.attrgetter('v')\n" + _NS, "get#(ns#)", _TO, _BACK),
    Cell("namespace", "attrgetter in the step", "rebind", _KEYS + _NS, "operator.attrgetter(key#)(ns#)", _TO, _BACK),
    *(
        Cell("namespace within one", read, "rebind", _WITHIN, value, "vars(ns#.within)['v'] = 2.5", "vars(ns#.within)['v'] = 1.5")
        for read, value in _BY_NAMES.items()
    ),
    Cell("namespace", "vars", "rebind", _KEYS + _NS, "vars(ns#)[key#]", _TO, _BACK),
    Cell("namespace", "all of vars", "rebind", _NS, "sum(vars(ns#).values())", _TO, _BACK),
    Cell("namespace", "__dict__", "rebind", _KEYS + _NS, "ns#.__dict__[key#]", _TO, _BACK),
    Cell("namespace", "a copy", "rebind", _KEYS + _NS, "vars(copy.copy(ns#))[key#]", _TO, _BACK),
    Cell("namespace", "repr", "rebind", _NS, "len(repr(ns#))", "ns#.v = 2.55", _BACK),
    Cell("namespace", "equality", "rebind", _NS + "\nother# = types.SimpleNamespace(v=1.5, u=1.0)", "(2 if ns# == other# else 3)", _TO, _BACK),
    Cell("dataclass", "asdict", "rebind", _DC, "dataclasses.asdict(d#)[''.join('v')]", "d#.v = 2.5", "d#.v = 1.5"),
    Cell("dataclass", "astuple", "rebind", _DC, "dataclasses.astuple(d#)[0]", "d#.v = 2.5", "d#.v = 1.5"),
    Cell("dataclass", "equality", "rebind", _DC + "\ne# = D#()", "(2 if d# == e# else 3)", "d#.v = 2.5", "d#.v = 1.5"),
    Cell("dataclass", "repr", "rebind", _DC, "len(repr(d#))", "d#.v = 2.55", "d#.v = 1.5"),
    Cell("dataclass", "fields", "rebind", _DC, "sum(getattr(d#, f.name) for f in dataclasses.fields(d#))", "d#.v = 2.5", "d#.v = 1.5"),
    Cell(
        "dataclass", "match by keyword", "rebind",
        _DC + "\ndef m#():\n    match d#:\n        case D#(v=1.5): return 2\n        case _: return 3",
        "m#()", "d#.v = 2.5", "d#.v = 1.5",
    ),
    Cell(
        "dataclass", "match by position", "rebind",
        _DC + "\ndef m#():\n    match d#:\n        case D#(got): return got\n        case _: return 3",
        "m#()", "d#.v = 2.5", "d#.v = 1.5",
    ),
    Cell(
        "dict", "match", "rebind",
        "d# = dict(v=1.5)\ndef m#():\n    match d#:\n        case {'v': got}: return got\n        case _: return 3",
        "m#()", "d#['v'] = 2.5", "d#['v'] = 1.5",
    ),
    Cell("dict", "itemgetter", "rebind", "get# = operator.itemgetter('v')\nd# = dict(v=1.5)", "get#(d#)", "d#['v'] = 2.5", "d#['v'] = 1.5"),
    Cell("namespace", "hasattr", "appears", _NS, "(2 if hasattr(ns#, 'more') else 3)", "ns#.more = 1", "del ns#.more"),
    Cell("namespace", "getattr with a default", "appears", _NS, "getattr(ns#, 'more', 3.0)", "ns#.more = 1.5", "del ns#.more"),
    Cell(
        "namespace", "an error that is caught", "appears",
        _NS + "\ndef g#():\n    try: return ns#.more\n    except AttributeError: return 3.0", "g#()", "ns#.more = 1.5", "del ns#.more",
    ),
    Cell("namespace", "number of attributes", "appears", _NS, "len(vars(ns#))", "ns#.more = 1", "del ns#.more"),
    Cell("slots", "hasattr", "appears", "class S#: __slots__ = ('v',)\ns# = S#()", "(2 if hasattr(s#, 'v') else 3)", "s#.v = 1", "del s#.v"),
    Cell("class", "hasattr", "appears", "class K#: pass", "(2 if hasattr(K#, 'more') else 3)", "K#.more = 1", "del K#.more"),
    Cell("object", "hasattr of its class", "appears", "class K#: pass\nk# = K#()", "(2 if hasattr(k#, 'more') else 3)", "K#.more = 1", "del K#.more"),
    Cell("function", "hasattr", "appears", "def f#(): pass", "(2 if hasattr(f#, 'more') else 3)", "f#.more = 1", "del f#.more"),
    Cell("module", "hasattr", "appears", "m# = nn.Tanh()", "(2 if hasattr(m#, 'more') else 3)", "m#.more = 1", "del m#.more"),
    Cell("parameter", "hasattr", "appears", "p# = nn.Parameter(torch.ones(2))", "(2 if hasattr(p#, 'more') else 3)", "p#.more = 1", "del p#.more"),
    Cell("optimizer", "hasattr", "appears", "p# = torch.optim.SGD([w#], 0.1)", "(2 if hasattr(p#, 'more') else 3)", "p#.more = 1", "del p#.more"),
    Cell("namespace", "hasattr", "goes", _NS, "(2 if hasattr(ns#, 'u') else 3)", "del ns#.u", "ns#.u = 1.0"),
]  # fmt: skip


# --- code, classes and objects of PyTorch's ---------------------------------------------------------------------------

_CODE = [
    Cell("function", "its code", "__code__", "def f#(): return 1.5\ndef g#(): return 2.5", "f#()", "f#.__code__ = g#.__code__"),
    Cell("function", "its defaults", "__defaults__", "def f#(v=1.5): return v", "f#()", "f#.__defaults__ = (2.5,)", "f#.__defaults__ = (1.5,)"),
    Cell("function", "its keyword defaults", "__kwdefaults__", "def f#(*, v=1.5): return v", "f#()", "f#.__kwdefaults__ = dict(v=2.5)"),
    Cell("object", "its class", "__class__", "class A#:\n    def get(self): return 1.5\nclass B#:\n    def get(self): return 2.5\na# = A#()", "a#.get()", "a#.__class__ = B#", "a#.__class__ = A#"),
    Cell("object", "a number", "__dict__", "class A#: pass\na# = A#()\na#.v = 1.5", "a#.v", "a#.__dict__ = {'v': 2.5}", "a#.__dict__ = {'v': 1.5}"),
    Cell("object", "its type", "__class__", "class A#: pass\nclass B#(A#): pass\na# = A#()", "(2 if type(a#) is A# else 3)", "a#.__class__ = B#", "a#.__class__ = A#"),
    Cell("module", "its class", "__class__", "class A#(nn.Module):\n    def forward(self, y): return y * 1.5\nclass B#(A#):\n    def forward(self, y): return y * 2.5\na# = A#()", "a#(1.0)", "a#.__class__ = B#", "a#.__class__ = A#"),
    Cell("class", "a method", "rebind", "class A#:\n    def get(self): return 1.5\na# = A#()", "a#.get()", "A#.get = lambda self: 2.5"),
    Cell("object", "a method of its own", "rebind", "class A#:\n    def get(self): return 1.5\na# = A#()", "a#.get()", "a#.get = lambda: 2.5", "del a#.get"),
    Cell("class", "a base's method", "rebind", "class A#:\n    def get(self): return 1.5\nclass B#(A#): pass\nb# = B#()", "b#.get()", "A#.get = lambda self: 2.5"),
    Cell("class", "a method that hides a base's", "appears", "class A#:\n    def get(self): return 1.5\nclass B#(A#): pass\nb# = B#()", "b#.get()", "B#.get = lambda self: 2.5", "del B#.get"),
    Cell("class", "__call__", "rebind", "class A#:\n    def __call__(self): return 1.5\na# = A#()", "a#()", "A#.__call__ = lambda self: 2.5"),
    Cell("class", "__bases__", "rebind", "class A#:\n    v = 1.5\nclass B#:\n    v = 2.5\nclass Z#(A#): pass", "Z#.v", "Z#.__bases__ = (B#,)", "Z#.__bases__ = (A#,)"),
    Cell("module", "forward", "rebind", "m# = nn.Tanh()", "m#(y).detach().sum()", "m#.forward = lambda y: y * 2", "del m#.forward"),
    Cell("module", "training", "eval", "m# = nn.Dropout(0.0)", "(1 + m#.training)", "m#.eval()", "m#.train()"),
    Cell("module", "hooks", "registered", "m# = nn.Tanh()", "m#(y).detach().sum()", "m#.register_forward_hook(lambda m, i, out: out * 2)"),
    Cell("module", "submodules", "appended", "m# = nn.Sequential(nn.Tanh())", "m#(y).detach().sum()", "m#.append(nn.Tanh())"),
    Cell("module", "number of parameters", "registered", "m# = nn.Linear(2, 2)", "(1 + len([*m#.parameters()]))", "m#.more = nn.Parameter(torch.ones(1))"),
    Cell("module", "bias is None", "assign", "m# = nn.Linear(2, 2, bias=False)", "(1 + (m#.bias is None))", "m#.bias = nn.Parameter(torch.ones(2))", "m#.bias = None"),
    Cell("module", "weight is None", "assign", "m# = nn.Linear(2, 2)", "(1 + (m#.bias is None))", "m#.bias = None"),
    Cell("module", "weight.shape", "assign", "m# = nn.Linear(2, 2)", "m#.weight.shape[0]", "m#.weight = nn.Parameter(torch.ones(3, 2))"),
    Cell("module", "out_features", "assign", "m# = nn.Linear(2, 2)", "m#.out_features", "m#.out_features = 3", "m#.out_features = 2"),
    Cell("module", "a name that is computed", "assign", "m# = nn.Linear(2, 2)", "getattr(m#, '_'.join(['out', 'features']))", "m#.out_features = 3", "m#.out_features = 2"),
    Cell("scheduler", "last_epoch", "step", "o# = torch.optim.SGD([w#], 0.5)\nsch# = torch.optim.lr_scheduler.ExponentialLR(o#, 0.5)", "(1 + sch#.last_epoch)", "o#.step(); sch#.step()"),
    Cell("scheduler", "base_lrs", "assign", "o# = torch.optim.SGD([w#], 0.5)\nsch# = torch.optim.lr_scheduler.ExponentialLR(o#, 0.5)", "sch#.base_lrs[0]", "sch#.base_lrs[0] = 0.25", "sch#.base_lrs[0] = 0.5"),
    Cell("scheduler", "get_last_lr", "step", "o# = torch.optim.SGD([w#], 0.5)\nsch# = torch.optim.lr_scheduler.ExponentialLR(o#, 0.5)", "sch#.get_last_lr()[0]", "o#.step(); sch#.step()"),
    Cell("scheduler", "state_dict", "step", "o# = torch.optim.SGD([w#], 0.5)\nsch# = torch.optim.lr_scheduler.ExponentialLR(o#, 0.5)", "(1 + sch#.state_dict()['last_epoch'])", "o#.step(); sch#.step()"),
    Cell("distribution", "loc", "rebind", "n# = torch.distributions.Normal(torch.ones(2), torch.ones(2))", "n#.loc.sum()", "n#.loc = torch.full((2,), 2.0)"),
    Cell("distribution", "log_prob", "rebind", "n# = torch.distributions.Normal(torch.ones(2), torch.ones(2))", "n#.log_prob(torch.zeros(2)).sum()", "n#.loc = torch.full((2,), 2.0)"),
    Cell("distribution", "batch_shape", "rebind", "n# = torch.distributions.Normal(torch.ones(2), torch.ones(2))", "n#.batch_shape[0]", "n#._batch_shape = torch.Size([3])"),
    Cell("optimizer", "defaults", "assign", "o# = torch.optim.SGD([w#], 0.5)", "o#.defaults['lr']", "o#.defaults['lr'] = 0.25", "o#.defaults['lr'] = 0.5"),
    Cell("optimizer that doesn't step", "weight_decay", "assign", "o# = torch.optim.SGD([w#], 0.5, weight_decay=0.5)", "o#.param_groups[0]['weight_decay']", "o#.param_groups[0]['weight_decay'] = 0.25", "o#.param_groups[0]['weight_decay'] = 0.5"),
    Cell("optimizer that doesn't step", "lr", "assign", "o# = torch.optim.SGD([w#], 0.5)", "o#.param_groups[0]['lr']", "o#.param_groups[0]['lr'] = 0.25", "o#.param_groups[0]['lr'] = 0.5"),
    Cell("optimizer that doesn't step", "number of groups", "added", "o# = torch.optim.SGD([w#], 0.5)", "len(o#.param_groups)", "o#.add_param_group(dict(params=[torch.ones(1)]))"),
    Cell("optimizer that steps", "weight_decay", "assign", "", "(1 + opt.param_groups[0]['weight_decay'])", "opt.param_groups[0]['weight_decay'] = 0.25", "opt.param_groups[0]['weight_decay'] = 0"),
    Cell("optimizer that steps", "lr", "assign", "", "(1 + opt.param_groups[0]['lr'])", "opt.param_groups[0]['lr'] = 0.02", "opt.param_groups[0]['lr'] = 0.001"),
    Cell("optimizer that steps", "step", "assign", "", "1", "opt.step = lambda: None", "del opt.step"),
    Cell("optimizer that steps", "zero_grad", "assign", "", "1", "opt.zero_grad = lambda: None", "del opt.zero_grad"),
    Cell("closure", "a Python module", "rebind", _MOD + "\nother# = types.ModuleType('other_#')\nother#.__file__, other#.v = __file__, 2.5", "mod#.v", "mod# = other#"),
    Cell("optimizer that steps", "momentum", "assign", "", "1", "opt.param_groups[0]['momentum'] = 0.25", "opt.param_groups[0]['momentum'] = 0.5"),
    Cell("environment", "os.environ[]", "assign", "os.environ['MS_TEST_#'] = '1.5'", "float(os.environ['MS_TEST_#'])", "os.environ['MS_TEST_#'] = '2.5'", "os.environ['MS_TEST_#'] = '1.5'"),
    Cell("environment", "os.environ.get", "appears", "os.environ.pop('MS_TEST_#', 0)", "float(os.environ.get('MS_TEST_#', 1))", "os.environ['MS_TEST_#'] = '2.5'", "os.environ.pop('MS_TEST_#', None)"),
    Cell("environment", "os.getenv", "assign", "os.environ['MS_TEST_#'] = '1.5'", "float(os.getenv('MS_TEST_#'))", "os.environ['MS_TEST_#'] = '2.5'", "os.environ['MS_TEST_#'] = '1.5'"),
    Cell("environment", "in", "appears", "os.environ.pop('MS_TEST_#', 0)", "(2 if 'MS_TEST_#' in os.environ else 3)", "os.environ['MS_TEST_#'] = ''", "os.environ.pop('MS_TEST_#', None)"),
    Cell("context variable", "get with a default", "appears", "cv# = contextvars.ContextVar('cv#')", "cv#.get(1.5)", "cv#.set(2.5)"),
    Cell("shared memory", "value", "assign", "mp# = multiprocessing.Value('d', 1.5, lock=False)", "mp#.value", "mp#.value = 2.5", "mp#.value = 1.5"),
]  # fmt: skip

CELLS: list[Cell] = [*_value_cells(), *_tensor_cells(), *_CONTAINERS, *_CLASSES, *_COMPUTED, *_CODE]
"""Every cell."""
