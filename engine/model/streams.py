"""Streams and events of a CUDA device; a CPU keeps the base class's stand-ins, which run in order."""

from __future__ import annotations

import torch

from engine.model.base import ModelStreams


class CudaStreams(ModelStreams):
    """Streams and events on one device, and the binding of a thread to it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def default_stream(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self.device)

    def create_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def create_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def record_event(self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None = None) -> None:
        assert event is not None
        event.record(stream or self.default_stream)

    def stream_wait_event(self, stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        assert event is not None
        (stream or self.default_stream).wait_event(event)

    def synchronize(self, stream: torch.cuda.Stream | None = None) -> None:
        (stream or self.default_stream).synchronize()

    def event_query(self, event: torch.cuda.Event | None) -> bool:
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def event_synchronize(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()


def streams_for(device: torch.device) -> ModelStreams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else ModelStreams()
