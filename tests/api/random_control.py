"""Random programs with control flow, each also as plain Python: what PyTorch's operators are to compute."""

import random

import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

WRITES = torch.__version__ >= (2, 13)
"""Whether PyTorch lets functions of ``cond`` and ``while_loop`` write what they use. Tried on 2.11 and 2.13."""


class Operators:
    """PyTorch's own."""

    cond = staticmethod(torch.cond)
    while_loop = staticmethod(while_loop)
    scan = staticmethod(scan)
    map = staticmethod(map_slices)

    @staticmethod
    def associative_scan(combine, x, **options):
        return associative_scan(combine, x, dim=0, combine_mode="generic", **options)


class Plain:
    """The same, in plain Python."""

    @staticmethod
    def cond(decides, yes, no, operands):
        return yes(*operands) if decides else no(*operands)

    @staticmethod
    def while_loop(goes_on, turn, carried):
        while goes_on(*carried):
            carried = turn(*carried)
        return carried

    @staticmethod
    def scan(turn, carry, x, *, reverse=False):
        made = []
        for part in reversed(x.unbind(0)) if reverse else x.unbind(0):
            carry, each = turn(carry, part)
            made.append(each)
        return carry, torch.stack(made[::-1] if reverse else made)

    @staticmethod
    def map(turn, x, *others):
        return torch.stack([turn(part, *others) for part in x.unbind(0)])

    @staticmethod
    def associative_scan(combine, x, *, reverse=False):
        parts = [each.unbind(0) for each in x]
        parts = (
            list(zip(*(reversed(each) for each in parts), strict=True)) if reverse else list(zip(*parts, strict=True))
        )
        made = parts[:1]
        for part in parts[1:]:
            made.append(combine(made[-1], part))
        return [torch.stack(each) for each in zip(*(made[::-1] if reverse else made), strict=True)]


