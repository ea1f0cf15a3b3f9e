"""Random programs over several streams: made once, run under any scope, so that results can be compared bit for bit."""

import contextlib
import random

import torch

SIZE = 8
NUM_INPUTS = 4


def make_program(seed, num_steps, num_streams, *, flat=False):
    """A list of steps: (what, stream, operands, result, which, position). Freed names are not used again.

    Where it is ``flat``, no scope is within another, and streams are joined at the end alone.
    """
    rng = random.Random(seed)
    names = [f"x{i}" for i in range(NUM_INPUTS)]
    steps, depth, new = [], 0, 0
    for position in range(num_steps):
        kind = rng.choices(
            ["op", "block", "bare", "in_place", "view", "free", "fork", "join", "meet"],
            [30, 15, 8, 12, 12, 14, 0 if flat else 3, 4 if depth else 0, 0 if flat else 1],
        )[0]
        stream = rng.randrange(num_streams)
        if kind in ("op", "block", "bare", "view"):
            new += 1
            result = f"v{new}"
            steps.append((kind, stream, rng.choices(names, k=2), result, rng.randrange(4), position))
            names.append(result)
        elif kind == "in_place":
            steps.append((kind, stream, rng.choices(names, k=2), None, rng.randrange(2), position))
        elif kind == "free" and len(names) > NUM_INPUTS:
            # Mostly young ones: memory that goes back while its stream is still busy.
            name = rng.choice(names[max(NUM_INPUTS, len(names) - 4) :])
            names.remove(name)
            steps.append((kind, 0, [name], None, 0, position))
        elif kind == "fork" and depth < 2:
            depth += 1
            steps.append((kind, stream, [], None, rng.randrange(2, 4), position))
        elif kind == "join":
            depth -= 1
            steps.append((kind, 0, [], None, 0, position))
        elif kind == "meet":
            steps.append((kind, 0, [], None, 0, position))
    return steps


def compute(call, which, a, b):
    """One of a few functions whose results stay small, and differ for different arguments."""
    if which == 0:
        return call("tanh", call("mm", a, b))
    if which == 1:
        return call("add", a, b, alpha=0.5)
    if which == 2:
        return call("sub", a, b)
    return call("mul", call("sin", a), b)


def run_program(steps, inputs, open_scope, num_streams, before=lambda position: None, size=SIZE):  # noqa: PLR0912
    """Run it; returns the tensors that are left, in order.

    Args:
        steps: By ``make_program``.
        inputs: Tensors; they are changed.
        open_scope: ``open_scope(n)`` gives a scope of n streams.
        num_streams: For the outermost scope.
        before: Called before each step with its position.
        size: Rows and columns of the inputs.
    """
    values = {f"x{i}": value for i, value in enumerate(inputs)}
    plain = lambda name, *args, **kwargs: getattr(torch, name)(*args, **kwargs)  # noqa: E731
    with contextlib.ExitStack() as outermost:
        scopes = [(outermost.enter_context(open_scope(num_streams)), outermost)]
        try:
            for kind, stream, operands, result, which, position in steps:
                before(position)
                s, _ = scopes[-1]
                if kind in ("op", "block", "bare"):
                    a, b = (values[name] for name in operands)
                    if kind == "op":
                        values[result] = compute(
                            lambda name, *args, s=s, i=stream, **kwargs: getattr(s[i], name)(*args, **kwargs),
                            which,
                            a,
                            b,
                        )
                    elif kind == "block":
                        with s[stream]:
                            values[result] = compute(plain, which, a, b)
                    else:
                        values[result] = compute(plain, which, a, b)
                    del a, b
                elif kind == "in_place":
                    a, b = (values[name] for name in operands)
                    with s[stream]:
                        if which or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
                            a.mul_(0.5)
                        else:
                            a.add_(b, alpha=0.25)
                    del a, b
                elif kind == "view":
                    values[result] = values[operands[0]].t() if which % 2 else values[operands[0]].view(size, size)
                elif kind == "free":
                    del values[operands[0]]
                elif kind == "fork":
                    stack = contextlib.ExitStack()
                    stack.enter_context(s[stream])
                    scopes.append((stack.enter_context(open_scope(which)), stack))
                elif kind == "join":
                    _, stack = scopes.pop()
                    stack.close()
                else:
                    s.join()
        finally:
            while len(scopes) > 1:
                scopes.pop()[1].close()
    return [values[name] * 1.0 for name in sorted(values)]  # on the caller's stream
