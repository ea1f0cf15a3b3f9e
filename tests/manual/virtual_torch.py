"""PyTorch's operators on the virtual device: issued now, run when the device likes, on memory that may be reused.

Put below a scope's mode. Tensors are PyTorch's own, of the CPU, over memory of the device; an operator allocates its
results under the current stream and is enqueued there. It runs on whatever bytes lie there by then.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from millstream._torch.dispatcher import hide_operators
from millstream.manual.operator_rules import Effect, recipe_of


class VirtualTorch(TorchDispatchMode):
    """Args: device, a ``VirtualDevice``."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.num_launches = 0
        self.written = {}  # number of a launch -> what it wrote, when it ran

    def tensor(self, values):
        """A tensor of the device, written by a kernel on the current stream."""
        hidden = hide_operators()
        values = torch.as_tensor(values).detach().clone(memory_format=torch.contiguous_format)
        form = values.to("meta")
        del hidden
        made = self._allocate(form)
        raw = self._over_raw(made)
        self.device.current_stream().enqueue(lambda: self._run(raw.copy_, values))
        return made

    def read(self, tensor):
        """The values of a tensor, when the device has done all its work."""
        self.device.synchronize()
        hidden = hide_operators()
        value = self._over_raw(tensor.detach()).clone()
        del hidden
        return value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recipe = recipe_of(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if recipe.effect is Effect.VIEW or (given and not any(map(self._is_virtual, given))):
            return func(*args, **kwargs)
        with torch.no_grad():
            forms = func(*_to_meta(args), **{**_to_meta(kwargs), **({"device": "meta"} if "device" in kwargs else {})})
        assert recipe.effect is not Effect.REALLOCATE
        late_args, late_kwargs = (tree_map_only(torch.Tensor, self._over_raw, each) for each in (args, kwargs))
        number = self.num_launches = self.num_launches + 1
        stream = self.device.current_stream()
        if recipe.positions or recipe.names:
            (written,) = [args[i] for i in recipe.positions if i < len(args)] or [kwargs[n] for n in recipe.names]
            late = self._over_raw(written)

            def update():
                self._run(func, *late_args, **late_kwargs)
                self.written[number] = [late.numpy().tobytes()]

            stream.enqueue(update)
            return written
        made = tree_map_only(torch.Tensor, self._allocate, forms)
        late = [self._over_raw(tensor) for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)]

        def launch():
            results = tree_leaves(self._run(func, *late_args, **late_kwargs))
            for to, result in zip(late, (x for x in results if isinstance(x, torch.Tensor)), strict=True):
                self._run(to.copy_, result)
            self.written[number] = [to.numpy().tobytes() for to in late]

        stream.enqueue(launch)
        return made

    def _run(self, function, *args, **kwargs):
        hidden = hide_operators()
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        finally:
            del hidden

    def _allocate(self, form):
        hidden = hide_operators()
        try:
            raw = self.device.allocate(max(form.untyped_storage().nbytes(), 1))
            form_of = form.storage_offset(), form.size(), form.stride()
            return torch.empty(0, dtype=form.dtype).set_(raw.untyped_storage(), *form_of)
        finally:
            del hidden  # also where there is no memory: else operators stay hidden as long as the traceback lives

    def _is_virtual(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.device.raw_of

    def _over_raw(self, tensor):
        """The same bytes, without keeping them from being freed; memory of the host as it is."""
        hidden = hide_operators()
        try:
            tensor = tensor.detach()
            if not tensor.untyped_storage().nbytes():
                return tensor
            raw = self.device.raw_of.get(tensor.untyped_storage().data_ptr())
            if raw is None:
                return tensor
            whole = torch.from_numpy(raw).untyped_storage()
            form_of = tensor.storage_offset(), tensor.size(), tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(whole, *form_of)
        finally:
            del hidden


def _to_meta(tree):
    """Tensors of the same forms without memory; those that share memory share it."""
    storages = {}

    def convert(tensor):
        hidden = hide_operators()
        key = tensor.untyped_storage()._cdata
        if key not in storages:
            storages[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        made.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        del hidden
        return made

    return tree_map_only(torch.Tensor, convert, tree)
