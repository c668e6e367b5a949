"""The device an engine runs on: choice of device, dtype and threads, and what the driver or the OS says of memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from engine.config import EngineConfig
from engine.errors import FootplateError


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model lives. `threads` is torch's intra-op thread count, of use on a CPU."""

    torch_device: torch.device
    dtype: torch.dtype
    threads: int

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def bind_to_thread(self) -> None:
        """Make this device and its thread count the calling thread's."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)
        else:
            torch.set_num_threads(self.threads)

    def available_bytes(self) -> int:
        """Bytes a load may take now: the driver's free memory on a GPU, the OS's available memory on a CPU."""
        if self.is_cuda:
            free, _ = torch.cuda.mem_get_info(self.torch_device)
            return int(free)
        return int(psutil.virtual_memory().available)


def choose_device(config: EngineConfig) -> Device:
    """The Device of a config; "auto" takes a CUDA GPU if there is one. Raises `FootplateError` if the one asked for isn't there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise FootplateError("--device cuda: PyTorch sees no CUDA GPU here; use --device cpu, or install a CUDA build of torch.")
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if config.dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    else:
        dtype = dtypes[config.dtype]
    return Device(device, dtype, config.threads or default_threads())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def default_threads() -> int:
    """One thread for each physical core this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes in use and in all, by the driver ("nvml": this card) or the OS ("rss": this process)."""

    used_bytes: int
    capacity_bytes: int
    source: Literal["rss", "nvml"]


def read_memory(device: Device) -> MemoryReading:
    """What the driver or the OS says now."""
    if device.is_cuda:
        free, total = torch.cuda.mem_get_info(device.torch_device)
        return MemoryReading(int(total - free), int(total), "nvml")
    return MemoryReading(int(psutil.Process().memory_info().rss), int(psutil.virtual_memory().total), "rss")
