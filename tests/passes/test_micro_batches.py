"""A step split along its batch: the same numbers, piece by piece; what looks across the batch is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import millstream as ms
from millstream._torch.distributed.fake_group import among_fake_processes
from millstream._torch.workarounds import without
from millstream.api import executables
from millstream.errors import ArgumentError, CaptureError, FallbackWarning
from millstream.lower.inductor.randoms import random_decompositions
from millstream.passes.micro_batches import split_batch
from millstream.placement import search
from tests import networks

DOUBLE = torch.float64
B, T, D = 8, 3, 4


def gradients(loss, weights):
    return [loss, *torch.autograd.grad(loss, weights)]


def attention(w, x):
    q, k, v = (x @ w.repeat(1, 3)).view(B, T, 3, 2, 2).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(B, T, D)


def convolved(w, x):
    image = x.reshape(B, 1, T, D).repeat(1, 2, 2, 1)
    y = F.group_norm(F.conv2d(image, w.view(2, 2, 2, 2)), 2)
    return F.max_pool2d(F.relu(y), 2).flatten(1) + F.adaptive_avg_pool2d(y, 1).flatten(1)[:, :1]


def parts(w, x):
    left, right = x.chunk(2, -1)
    rows = torch.stack([left, right, left * right], 0).sum(0)
    turned = torch.cat([rows.transpose(1, 2), w[:2].expand(B, 2, D)[:, :, :T]], 1).squeeze(1)
    return torch.bmm(turned, x) + torch.bmm(x, w.expand(B, D, D))[:, :1].unsqueeze(2).select(2, 0)


def embedded(w, x):
    return F.embedding((x[..., 0] > 0).long(), w)


LAYERS = {
    "products": lambda w, x: F.gelu(F.linear(x, w, w[0])) + F.linear(x.flatten(1)[:, :D], w, w[1])[:, None],
    "norms": lambda w, x: (x @ w - x.mean(-1, keepdim=True)) * torch.rsqrt((x @ w).var(-1, keepdim=True) + 1) * w[0],
    "attention": attention,
    "convolutions": convolved,
    "parts": parts,
    "embedding": embedded,
    "softmax": lambda w, x: F.log_softmax(x @ w, -1) + x.amax(-1, keepdim=True) + x.var(1, keepdim=True),
    "half": lambda w, x: (x.bfloat16() @ w.bfloat16()).double(),
}
LOSSES = {
    "mean": lambda out, y: F.mse_loss(out.flatten(1)[:, 0], y.double()),
    "sum": lambda out, y: (out.flatten(1).sum(1) * y).sum(),
    "ignored": lambda out, y: F.cross_entropy(out.flatten(1)[:, :4], torch.where(y < 1, -100, y)),
}


def divide(function, *inputs, pieces=4):
    """The graph of a function of a weight and a batch, and the same in pieces."""
    table = {**select_decomp_table(), **random_decompositions()}
    gm = make_fx(function, decomposition_table=table, tracing_mode="fake")(*inputs)
    return gm, split_batch(gm, pieces, {0})


def data():
    torch.manual_seed(0)
    w = torch.randn(D, D, dtype=DOUBLE)
    return w, torch.randn(B, T, D, dtype=DOUBLE), torch.randint(0, 4, (B,))


@pytest.mark.parametrize(
    ("layer", "loss"), [*(("products", loss) for loss in LOSSES), *((layer, "ignored") for layer in LAYERS)]
)
def test_pieces_give_what_the_batch_gives(layer, loss):
    def step(w, x, y):
        w = w.detach().requires_grad_()
        out = LAYERS[layer](w, x)
        total = LOSSES[loss](out, y)
        found = gradients(total, [w])
        norm = found[1].norm()
        return [*found, w - 0.1 * found[1] / norm, out]

    for pieces in (2, 4):
        gm, split = divide(step, *data(), pieces=pieces)
        tolerance = 1e-2 if layer == "half" else 1e-12
        for one, other in zip(split(*data()), gm(*data()), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        sizes = {tuple(node.meta["val"].shape) for node in split.graph.nodes if node.name.startswith("mul")}
        assert not any(size[:1] == (B,) for size in sizes), "nothing is computed for all rows at once"


def test_gradients_are_added_in_single_precision_at_least_and_in_order():
    def step(w, x):
        return (x.flatten(0, 1).bfloat16().t() @ x.flatten(0, 1).bfloat16()) + w.bfloat16()

    _, split = divide(step, *data()[:2], pieces=4)
    w, x = data()[:2]
    rows = x.flatten(0, 1).bfloat16().chunk(4)
    total = (rows[0].t() @ rows[0]).float()
    for each in rows[1:]:
        total = total + (each.t() @ each).float()
    assert torch.equal(split(w, x), total.bfloat16() + w.bfloat16())


def test_a_piece_is_done_with_before_the_next_one_begins():
    def step(w, x, y):
        w = w.detach().requires_grad_()
        return gradients(LOSSES["mean"](torch.tanh(x @ w) @ w, y), [w])

    _, split = divide(step, *data(), pieces=2)
    kinds = [str(node.target).split(".")[1] for node in split.graph.nodes if node.op == "call_function"]
    assert kinds.count("tanh") == 2
    first, second = (at for at, kind in enumerate(kinds) if kind == "tanh")
    assert kinds[first:second].count("mm") >= 4, "products of forward and backward pass"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda w, x: (x - x.mean(0)) @ w, None),  # no parameter is a part of that mean
        (lambda w, x: F.batch_norm(x @ w, None, None, training=True), "looks at all rows at once"),
        (lambda w, x: (x @ w) / (x @ w).norm(), "reads what was computed from all rows"),
        (lambda w, x: F.softmax(x @ w, 0), "looks at all rows at once"),
        (lambda w, x: (x @ w).cumsum(0), "is not known to treat its rows one by one"),
        (lambda w, x: (x @ w)[0], "takes some of the rows"),
        (lambda w, x: x.flatten(1) @ x.flatten(1).t(), "multiplies rows by others"),
        (lambda w, x: x.transpose(0, 1).reshape(-1) * 2, "mixes rows"),
        (lambda w, x: torch.cat([x, x @ w], 0) * 2, "several batches in a row"),
        (lambda w, x: x[:, 0, 0] + x[:, 0, :1], "combines rows with others"),
        (lambda w, x: x.gather(0, (x > 0).long()), "takes rows from others"),
        (lambda w, x: F.embedding((w > 0).long(), x.flatten(1)), "looks rows up among rows"),
        (lambda w, x: F.dropout(x @ w, 0.5), None),
    ],
)
def test_what_looks_across_the_batch_is_refused(function, reason):
    x = data()[1]
    if reason is None:
        gm, split = divide(function, data()[0], x)
        results = []
        for each in (gm, split):
            torch.manual_seed(1)
            results.append(each(data()[0], x))
        torch.testing.assert_close(*results)
        return
    with pytest.raises(CaptureError, match=f"cannot be divided: .*{reason}"):
        divide(function, data()[0], x)


def test_batches_that_cannot_be_divided_are_refused():
    w, x, _ = data()
    with pytest.raises(CaptureError, match="A batch of 8 cannot be divided into 3 pieces"):
        divide(lambda w, x: x @ w, w, x, pieces=3)
    with pytest.raises(CaptureError, match="A batch of 8 cannot be divided into 8 pieces of the same size, 2 or more"):
        divide(lambda w, x: x @ w, w, x, pieces=8)
    with pytest.raises(CaptureError, match=r"no common first size to divide \(4, 8\)"):
        divide(lambda w, x, y: x @ w + y.sum(), w, x, x[:4])


def test_the_pass_can_be_left_out():
    w, x, _ = data()
    with without({split_batch.name}):
        gm, split = divide(lambda w, x: x @ w, w, x)
    assert split is gm


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _quickly(monkeypatch):
    monkeypatch.setattr(search, "MOST_KERNELS", 1_000)
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # written and compiled in half the time
        yield


def train(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @ms.step(engine="serial", **settings)
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    torch.manual_seed(1)
    results = [step(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(4)]
    return step, [*results, *model.parameters()]


def small(norm=nn.LayerNorm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), norm(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.usefixtures("_quickly")
def test_steps_train_as_with_the_whole_batch():
    alone, expected = train(small(), strict=True)
    step, found = train(small(), strict=True, micro_batches=2)
    networks.assert_close(found, expected, 1e-3)

    def count(step):
        return len(executables(step)[0].plan.graph.kernels)

    assert count(step) > count(alone)
    _, placed = train(small(), strict=True, micro_batches=2, devices=["cpu:0", "cpu:1"])
    networks.assert_close(placed, found, 0)


@pytest.mark.usefixtures("_quickly")
def test_batch_norm_forbids_it():
    with pytest.raises(CaptureError, match=r"var_mean.* looks at all rows at once .*Leave out micro_batches="):
        train(small(nn.BatchNorm1d), strict=True, micro_batches=2)
    with pytest.warns(FallbackWarning, match="looks at all rows at once"):
        _, found = train(small(nn.BatchNorm1d), micro_batches=2)
    assert all(each.isfinite().all() for each in torch.utils._pytree.tree_leaves(found))


def test_steps_that_exchange_gradients_are_refused():
    with among_fake_processes(2):
        dist.init_process_group("gloo")
        model = DistributedDataParallel(small())
        with pytest.raises(CaptureError, match="exchanges gradients with other processes is not divided"):
            train(model, strict=True, micro_batches=2)
        dist.destroy_process_group()


@pytest.mark.parametrize("number", [0, True, "auto", 1.5])
def test_what_is_no_number_of_pieces_is_refused(number):
    with pytest.raises(ArgumentError, match="is no number of pieces"):
        ms.step(lambda x: x, micro_batches=number)
    with pytest.raises(ArgumentError, match="leave out dynamic=True"):
        ms.step(lambda x: x, micro_batches=2, dynamic=True)
