"""State that is copied and written by one graph: each copy, result and update is of what was there before.

All forms are in one graph, each with three tensors of its own, and once more with those in the opposite order: inputs
are written in the order in which they are met.
"""

from functools import partial

import pytest
import torch

import millstream as ms

SIZE = 6
ROWS = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))


def remember(a, b, c, x):
    a.copy_(b)
    b.add_(x)


def remember_data(a, b, c, x):
    a.data.copy_(b.data)
    b.data.add_(x)


def remember_all_rows(a, b, c, x):
    a[:] = b[:]
    b.mul_(2).add_(x)


def remember_some_rows(a, b, c, x):
    a[1:3] = b[2:4]
    c.copy_(a)
    b.copy_(x)


def remember_one_times(a, b, c, x):
    c.copy_(b * torch.ones(()))
    b.add_(a)
    a.copy_(c.t())


def remember_edited(a, b, c, x):
    b[1] = x[1]
    a.copy_(b)
    b.mul_(2)


def swap(a, b, c, x):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    a.add_(x)


def swap_in_lists(a, b, c, x):
    torch._foreach_copy_([a, b], [b.clone(), a.clone()])


def swap_what_a_list_gave(a, b, c, x):
    first, second = torch._foreach_add([a, b], 1)
    a.copy_(second)
    b.copy_(first)


def rotate(a, b, c, x):
    t = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(t.t())


def keep_history(a, b, c, x):
    c.copy_(b)
    b.copy_(a)
    a.copy_(x)


def average_then_copy(a, b, c, x):
    c.copy_(a)
    a.lerp_(b, 0.25)
    b.copy_(a)


def shift(a, b, c, x):
    a[1:] = a[:-1].clone()
    a[0] = x[0]
    b[:, :-1] = b.flip(1)[:, :-1]


def roll(a, b, c, x):
    b.copy_(a)
    a.copy_(a.roll(1, 0))
    a[-1] = x[0]


def move_rows(a, b, c, x):
    a[4:] = a[1:3].clone()
    a[:2] = b[4:]
    b[4:] = x[:2]


def mix_in_place(a, b, c, x):
    a[:, 1:3] = a.flip(0)[:, 1:3]
    b[:-1].copy_(b.flip(0)[:-1] + 1)
    c.copy_(c.t() * 2)


def flip_what_was_put(a, b, c, x):
    a.index_put_((ROWS,), a * 2)
    a.add_(a.flip(0))
    b[ROWS] = b.flip(0)
    c[1::2].add_(x[:3])
    c.index_add_(0, ROWS, c.clone())


def put_beside(a, b, c, x):
    edited = a.clone()
    edited[ROWS] = x
    b.copy_(edited)
    a.copy_(a.t().clone())
    return edited


def use_before_and_after(a, b, c, x):
    total = a.sum() + b.sum()
    a.copy_(b)
    b.sub_(total)
    c.copy_(a + b)


def read_bits(a, b, c, x):
    c.copy_(a.view(torch.int16)[:, ::2])
    a[:, 2:5] = x[:, 2:5]


def become_bits(a, b, c, x):
    b.copy_(b.view(torch.int16)[:, 1::2].clone())


def return_old(a, b, c, x):
    old = a.clone()
    a.add_(x)
    return old, a * torch.ones(())


def return_edited(a, b, c, x):
    edited = a.clone()
    edited[0] = x[0]
    a.zero_()
    b[1:] = x[1:]
    return edited, b.clone(), torch.slice_scatter(a, x[:2], 0, 1, 3)


def store_edited(a, b, c, x):
    edited = a.clone()
    edited[1:] = x[1:]
    a.copy_(edited)
    return edited


def write_twice(a, b, c, x):
    b.copy_(a)
    a[ROWS[:3]] = x[:3]
    a[b > 0] = 0
    return a.clone()


FORMS = [
    remember,
    remember_data,
    remember_all_rows,
    remember_some_rows,
    remember_one_times,
    remember_edited,
    swap,
    swap_in_lists,
    swap_what_a_list_gave,
    rotate,
    keep_history,
    average_then_copy,
    shift,
    roll,
    move_rows,
    mix_in_place,
    flip_what_was_put,
    put_beside,
    use_before_and_after,
    read_bits,
    become_bits,
    return_old,
    return_edited,
    store_edited,
    write_twice,
]


def run(cases, wrap, *, as_arguments):
    """What each form's tensors and results are in the end, by its name and which tensor is met first."""
    generator = torch.Generator().manual_seed(0)
    state = [[torch.randn(SIZE, SIZE, generator=generator) for _ in range(3)] for _ in cases]

    def update(x, state):
        for piece in (piece for pieces in state for piece in pieces):
            piece.sum()  # met in this order
        return [form(*pieces[::order], x) for (form, order), pieces in zip(cases, state, strict=True)]

    call = wrap(update) if as_arguments else wrap(lambda x: update(x, state))
    inputs = torch.randn(3, SIZE, SIZE, generator=generator)
    results = [call(x, state) if as_arguments else call(x) for x in inputs]
    return {
        (form.__name__, order): (pieces, [each[number] for each in results])
        for number, ((form, order), pieces) in enumerate(zip(cases, state, strict=True))
    }


def assert_right(forms, way, orders=(1, -1), **settings):
    cases = [(form, order) for form in forms for order in orders]
    as_arguments = way == "compile"
    expected = run(cases, lambda update: update, as_arguments=as_arguments)
    wrap = partial(getattr(ms, way), strict=True, engine="serial", **settings)
    wrong = []
    for name, found in run(cases, wrap, as_arguments=as_arguments).items():
        try:
            torch.testing.assert_close(found, expected[name])
        except AssertionError:
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("way", ["step", "compile"])
def test_every_form_is_as_in_eager(way):
    assert_right(FORMS, way)
