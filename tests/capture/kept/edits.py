"""A small project, and edits of it between two processes: what each leaves on disk must not serve the other one."""

# ruff: noqa: E501, E702, ERA001, RUF100

HELPER = """
import torch
SCALE = 2.0
TABLE = {"a": 1.0, "b": [3.0, 4.0]}
class Config:
    rate = 0.5
    def __init__(self): self.width = 3; self.name = "x"
config = Config()
def act(x, k=1.0): return torch.tanh(x) * k * SCALE
class Base(torch.nn.Module):
    def twist(self, x): return x + 1
class Net(Base):
    def __init__(self):
        super().__init__(); self.l = torch.nn.Linear(4, 4); self.gain = 1.5; self.mode = "a"
    def forward(self, x):
        y = self.twist(self.l(x)) * self.gain
        return act(y) if self.mode == "a" else y
from dataclasses import dataclass
@dataclass
class Opts:
    decay: float = 0.25
    flag: bool = True
opts = Opts()
pick = lambda x: x * 3.0
import functools
kinds, FACTOR = {}, 2
class Recipe:
    def __init__(self, *sizes): self.sizes = sizes
class Backend:
    def apply(self, x, sizes, last): return x.reshape(sizes) * last["factor"]
@functools.lru_cache(256)
def recipe_of(pattern, *, dims): return Recipe(*map(int, pattern.split()), -1)
@functools.cache
def sizes_of(recipe, shape): return [*recipe.sizes], {"factor": FACTOR}
def arrange(x, pattern):
    backend = kinds.get(type(x))
    if backend is None: backend = kinds[type(x)] = Backend()
    return backend.apply(x, *sizes_of(recipe_of(pattern, dims=x.ndim), x.shape))
"""

MAIN = """
import json, os, sys, warnings
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import helper
from helper import *
settings = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")))
from millstream.capture import Step
from millstream.capture.kept.traces import Shelf

outcomes = []
looks = Shelf.take


def take(self, *given):
    traced = looks(self, *given)
    outcomes.append(traced is not None)
    return traced


Shelf.take = take
#BEFORE
def make():
    torch.manual_seed(0)
    net = helper.Net(); opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2)
    state = {"n": 0}
    #INNER
    def step(x):
        opt.zero_grad()
        y = arrange(net(x), "1 2")[0, 0] * settings["factor"] + pick(x).mean() + float(os.environ.get("BIAS", "0"))
        loss = y.square().mean() * TABLE["a"] + TABLE["b"][1] * config.rate + config.width
        if opts.flag: loss = loss * opts.decay
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step(); sched.step()
        state["n"] += 1
        return loss
    #AFTER
    return step, net
def build(gm, inputs, static): return lambda values: list(gm(*values))
a, n1 = make(); b, n2 = make(); s = Step(a, build=build)
bad = 0
for k in range(5):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore"); r = s(x.clone())
    e = b(x.clone())
    if not torch.allclose(r, e, rtol=1e-6): bad += 1
if not all(torch.allclose(p, q) for p, q in zip(n1.parameters(), n2.parameters())): bad += 1
print(json.dumps(dict(bad=bad, taken=outcomes, refused=s.fallbacks, why=s.history)))
"""

FILES = {"helper.py": HELPER, "main.py": MAIN, "settings.json": '{"factor": 1.25}'}
H, M = "helper.py", "main.py"

