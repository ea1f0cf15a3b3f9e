"""Random programs that copy, swap, rotate and update pieces of state and arguments.

A program is Python source, made from its seed alone. Its values are small whole numbers, and halves of them, so that
whatever order they are added in, results are exact: they must be eager's to the bit.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NAMES = "a b w h prev net frozen policy target ema old queue mean".split()
"""Of state: what PyTorch's compiler does with two tensors may depend on how their names are sorted."""

SHAPES = [(4,), (6,), (16,), (17,), (3, 4), (4, 4), (5, 8), (2, 3, 4)]
LARGE = [(2500,), (33, 70), (64, 64)]
"""More than one block of a GPU's has, or one thread of a CPU's."""

WRAPS = ("arguments", "closure", "module", "step", "training")
"""Who holds the state, and through what the program runs: the first three through ``ms.compile``, the others through
``ms.step``; a program of the last kind has a backward pass and an optimizer, too."""


@dataclass(frozen=True)
class Program:
    """A function, its state and how it is called.

    Attributes:
        seed: What it was made from.
        wrap: One of ``WRAPS``.
        state: Names of tensors, and the expressions that make them.
        arguments: Likewise.
        order: All names, in the order in which the function takes them, or first touches them.
        body: Statements.
        results: Expressions that it returns.
    """

    seed: int
    wrap: str
    state: dict[str, str]
    arguments: dict[str, str]
    order: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def source(self) -> str:
        """Defines ``make``, which gives the function to wrap, what it is called with, and all that it may change."""
        held = {name: f"self.{name}" if self.wrap == "module" else name for name in self.state}
        takes = [name for name in self.order if name in self.arguments or self.wrap == "arguments"]
        made = [f"{name} = {each}" for name, each in {**self.state, **self.arguments}.items()]
        body = [_renamed(line, held) for line in self.body]
        if self.wrap != "arguments":  # the order in which state is met
            body.insert(0, "".join(f"{held[name]}; " for name in self.order if name in held) + "pass")
        if self.wrap == "training":
            made += ["p = nn.Parameter(torch.arange(4.0) - 1)", "opt = torch.optim.SGD([p], lr=0.5, momentum=0.5)"]
            # The state that copies of a parameter are kept in, and what is copied there before it is updated.
            made += ["kept, ahead = torch.zeros(4), torch.zeros(4)"]
            flat = [f"{name}.reshape(-1)[:4].float()" for name in self.state]
            body = [
                "kept.copy_(p.detach())",
                *body,
                f"loss = (p * {flat[0]}).sum() + (p.sum() * {flat[-1]}.sum())",
                "loss.backward()",
                "opt.step()",
                "opt.zero_grad()",
                "ahead.copy_(p.detach() * 2 - kept)",
            ]
        body.append(f"return ({', '.join(_renamed(each, held) for each in self.results)},)")
        head = f"def f({', '.join((['self'] if self.wrap == 'module' else []) + takes)}):"
        grad = ["@torch.no_grad()"] if self.wrap != "training" else []
        function = [*grad, head, *(f"    {line}" for line in body)]
        lines = [*made, *function]
        if self.wrap == "module":
            lines += ["class M(nn.Module):", "    def __init__(self):", "        super().__init__()"]
            lines += [f"        self.register_buffer({name!r}, {name})" for name in self.state]
            lines += ["    forward = f", "f = M()"]
        watched = [*self.state, *(["p", "kept", "ahead"] if self.wrap == "training" else [])]
        lines.append(f"return f, [{', '.join(takes)}], [{', '.join(watched)}]")
        return "import torch\nfrom torch import nn\n\ndef make():\n" + textwrap.indent("\n".join(lines), "    ")


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"\b(?<!\.)([a-z]\w*)\b", lambda found: names.get(found[1], found[1]), line)