class Program:
    """Operators, branches and loops nested in each other, of tensors of 3 × 4 numbers.

    Args:
        seed: Of the program.
        flow: Whose branches and loops it has: ``Operators`` or ``Plain``.
        has_gradients: Whether gradients of what it is given are asked for. PyTorch has none of loops, of scans in other
            functions, and where tensors are written.
        device: Of all tensors.

    Attributes:
        buffers: What its functions may read and write beside their arguments; not where there are gradients.
    """

    def __init__(self, seed, flow, *, has_gradients, device="cpu"):
        self.rng = random.Random(seed)
        self.flow, self.has_gradients, self.device = flow, has_gradients, device
        self.buffers = []
        self.draws = not has_gradients and self.rng.random() < 0.5
        self.depth = self.rng.choice([1, 2, 2] if has_gradients else [1, 2, 2, 3])
        self.run = self.make(self.depth, ())

    def make(self, depth, within):
        """A function of two tensors that gives a new one; ``within`` are the kinds of functions that it is part of."""
        parts = [self.operator(within) for _ in range(self.rng.randint(1, 2))]
        for _ in range(self.rng.randint(1, 2) if not within else self.rng.randint(0, 1) if depth else 0):
            kind = self.rng.choice(self.kinds(within))
            parts.insert(self.rng.randint(0, len(parts)), getattr(self, kind)(depth - 1, (*within, kind)))

        def run(a, b):
            for part in parts:
                a, b = part(a, b), a
            return a + 0.5 * b

        return run

    def kinds(self, within):
        if self.has_gradients:
            return ["branch", "guarded", "map"] + ["scan", "associative"] * (not within)
        return ["branch", "guarded", "map", "scan", "loop", "associative"]

    def operator(self, within):
        scale = self.rng.uniform(0.5, 2)
        kinds = [
            lambda a, b: torch.tanh(a * scale) + b,
            lambda a, b: torch.sin(a) * b,
            lambda a, b: a @ (a.t() @ b) * 0.1,
            lambda a, b: a.softmax(1) - scale * b.relu(),
            lambda a, b: (a - a.mean(0)) * scale,
            lambda a, b: a * torch.tensor([1.0, scale, -1.0, 0.5], dtype=a.dtype, device=a.device) + b,
            self.local_writes(scale),
            lambda a, b: b + (a.t() * scale).contiguous().t(),
            lambda a, b: torch.stack([a, b], 1).sin().transpose(0, 1).contiguous()[0] + b,
        ]
        if self.draws:
            kinds += [lambda a, b: a + torch.rand_like(b), lambda a, b: torch.dropout(a, 0.5, True) - b]
        if WRITES and not self.has_gradients and "scan" not in within and "map" not in within:
            kinds += [self.buffered(scale)] * 2
        return self.rng.choice(kinds)

    def local_writes(self, scale):
        row = self.rng.randrange(3)

        def run(a, b):
            c = a * scale
            c[row] = b[row] + 1
            c[:, 1:].mul_(0.5)
            c[0, 0] = 2.0
            return c

        return run

    def buffered(self, scale):
        """Reads and writes a tensor of the program's."""
        if not self.buffers or self.rng.random() < 0.5:
            self.buffers.append(torch.full((3, 4), 0.1 * len(self.buffers), dtype=torch.float64, device=self.device))
        buffer = self.rng.choice(self.buffers)

        def run(a, b):
            read = buffer * scale
            buffer.mul_(0.5).add_(torch.tanh(a))
            buffer[0].sub_(0.1)
            return read - b

        return run

    def branch(self, depth, within):
        yes, no, limit = self.make(depth, within), self.make(depth, within), self.rng.uniform(-1, 1)
        return lambda a, b: self.flow.cond(a.mean() > limit, yes, no, (a, b))

    def guarded(self, depth, within):
        """A branch of which the way that is not taken would give NaN and infinities, and such gradients."""
        inner, shift = self.make(depth, within), self.rng.choice([-1e-3, 1e-3])

        def run(a, b):
            c = a - a.amin() + shift  # positive or not
            return self.flow.cond(
                c.amin() > 0,
                lambda c, b: inner(c.log() * 0.1 + c.sqrt(), b),
                lambda c, b: inner(-(0.9 * shift - c.amin()).log() * 0.1 + c, b),
                (c, b),
            )

        return run

    def loop(self, depth, within):
        turn, most, limit = self.make(depth, within), self.rng.randint(0, 4), self.rng.uniform(1, 8)

        def run(a, b):
            start = torch.zeros((), dtype=torch.int64, device=a.device)
            return self.flow.while_loop(
                lambda i, a: (i < most) & (a.abs().max() < limit), lambda i, a: (i + 1, turn(a, b)), (start, a)
            )[1]

        return run

    def scan(self, depth, within):
        turn, length, is_reverse = self.make(depth, within), self.rng.randint(1, 4), self.rng.random() < 0.3
        is_across = self.rng.random() < 0.5  # whether slices are copied from what lies across them

        def run(a, b):
            def combine(carry, x):
                new = torch.tanh(turn(carry, x))
                return new, new * 2

            slices = torch.stack([b * (i + 1) for i in range(length)], 1 if is_across else 0)
            slices = slices.cos().transpose(0, 1).contiguous() if is_across else slices
            last, rows = self.flow.scan(combine, a, slices, reverse=is_reverse)
            return last + rows.sum(0)

        return run

    def map(self, depth, within):
        turn, length = self.make(depth, within), self.rng.randint(1, 3)
        return lambda a, b: self.flow.map(lambda x, b: turn(x, b), torch.stack([a] * length), b).sum(0)

    def associative(self, depth, within):
        """A linear recurrence."""
        length, is_reverse = self.rng.randint(1, 6), self.rng.random() < 0.3

        def run(a, b):
            gates = torch.stack([torch.sigmoid(a + i) for i in range(length)])
            values = torch.stack([b * (i + 1) for i in range(length)])
            _, rows = self.flow.associative_scan(
                lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]),
                (gates, values),
                reverse=is_reverse,
            )
            return rows[-1] + rows.mean(0)

        return run
