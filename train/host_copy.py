"""Copy of a run's state in host memory, made while the device continues.

From a GPU it is copied to pinned memory on a separate stream. Later work on the device waits for the copy, this process
does not. The memory is reused for the next copy, so that there is at most one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from train.data.batch import Event


def map_tensors(value: Any, change: Any) -> Any:
    """Return `value` with `change` applied to every tensor in its dictionaries, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


class HostCopy:
    """Memory for one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, list[Tensor]()
        self._done: Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Return the state with tensors in host memory, complete after `wait`; overwrites the previous copy."""
        if self._stream is None:
            return self._copied(state)
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            copied = self._copied(state)
        self._done = self._stream.record_event()
        self._done.wait(now)  # the next step changes the weights
        return copied

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def _copied(self, state: Any) -> Any:
        before, self._memory = self._memory, []

        def copy(tensor: Tensor) -> Tensor:
            index = len(self._memory)
            kept = before[index] if index < len(before) else None
            if kept is None or (kept.dtype, kept.shape, kept.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
            self._memory.append(kept)
            return kept.copy_(tensor, non_blocking=self._stream is not None)

        return map_tensors(state, copy)