EDITS: dict[str, tuple[str, str, str]] = {
    "constant": (H, "SCALE = 2.0", "SCALE = 3.0"),
    "constant sign of zero": (H, "SCALE = 2.0", "SCALE = -0.0"),
    "constant int": (H, "SCALE = 2.0", "SCALE = 2"),
    "dict value": (H, '"a": 1.0', '"a": 7.0'),
    "nested list": (H, "[3.0, 4.0]", "[3.0, 5.0]"),
    "class attribute": (H, "rate = 0.5", "rate = 0.75"),
    "instance attribute": (H, "self.width = 3", "self.width = 4"),
    "class to instance": (H, "self.width = 3;", "self.width = 3; self.rate = 9.0;"),
    "default": (H, "k=1.0", "k=1.5"),
    "function body": (H, "torch.tanh(x) * k", "torch.sin(x) * k"),
    "method body": (H, "return x + 1", "return x + 2"),
    "override": (H, "class Net(Base):", "class Net(Base):\n    def twist(self, x): return x - 1"),
    "gain": (H, "self.gain = 1.5", "self.gain = 2.5"),
    "mode": (H, 'self.mode = "a"', 'self.mode = "b"'),
    "dataclass default": (H, "decay: float = 0.25", "decay: float = 0.5"),
    "flag": (H, "flag: bool = True", "flag: bool = False"),
    "lambda": (H, "x * 3.0", "x * 4.0"),
    "config file": ("settings.json", "1.25", "2.5"),
    "argument of a cached function": (M, '"1 2"', '"2 1"'),
    "cached function": (H, "Recipe(*map(int, pattern.split()), -1)", "Recipe(*map(int, pattern.split()[::-1]), -1)"),
    "what a cached function reads": (H, "kinds, FACTOR = {}, 2", "kinds, FACTOR = {}, 3"),
    "what a class leads to": (H, "x.reshape(sizes) * last", "x.reshape(sizes) + last"),
    "no cache": (H, "@functools.cache\n", ""),
    "step body": (M, "loss.backward()", "(loss * 2).backward()"),
    "lr": (M, "lr=0.01", "lr=0.1"),
    "optimizer": (M, "torch.optim.AdamW", "torch.optim.Adam"),
    "weight decay": (M, "lr=0.01)", "lr=0.01, weight_decay=0.3)"),
    "amsgrad": (M, "lr=0.01)", "lr=0.01, amsgrad=True)"),
    "maximize": (M, "lr=0.01)", "lr=0.01, maximize=True)"),
    "two groups": (
        M,
        "torch.optim.AdamW(net.parameters(), lr=0.01)",
        "torch.optim.AdamW([dict(params=[net.l.weight]), dict(params=[net.l.bias], lr=0.5)], lr=0.01)",
    ),
    "momentum sgd": (
        M,
        "torch.optim.AdamW(net.parameters(), lr=0.01)",
        "torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)",
    ),
    "clip norm": (M, "net.parameters(), 1.0)", "net.parameters(), 0.1)"),
    "scheduler": (M, "StepLR(opt, 2)", "ExponentialLR(opt, 0.5)"),
    "scheduler gamma": (M, "StepLR(opt, 2)", "StepLR(opt, 2, 0.5)"),
    "patched F": (M, "#BEFORE", "helper.torch.tanh = torch.sigmoid"),
    "patched act": (M, "#BEFORE", "helper.act = lambda x, k=1.0: x"),
    "patched Linear": (
        M,
        "#BEFORE",
        "torch.nn.Linear.forward = lambda self, x: torch.nn.functional.linear(x, self.weight)",
    ),
    "patched functional": (
        M,
        "#BEFORE",
        "_l = torch.nn.functional.linear\ntorch.nn.functional.linear = lambda x, w, b=None: _l(x, w, b) * 2",
    ),
    "patched instance": (M, "#INNER", "net.forward = lambda x: net.l(x) * 5"),
    "frozen": (M, "#INNER", "net.l.bias.requires_grad_(False)"),
    "double": (M, "#INNER", "net.l.weight.data = net.l.weight.data.t().contiguous().t()"),
    "no bias": (M, "#INNER", "net.l.bias = None"),
    "hook": (M, "#INNER", "net.l.register_forward_hook(lambda m, i, o: o * 3)"),
    "tensor hook": (M, "#INNER", "net.l.weight.register_hook(lambda g: g * 3)"),
    "optimizer hook": (
        M,
        "#INNER",
        "opt.register_step_pre_hook(lambda o, a, k: [net.l.weight.grad.mul_(3)][1:] or None)",
    ),
    "global hook": (M, "#BEFORE", "torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)"),
    "default dtype": (M, "#BEFORE", "torch.set_default_dtype(torch.float64)"),
    "grad attribute": (M, "#INNER", "net.l.weight.grad = torch.ones(4, 4)"),
    "state n": (M, '{"n": 0}', '{"n": 5}'),
    "replaced module": (M, "#INNER", "net.l = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())"),
    "eval": (M, "#INNER", "net.eval()"),
    "wrapped layer": (M, "#INNER", "net.l = torch.nn.utils.parametrizations.weight_norm(net.l)"),
    "class swapped": (
        M,
        "#INNER",
        "class N2(helper.Net):\n        def forward(self, x): return super().forward(x) * 2\n    net.__class__ = N2",
    ),
    "getattr": (
        H,
        "class Config:",
        "class Config:\n    def __getattribute__(self, n): return 11.0 if n == 'width' else object.__getattribute__(self, n)",
    ),
    "property": (
        H,
        "    def __init__(self): self.width = 3; ",
        "    width = property(lambda self: 13.0)\n    def __init__(self): ",
    ),
    "list subclass": (H, '"b": [3.0, 4.0]', '"b": type("L", (list,), {"__getitem__": lambda s, i: 17.0})([3.0, 4.0])'),
    "dict subclass": (
        H,
        "opts = Opts()",
        'opts = Opts()\nclass D(dict):\n    def __getitem__(self, k): return 2.0 if k == "a" else dict.__getitem__(self, k)\nTABLE = D(TABLE)',
    ),
    "metaclass": (
        H,
        "class Config:",
        "class Meta(type):\n    rate = property(lambda c: 0.9)\nclass Config(metaclass=Meta):",
    ),
    "tied": (M, "#INNER", "net.l.bias = torch.nn.Parameter(net.l.weight.data[0])"),
    "autocast": (M, "y = arrange(", "with torch.autocast('cpu', torch.bfloat16): y = arrange("),
    "float32 precision": (M, "#BEFORE", "torch.set_float32_matmul_precision('medium')"),
    "pickle global": (
        H,
        "pick = lambda x: x * 3.0",
        "import functools\npick = functools.partial(lambda x, y: x * y, y=6.0)",
    ),
    "aten impl": (
        M,
        "#BEFORE",
        "_lib = torch.library.Library('aten', 'IMPL')\n_lib.impl('tanh', lambda x: torch.sigmoid(x), 'AutogradCPU')",
    ),
}
"""By name: which file, what in it is replaced, and by what."""
