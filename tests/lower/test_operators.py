"""What is known of library kernels: their work, what tells their costs apart, and those that only check."""

import pytest
import torch

import millstream as ms
from millstream.api import executables
from millstream.cost import kernel_key
from millstream.graph import KernelKind
from millstream.lower import operators


@pytest.fixture(autouse=True)
def _fresh():
    precision = torch.get_float32_matmul_precision()
    with torch.no_grad():
        yield
    torch.set_float32_matmul_precision(precision)


def program_of(function, *inputs):
    torch._dynamo.reset()
    compiled = ms.compile(function, engine="serial", strict=True)
    compiled(*inputs)
    return executables(compiled)[0].lowered.program


def key_of(dtype=torch.float32):
    program = program_of(torch.matmul, torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype))
    (kernel,) = program.graph.kernels
    return kernel_key(program.graph, kernel, program.code(kernel.id))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_counts_with_and_without_what_is_added(bias):
    graph = program_of(torch.nn.Linear(16, 24, bias=bias), torch.ones(32, 16)).graph
    (flops,) = [kernel.flops for kernel in graph.kernels if kernel.kind is KernelKind.GEMM]
    assert flops == 2 * 32 * 16 * 24


def test_products_of_several_matrices_count():
    batch = torch.ones(4, 8, 8)
    graph = program_of(lambda a, b, c: torch.baddbmm(a, b, c, alpha=2), batch, batch, batch).graph
    assert [kernel.flops for kernel in graph.kernels if kernel.kind is KernelKind.GEMM] == [2 * 4 * 8 * 8 * 8]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_convolutions_count_the_same_where_their_weights_are_frozen():
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3, padding=1, groups=2), torch.nn.ReLU()).eval()
    found = []
    for freeze in (False, True):
        torch._dynamo.reset()
        compiled = ms.compile(model, engine="serial", strict=True, freeze=freeze)
        compiled(torch.ones(2, 16, 8, 8))
        kernels = executables(compiled)[0].lowered.program.graph.kernels
        found.append([kernel.flops for kernel in kernels if kernel.kind is KernelKind.CONV])
        assert not {name for kernel in kernels for name in kernel.ops} & {"fn", "keep_strides"}
    assert found[0] == found[1] == [2 * 2 * 32 * 8 * 8 * 8 * 9]


def test_the_type_tells_costs_apart():
    assert len({key_of(dtype) for dtype in (torch.float16, torch.bfloat16)}) == 2


def test_the_precision_of_products_tells_costs_apart():
    keys = []
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        keys.append(key_of())
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_operators_that_only_check_have_no_result(function):
    x = 2 * torch.eye(4)
    assert torch.equal(ms.compile(function, engine="serial", strict=True)(x), function(x))


def test_attention_that_drops_nothing_draws_nothing():
    """So it need not keep the order of what draws: on a GPU it may run beside it, or on another one."""
    query = torch.randn(1, 2, 8, 16)
    program = program_of(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), query)
    assert not any(buffer.id.startswith("rng:") for buffer in program.graph.buffers)
    state = torch.get_rng_state()
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, 0.0)
    assert torch.equal(torch.get_rng_state(), state)


def attention_node(name, *rest, **named):
    query = torch.fx.Graph().placeholder("query")
    query.meta["val"] = torch.empty(1, device="meta")
    return getattr(torch.ops.aten, name).default, (query, query, query, *rest), named


@pytest.mark.parametrize(
    ("node", "draws"),
    [
        (attention_node("_scaled_dot_product_flash_attention"), False),
        (attention_node("_scaled_dot_product_flash_attention", 0.1), True),
        (attention_node("_scaled_dot_product_efficient_attention", None, False), False),
        (attention_node("_scaled_dot_product_efficient_attention", None, False, dropout_p=0.5), True),
        (attention_node("_scaled_dot_product_attention_math"), True),
        (attention_node("bernoulli"), True),
        (attention_node("relu"), False),
    ],
)
def test_operators_that_drop_say_whether_they_draw(node, draws):
    assert operators.draws_random_numbers(*node) is draws


@pytest.mark.parametrize("moves", [True, False])
def test_cudnn_is_tried(monkeypatch, moves):
    node = attention_node("_scaled_dot_product_cudnn_attention", None, False)
    monkeypatch.setattr(operators, "_cudnn_draws", lambda device: moves)
    assert operators.draws_random_numbers(*node) is moves
    assert operators.draws_random_numbers(*attention_node("_scaled_dot_product_cudnn_attention", None, False, 0.1))


def test_cudnn_that_cannot_be_tried_counts_as_drawing():
    assert operators._cudnn_draws.__wrapped__(torch.device("cuda", 99))
