"""A device whose tensors have values that nobody on the host can see: what CUDA code may rely on.

Tensors that claim to lie on the device (torch's ``meta``, which every build knows) keep their
values on the CPU. While a :class:`FarDevice` is active, operations on them compute those values,
so that results can be compared; what a real accelerator refuses is an error, and what makes the
host wait for it is recorded. ``torch._subclasses.FakeTensorMode`` would do without values, but
builds without CUDA cannot slice its CUDA tensors.
"""

from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["FarDevice", "FarTensor"]

DEVICE = torch.device("meta")
aten = torch.ops.aten

# Their results have a size, or a value on the host, that only the device knows.
WAITING = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select,
    aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.argwhere,
    aten.nonzero_numpy,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten._to_copy, aten.copy_, aten.copy}


class FarTensor(torch.Tensor):
    """A tensor on the device; `held` has its values."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=DEVICE,
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"FarTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of FarDevice")


@dataclass
class Copy:
    """A transfer between host and device."""

    to_device: bool
    nbytes: int
    non_blocking: bool


@dataclass
class Log:
    """What happened on the device."""

    copies: list = field(default_factory=list)
    waits: list = field(default_factory=list)

    def to_device(self):
        return [copy for copy in self.copies if copy.to_device]


class FarDevice(TorchDispatchMode):
    """Runs what is called inside with an accelerator; see the module.

    Attributes
    ----------
    log : Log
        Copies and waits so far.
    """

    def __init__(self):
        super().__init__()
        self.log = Log()

    def put(self, tensor):
        """Return a tensor on the device with these values, unrecorded."""
        leaf = FarTensor(tensor.detach().clone())
        return leaf.requires_grad_(tensor.requires_grad)

    def get(self, tensor):
        """Return the values of a tensor on the device, unrecorded."""
        assert isinstance(tensor, FarTensor), "the result is not on the device"
        return tensor.held.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        far = [leaf for leaf in leaves if isinstance(leaf, FarTensor)]
        asked = kwargs.get("device")
        to_far = asked is not None and torch.device(asked).type == DEVICE.type
        if not far and not to_far:
            return func(*args, **kwargs)
        if packet in COPIES:
            stays = self._note_copy(packet, args, kwargs)
        else:
            self._check(func, packet, args, kwargs, leaves)
            stays = True
        if asked is not None:
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        known = {id(leaf.held): leaf for leaf in far}
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if packet is aten._to_copy and out is _held(args[0]):
            out = out.clone()

        def wrap(value):
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in known:
                return known[id(value)]
            return FarTensor(value) if stays else value

        return tree_map(wrap, out)

    def _note_copy(self, packet, args, kwargs):
        """Record a copy between places; return whether its result is on the device."""
        if packet is aten._to_copy:
            source = args[0]
            asked = kwargs.get("device")
            target_far = (
                isinstance(source, FarTensor) if asked is None
                else torch.device(asked).type == DEVICE.type
            )  # fmt: skip
            blocking = not kwargs.get("non_blocking", False)
        else:
            source = args[1]
            target_far = isinstance(args[0], FarTensor)
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        source_far = isinstance(source, FarTensor)
        if source_far != target_far:
            self.log.copies.append(
                Copy(target_far, source.numel() * source.element_size(), not blocking)
            )
            if blocking or source_far:
                self.log.waits.append(f"{packet} of {tuple(source.shape)}")
        return target_far

    def _check(self, func, packet, args, kwargs, leaves):
        near = [leaf for leaf in leaves if not isinstance(leaf, FarTensor)]
        assert all(leaf.dim() == 0 and leaf.numel() for leaf in near), (
            f"{func} mixes devices: {[tuple(leaf.shape) for leaf in near]} on the host"
        )
        if packet in WAITING:
            self.log.waits.append(str(func))
        if packet in INDEXED:
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
            assert all(isinstance(index, FarTensor) for index in indices), f"{func} by the host's"
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.log.waits.append(f"{func} by a mask")
        if packet is aten.repeat_interleave:
            size = kwargs.get("output_size", args[1] if func is aten.repeat_interleave.Tensor and
                              len(args) > 1 else None)  # fmt: skip
            if size is None:
                self.log.waits.append(f"{func} without a size")
        if packet is aten.segment_reduce and not kwargs.get("unsafe", False):
            self.log.waits.append(f"{func} with checks")


def _held(value):
    return value.held if isinstance(value, FarTensor) else value
