"""The logits arena, and what is read from it."""

from __future__ import annotations

import torch
from torch import Tensor


class Logits:
    """Rows of logits at a fixed address, `[max_rows, vocab]`, fp32 where the model computes in fp32, else bf16.

    Row i of a step belongs to its i-th logits row: decode rows first, finishing prefill rows after them.
    """

    def __init__(self, max_rows: int, vocab_size: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.vocab_size = vocab_size
        self.logits_buffer = torch.zeros((max_rows, vocab_size), device=device, dtype=dtype)
        self.hidden_after_norm = torch.zeros((max_rows, hidden_size), device=device, dtype=dtype)

    @property
    def decode_logits_fp32(self) -> bool:
        """Whether decode writes fp32 logits."""
        return self.logits_buffer.dtype == torch.float32

    @property
    def decode_logits_ptr(self) -> Tensor:
        """The buffer decode writes, `[max_rows, vocab]`."""
        return self.logits_buffer

    @property
    def logits_buffer_ptr(self) -> Tensor:
        """The buffer a verify pass leaves its rows in: the same arena."""
        return self.logits_buffer

    def logits_ptr_is_fp32(self, logits: Tensor) -> bool:
        """Whether these logits are fp32 (else bf16)."""
        return logits.dtype == torch.float32

    def store(self, hidden: Tensor, logits: Tensor, row_base: int = 0) -> Tensor:
        """Put a step's normed hidden rows and logits into the arena from row `row_base` on; returns those rows, a view."""
        end = row_base + logits.shape[0]
        self.hidden_after_norm[row_base:end].copy_(hidden)
        self.logits_buffer[row_base:end].copy_(logits)
        return self.logits_buffer[row_base:end]

    def copy_logits_to_host(self, logits: Tensor) -> Tensor:
        """A copy of one row, `[vocab]`, on the host in its own dtype."""
        return logits.reshape(self.vocab_size).to("cpu", copy=True)

    def argmax_on_device(self, logits: Tensor) -> int:
        """The id of the largest logit of one row, computed on the device."""
        return int(logits.reshape(self.vocab_size).argmax())

    def argmax_batch(self, logits: Tensor, n: int) -> list[int]:
        """The ids of the largest logit of each of the first n rows, computed on the device."""
        ids: list[int] = logits[:n].argmax(-1).tolist()
        return ids

    @property
    def num_bytes(self) -> int:
        return self.logits_buffer.nbytes + self.hidden_after_norm.nbytes
