"""A copy of a run's state in host memory, while the device goes on.

On a GPU it is made into pinned memory, on a stream of its own. What is queued later waits for it on the device, and
this process for nothing. The memory is used again for the next copy, so there is never more than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from train.data.batch import Event


def map_tensors(value: Any, change: Any) -> Any:
    """`value` with every tensor in its dictionaries, lists and tuples changed."""
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
        """The state with its tensors here, where they are complete when `wait` returns; overwrites the copy before."""
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
        """Returns when the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def _copied(self, state: Any) -> Any:
        before, self._memory = self._memory, []

        def copy(tensor: Tensor) -> Tensor:
            place = len(self._memory)
            kept = before[place] if place < len(before) else None
            if kept is None or (kept.dtype, kept.shape, kept.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
            self._memory.append(kept)
            return kept.copy_(tensor, non_blocking=self._stream is not None)

        return map_tensors(state, copy)