class _Writer:
    """Writes one program from random numbers."""

    def __init__(self, seed: int, *, large: bool) -> None:
        self.random = random.Random(f"copies {seed}")
        self.seed = seed
        self.large = large
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.locals: list[str] = []
        self.aliased: dict[str, str] = {}
        self.num_locals = 0

    def write(self) -> Program:
        choose = self.random
        wrap = choose.choice(WRAPS)
        shapes = LARGE if choose.random() < (0.6 if self.large else 0.1) else SHAPES
        main = choose.choice(shapes)
        state = self._make(choose.sample(NAMES, choose.randint(2, 4)), main, shapes)
        arguments = self._make(["x", "y"][: choose.randint(1, 2)], main, shapes)
        order = [*state, *arguments]
        choose.shuffle(order)
        self.state, self.arguments = [*state], [*arguments]
        body: list[str] = []
        for _ in range(choose.randint(2, 7)):
            body += self._statements()
        results = [self._any_value() for _ in range(choose.randint(1, 2))] + self.locals[-3:]
        return Program(self.seed, wrap, state, arguments, tuple(order), tuple(body), tuple(results))

    def _make(self, names: Sequence[str], main: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> dict[str, str]:
        found = {}
        for name in names:
            shape = main if self._chance(0.8) else self.random.choice(shapes)
            dtype = "float32" if self._chance(0.8) else self.random.choice(["float64", "int64", "int32"])
            self.shapes[name], self.dtypes[name] = shape, dtype
            numel = 1
            for size in shape:
                numel *= size
            first, factor = self.random.randint(-3, 3), self.random.choice([1, 3, 5, 7])
            values = f"(torch.arange({numel}) * {factor} + {first}) % 8 - 3"
            found[name] = f"({values}).to(torch.{dtype}).view({shape})"
            if len(shape) == 2 and self._chance(0.1):
                found[name] += ".t().contiguous().t()"
        return found

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    # --- places ---

    def _place(self, name: str | None = None) -> tuple[str, tuple[int, ...], str]:
        """A tensor, or a view of one: expression, shape, dtype."""
        if name is None:
            pool = [*self.state, *self.state, *self.arguments, *self.locals]
            name = self.random.choice(pool)
        text, shape = name, self.shapes[name]
        if self._chance(0.5):
            text, shape = self._view(text, shape)
            if self._chance(0.2):
                text, shape = self._view(text, shape)
        return text, shape, self.dtypes[name]

    def _view(self, text: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        choose = self.random
        if not shape or 0 in shape:
            return text, shape
        d = choose.randrange(len(shape))
        before, size, lead = shape[:d], shape[d], ":, " * d
        kind = choose.choice("slice slice slice stride half select flat transpose diagonal narrow".split())
        if kind == "slice" and size > 1:
            low = choose.randrange(size - 1)
            high = choose.randint(low + 1, size)
            return f"{text}[{lead}{low}:{high}]", (*before, high - low, *shape[d + 1 :])
        if kind == "half" and size > 1:
            half = size // 2
            first = self._chance(0.5)
            part = f":{half}" if first else f"{size - half}:"
            return f"{text}[{lead}{part}]", (*before, half, *shape[d + 1 :])
        if kind == "stride" and size > 2:
            first = choose.randrange(2)
            return f"{text}[{lead}{first}::2]", (*before, (size - first + 1) // 2, *shape[d + 1 :])
        if kind == "select" and size > 1:
            return f"{text}[{lead}{choose.randrange(size)}]", (*before, *shape[d + 1 :])
        if kind == "narrow" and size > 2:
            length = choose.randint(1, size - 1)
            return f"{text}.narrow({d}, {choose.randint(0, size - length)}, {length})", (
                *before,
                length,
                *shape[d + 1 :],
            )
        if kind == "flat" and len(shape) > 1 and text.isidentifier():
            numel = 1
            for each in shape:
                numel *= each
            low = choose.randrange(numel - 1)
            high = choose.randint(low + 1, numel)
            return f"{text}.view(-1)[{low}:{high}]", (high - low,)
        if kind == "transpose" and len(shape) > 1:
            return f"{text}.transpose(0, 1)", (shape[1], shape[0], *shape[2:])
        if kind == "diagonal" and len(shape) == 2:
            return f"{text}.diagonal()", (min(shape),)
        return text, shape

    # --- values ---

    def _value(self, shape: tuple[int, ...], *, plain: bool = False) -> str:
        """An expression of this shape, or one that broadcasts to it."""
        if self._chance(0.06):
            return str(float(self.random.randint(-2, 2)))
        text, found = self._fitting(shape)
        if plain or self._chance(0.3):
            return text
        if not found or self._chance(0.6):
            return self._elementwise(text, shape)
        return self._moved(text, found, self.random.randrange(len(found)))

    def _elementwise(self, text: str, shape: tuple[int, ...]) -> str:
        """Something of a value that each place has of its own."""
        other, _ = self._fitting(shape)
        forms = [
            f"{text}.clone()",
            f"({text} + {other})",
            f"({text} - {other})",
            f"torch.maximum({text}, {other})",
            f"torch.where({text} > 0, {text}, {other})",
            f"({text} + {self.random.randint(1, 3)})",
            f"({text} / 2)",
            f"({text} * 2)",
            f"(-{text})",
            f"{text}.to(torch.{self.random.choice(['float64', 'int64', 'int32', 'float32'])})",
        ]
        return self.random.choice(forms)

    def _moved(self, text: str, shape: tuple[int, ...], d: int) -> str:
        """The values of a tensor at other places, moved along a dimension."""
        size, lead = shape[d], ":, " * d
        cut = self.random.randint(0, size - 1)
        index = [self.random.randrange(size) for _ in range(min(size, 64))]
        forms = [
            f"{text}.flip({d})",
            f"{text}.roll({self.random.choice([1, -1, 2])}, {d})",
            f"{text}.sort({d}).values",
            f"torch.cat([{text}[{lead}{cut}:], {text}[{lead}:{cut}]], {d})",
            f"torch.nn.functional.pad({text}, ({'0, 0, ' * (len(shape) - 1 - d)}1, 0))[{lead}:{size}]",
        ]
        if size <= 64:
            forms.append(f"{text}.index_select({d}, torch.tensor({index}, device={text}.device))")
        return self.random.choice(forms)

    def _fitting(self, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Part of some tensor that has this shape, or broadcasts to it; its shape."""
        for _ in range(6):
            text, found, _ = self._place()
            if found == shape or (
                len(found) < len(shape) and found == shape[len(shape) - len(found) :] and self._chance(0.3)
            ):
                return text, found
        numel = 1
        for size in shape:
            numel *= size
        name = self.random.choice([*self.state, *self.arguments])
        total = 1
        for size in self.shapes[name]:
            total *= size
        if total < numel or not shape:
            return f"{name}.reshape(-1)[{self.random.randrange(total)}]", ()
        low = self.random.randint(0, total - numel)
        flat = f"{name}.reshape(-1)[{low}:{low + numel}]"
        return (flat if len(shape) == 1 else f"{flat}.view({shape})"), shape

    def _apart(self, value: str, target: str) -> str:
        """A value in memory of its own: what eager writes while it reads it from the same memory is anything."""
        is_apart = self._names(value).isdisjoint(self._names(target)) or _is_number(value)
        return value if is_apart else f"{value}.clone()"

    def _names(self, text: str) -> set[str]:
        """The tensors in an expression; those that are views of others by the names of these."""
        return {self.aliased.get(name, name) for name in re.findall(r"[a-z]\w*", text) if name in self.shapes}

    def _any_value(self) -> str:
        text, shape, _ = self._place()
        value = self._value(shape)
        if self._chance(0.5) and not _is_number(value):
            return value
        return f"{text}.clone()" if self._chance(0.7) else f"{text} + 0"

    # --- statements ---

    def _statements(self) -> list[str]:
        kinds = {
            "copy": 8,
            "assign": 5,
            "update": 6,
            "swap": 3,
            "rotate": 2,
            "move along": 3,
            "index": 4,
            "local": 4,
            "edited clone": 3,
            "foreach": 2,
            "alias": 1,
        }
        kind = self.random.choices([*kinds], [*kinds.values()])[0]
        return getattr(self, f"_{kind.replace(' ', '_')}")()

    def _new_local(self, shape: tuple[int, ...], dtype: str) -> str:
        self.num_locals += 1
        name = f"t{self.num_locals}"
        self.locals.append(name)
        self.shapes[name], self.dtypes[name] = shape, dtype
        return name

    def _copy(self) -> list[str]:
        if self._chance(0.4):  # all of one to all of another one, as state is mostly copied
            same = [
                (one, two)
                for one in self.state
                for two in [*self.state, *self.arguments]
                if one != two and self.shapes[one] == self.shapes[two]
            ]
            if same:
                one, two = self.random.choice(same)
                return [f"{one}.copy_({two})" if self._chance(0.7) else f"{one}.data.copy_({two}.detach())"]
        text, shape, _ = self._place()
        return [f"{text}.copy_({self._apart(self._value(shape), text)})"]

    def _assign(self) -> list[str]:
        text, shape, _ = self._place()
        text = text if text.endswith("]") else f"{text}[...]"
        return [f"{text} = {self._apart(self._value(shape), text)}"]

    def _update(self) -> list[str]:
        text, shape, dtype = self._place()
        value = self._apart(self._value(shape), text)
        kinds = ["add_", "add_", "sub_", "neg_", "zero_", "fill_", "clamp_", "double", "add alpha", "masked_fill_"]
        kinds += ["lerp_", "half", "in place with numbers"] if dtype.startswith("float") else []
        kind = self.random.choice(kinds)
        if kind in ("neg_", "zero_"):
            return [f"{text}.{kind}()"]
        if kind == "fill_":
            return [f"{text}.fill_({self.random.randint(-2, 2)})"]
        if kind == "clamp_":
            return [f"{text}.clamp_(-4, 4)"]
        if kind == "double":
            return [f"{text}.mul_(2)"]
        if kind == "half":
            return [f"{text}.mul_(0.5)"]
        if kind == "in place with numbers":
            return [f"{text}.mul_(-1).add_({value})"]
        if kind == "masked_fill_":
            mask = self._value(shape, plain=True)
            mask = text if _is_number(mask) else mask
            return [f"{text}.masked_fill_({mask} > 1, {self.random.randint(-2, 2)})"]
        if kind == "lerp_":
            other, _ = self._fitting(shape)
            return [f"{text}.lerp_({self._apart(f'{other}.to({text}.dtype).expand({shape})', text)}, 0.5)"]
        if not dtype.startswith("float"):
            value = f"{value}.to({text}.dtype)" if not _is_number(value) else "1"
        return [f"{text}.add_({value}, alpha=2)" if kind == "add alpha" else f"{text}.{kind}({value})"]

    def _swap(self) -> list[str]:
        one, shape, dtype = self._place(self.random.choice(self.state))
        found = (self._fitting(shape) for _ in range(6))
        two = next((text for text, its_shape in found if text != one and its_shape == shape), None)
        if two is None:
            return self._copy()
        kept = self._new_local(shape, dtype)
        if self._chance(0.3):  # with the other one kept
            first, second = f"{two}.copy_({self._apart(one, two)})", f"{one}.copy_({kept})"
            return [f"{kept} = {two}.expand({shape}).clone()", first, second]
        return [f"{kept} = {one}.clone()", f"{one}.copy_({self._apart(two, one)})", f"{two}.copy_({kept})"]

    def _rotate(self) -> list[str]:
        names = [name for name in self.state if self.shapes[name] == self.shapes[self.state[0]]]
        self.random.shuffle(names)
        if self._chance(0.5):
            lines = [f"{one}.copy_({two})" for one, two in pairwise(names)]
            return [*lines, f"{names[-1]}.copy_({self._apart(self._value(self.shapes[names[-1]]), names[-1])})"]
        kept = self._new_local(self.shapes[names[0]], self.dtypes[names[0]])
        lines = [f"{one}.copy_({two})" for one, two in pairwise(names)]
        return [f"{kept} = {names[0]}.clone()", *lines, f"{names[-1]}.copy_({kept})"]

    def _move_along(self) -> list[str]:
        """A stack of frames: each moves on by one place, and a new one comes."""
        names = [name for name in self.state if self.shapes[name] and self.shapes[name][0] > 1]
        if not names:
            return self._update()
        name = self.random.choice(names)
        row = self.shapes[name][1:]
        form = self.random.choice(["slice", "roll", "backwards", "cat", "flip"])
        if form == "slice":
            return [f"{name}[1:] = {name}[:-1].clone()", f"{name}[0] = {self._apart(self._value(row), name)}"]
        if form == "backwards":
            return [f"{name}[:-1].copy_({name}[1:].clone())", f"{name}[-1] = {self._apart(self._value(row), name)}"]
        if form == "roll":
            return [f"{name}.copy_({name}.roll(-1, 0))", f"{name}[-1].copy_({self._apart(self._value(row), name)})"]
        if form == "flip":
            return [f"{name}.add_({name}.flip(0))"]
        return [f"{name}.copy_(torch.cat([{name}[1:], {name}[:1]]))"]

    def _index(self) -> list[str]:
        text, shape, _ = self._place()
        if not shape or shape[0] < 2 or shape[0] > 64:
            return self._update()
        rows = self.random.randint(1, shape[0])
        places = self.random.sample(range(shape[0]), rows)
        index = f"torch.tensor({places}, device={text}.device)"
        value = self._value((rows, *shape[1:]))
        value = f"torch.as_tensor({value}, device={text}.device)" if _is_number(value) else value
        value = self._apart(f"{value}.to({text}.dtype)", text)
        whole = f"{value}.expand({(rows, *shape[1:])})"
        kind = self.random.choice(
            ["index_put_", "accumulate", "index_copy_", "index_add_", "index_fill_", "setitem", "mask", "scatter_"]
        )
        if kind == "setitem":
            return [f"{text}[{index}] = {value}"]
        if kind == "mask":
            return [f"{text}[{self._value(shape, plain=True)} > 0] = {self.random.randint(-2, 2)}"]
        if kind == "index_fill_":
            return [f"{text}.index_fill_(0, {index}, {self.random.randint(-2, 2)})"]
        if kind in ("index_copy_", "index_add_"):
            return [f"{text}.{kind}(0, {index}, {whole})"]
        if kind == "scatter_":
            wide = f"{index}.view({(rows, *[1] * (len(shape) - 1))}).expand({(rows, *shape[1:])})"
            return [f"{text}.{self.random.choice(['scatter_', 'scatter_add_'])}(0, {wide}, {whole})"]
        return [f"{text}.index_put_(({index},), {value}{', accumulate=True' if kind == 'accumulate' else ''})"]

    def _local(self) -> list[str]:
        """Something of now, to be used later."""
        text, shape, dtype = self._place(self.random.choice([*self.state, *self.arguments]))
        form = self.random.choice(["clone", "plus zero", "double", "sum"])
        if form == "sum":
            return [f"{self._new_local((), dtype)} = {text}.sum().to({text}.dtype)"]
        value = {"clone": f"{text}.clone()", "plus zero": f"{text} + 0", "double": f"{text} * 2"}[form]
        return [f"{self._new_local(shape, dtype)} = {value}"]

    def _edited_clone(self) -> list[str]:
        text, shape, dtype = self._place(self.random.choice(self.state))
        name = self._new_local(shape, dtype)
        edit, found = self._view(name, shape)
        value = self._apart(self._value(found), edit)
        edit = edit if edit.endswith("]") else f"{edit}[...]"
        return [f"{name} = {text}.clone()", f"{edit} = {value}"]

    def _alias(self) -> list[str]:
        text, shape, dtype = self._place(self.random.choice(self.state))
        name = self._new_local(shape, dtype)
        self.aliased[name] = self._names(text).pop()
        return [f"{name} = {text}"]

    def _foreach(self) -> list[str]:
        floats = [name for name in self.state if self.dtypes[name] == "float32"]
        floats = [name for name in floats if self.shapes[name] == self.shapes[floats[0]]]
        if len(floats) < 2:
            return self._copy()
        self.random.shuffle(floats)
        shape = self.shapes[floats[0]]
        values = [f"{self._fitting(shape)[0]}.to(torch.float32).expand({shape})" for _ in floats]
        if self._chance(0.5):
            values = floats[1:] + floats[:1]
        # In eager mode an item may find another one changed by then, or half of it.
        left, right = ", ".join(floats), ", ".join(f"{value}.clone()" for value in values)
        kind = self.random.choice(["add_", "copy_", "mul_", "sub_"])
        return [f"torch._foreach_{kind}([{left}], {'-1.0' if kind == 'mul_' else f'[{right}]'})"]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+", text) is not None


def make_program(seed: int, *, large: bool = False) -> Program:
    """The program of a seed.

    Args:
        seed: Decides everything.
        large: Whether most have tensors of more than one block of a GPU's.
    """
    return _Writer(seed, large=large).write()
