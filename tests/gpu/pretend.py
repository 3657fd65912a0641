"""A simulated GPU on the CPU: a fake for every CUDA-only call of the trainer.

    with pretend.gpu():
        world = start(Config(data="", device="cuda"))    # cuda:0

Tensors stay on the CPU; the device `cuda` is replaced by `cpu` for allocations. The trainer takes the same decisions as
on a GPU (layout, mixed precision, streams, pinned memory, fused kernels, delayed reading of metrics), but runs on the
CPU. Copies on a stream are executed in order by a thread, each with a delay of `lag` seconds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torchvision.io import decode_jpeg

GARBAGE = 255  # content of memory before its copy is done
NAME = "NVIDIA A100-SXM4-80GB"


class Event:
    """Like torch.cuda.Event. Computation runs in the caller's thread, so a waiting stream is the waiting caller."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._happened, self._timed, self._time = threading.Event(), enable_timing, 0.0
        self._happened.set()

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()
        if stream is not None:
            self._happened.clear()
            stream.put(self._happened.set)

    def query(self) -> bool:
        return self._happened.is_set()

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        assert self._timed
        assert end.query(), "torch raises here, because the event has not happened"
        return 1000 * (end._time - self._time)

    def wait(self, stream: object = None) -> None:
        self._happened.wait()

    def synchronize(self) -> None:
        self._happened.wait()


class Stream:
    """Like torch.cuda.Stream: queued operations are executed in order, later."""

    def __init__(self, lag: float) -> None:
        self._lag = lag
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def copy(self, source: Tensor) -> Tensor:
        """Return a tensor that later receives the content that the source has by then."""
        return self.fill(torch.full_like(source, GARBAGE), source)

    def fill(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy later."""

        def late() -> None:
            time.sleep(self._lag)
            target.copy_(source)

        self.put(late)
        return target

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: computation is complete when it returns."""

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def _run(self) -> None:
        while True:
            self._work.get()()


class Graph:
    """Like torch.cuda.CUDAGraph; what is captured is computed at once, and a replay does nothing."""

    def replay(self) -> None:
        pass


def _decode_jpeg(data: Any, mode: Any, device: Any = "cpu") -> Any:
    """Like torchvision's, which decodes a list on a GPU only."""
    return [decode_jpeg(each, mode) for each in data] if isinstance(data, list) else decode_jpeg(data, mode)


class _OnTheCpu(TorchFunctionMode):
    """Redirects calls with a CUDA device or pinned memory to the CPU."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.to and self.stream and kwargs.get("non_blocking"):
            return self.stream.copy(args[0])
        if func is Tensor.copy_ and self.stream and kwargs.get("non_blocking"):
            return self.stream.fill(args[0], args[1])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return func(*(_here(value) for value in args), **{name: _here(value) for name, value in kwargs.items()})


def _needs_no_stream(tensor: Tensor, stream: object) -> None:
    """CPU memory is not reused before its last reader is done."""


def _here(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


@contextmanager
def gpu(count: int = 1, capability: tuple[int, int] = (8, 0), lag: float = 0.0) -> Iterator[None]:
    """Simulate `count` GPUs of a compute capability in this block."""
    mode, streams = _OnTheCpu(), list[Stream]()

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        mode.stream, before = stream, mode.stream
        try:
            yield
        finally:
            mode.stream = before

    def sleep(cycles: int) -> None:
        if mode.stream:
            mode.stream.put(partial(time.sleep, cycles / 2e9))

    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xFF, pci_device_id=0x1F, name=NAME, total_memory=1 << 24)
    cuda = {
        "device_count": lambda: count,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "max_memory_allocated": lambda device=None: 1,
        "reset_peak_memory_stats": lambda device=None: None,
        "CUDAGraph": Graph,
        "graph": lambda captured: nullcontext(),
        "synchronize": lambda device=None: [stream.record_event().wait() for stream in streams],
        "Stream": lambda device=None: streams.append(Stream(lag)) or streams[-1],
        "Event": Event,
        "stream": current,
        "current_stream": lambda device=None: streams[-1] if streams else None,
        "_sleep": sleep,
    }
    with ExitStack() as stack:
        for name, fake in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _needs_no_stream))
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda tensor: True)))
        for name, fake in KERNELS.items():
            stack.enter_context(mock.patch.object(torch, name, fake))
        for target, fake in _patches().items():
            stack.enter_context(mock.patch(target, fake))
        settings = {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}
        benchmark = torch.backends.cudnn.benchmark
        stack.enter_context(mode)
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = settings["matmul"]
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = settings["cudnn"], benchmark


def _patches() -> dict[str, Any]:
    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *arguments: Any, **named: Any) -> None:
            super().__init__("cpu", *arguments, **named)

    class OnCpu(DistributedDataParallel):
        @wraps(DistributedDataParallel.__init__)
        def __init__(self, module: nn.Module, device_ids: Any = None, **named: Any) -> None:
            assert len(device_ids) == 1, "one GPU per process"
            super().__init__(module, **named)

    join, mesh, compiled = dist.init_process_group, dist.device_mesh.init_device_mesh, torch.compile
    return {
        "torch.autocast": Autocast,
        "torch.cuda.nccl.version": lambda: (2, 27, 0),
        "torchvision.io.decode_jpeg": _decode_jpeg,
        "torch.compile": partial(compiled, backend="eager"),  # the CPU's backend needs a C++ compiler and half a minute
        "torch.distributed.init_process_group": lambda backend, device_id=None, **named: join("gloo", **named),
        "train.distributed.ddp.DistributedDataParallel": OnCpu,
        "train.distributed.fsdp.init_device_mesh": lambda device, *shape, **named: mesh("cpu", *shape, **named),
    }


# the kernels of torch's SyncBatchNorm, which exist only on GPUs, as defined in torch.nn.modules._functions


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


def _checked(x: Tensor) -> Tensor:
    """Return x in the precision of the kernels, which accept both layouts but no empty tensors."""
    nhwc = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    assert x.numel()
    assert nhwc or x.is_contiguous()
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1/sqrt(variance + eps) per channel."""
    variance, mean = torch.var_mean(_checked(x), _axes(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = _checked(x)
    assert mean.dtype == scale.dtype == wide.dtype
    out = (wide - _over_channels(mean, x)) * _over_channels(scale, x)
    out = out if weight is None else out * _over_channels(weight, x)
    return (out if bias is None else out + _over_channels(bias, x)).to(x.dtype)


def _backward_reduce(
    g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, for_x: bool, for_w: bool, for_b: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of g and of g*(x - mean)."""
    assert g.dtype == x.dtype
    assert g.stride() == x.stride()
    wide = _checked(g)
    products = wide * (_checked(x) - _over_channels(mean, x))
    return wide.sum(_axes(x)), products.sum(_axes(x)), None, None


def _backward_elemt(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    of_g: Tensor,
    of_products: Tensor,
    count: Tensor,
) -> Tensor:
    assert count.dtype == torch.int32
    assert count.ndim == 1
    total, wide = count.sum(), _checked(x)
    dx = _checked(g) - _over_channels(of_g / total, x)
    dx = dx - (wide - _over_channels(mean, x)) * _over_channels(scale.square() * of_products / total, x)
    dx = dx * _over_channels(scale if weight is None else scale * weight, x)
    return dx.to(x.dtype)


KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}
