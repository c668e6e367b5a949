"""The depthwise causal convolution with SiLU in front of a Gated DeltaNet layer, with torch's operators.

y_t = silu(bias + Σ_j weight[j] · x_{t − taps + 1 + j}): the last tap weighs the row itself. A state, `[taps − 1, channels]`,
holds the last raw inputs, oldest first, in the inputs' dtype: it is a copy and loses nothing. Sums are fp32, rounded once, to
x's dtype, after SiLU. Every row is added up in the same order, so a row has the same bits however its sequence is split (on a
CPU if channels are a multiple of 32, as all models' are: torch computes what doesn't fill two vectors with another exp).

Weights are `[taps, channels]` and fp32 ("tap-major": a tap's channels side by side, as a row's are); checkpoints hold
`[channels, 1, taps]`, and `tap_major` turns them once, when a model is loaded: turned in every step, they cost more than it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# A CPU takes rows in blocks whose fp32 copies stay in a core's cache; a GPU takes them all at once.
BLOCK_ELEMENTS = 1 << 16


def tap_major(weight: Tensor) -> Tensor:
    """A checkpoint's `[channels, 1, taps]` or `[channels, taps]` as fp32 `[taps, channels]`."""
    return weight.reshape(weight.shape[0], -1).float().T.contiguous()


def conv_rows(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs `[rows, channels]` in x's dtype, the state after the last row) of one sequence's next rows.

    x: `[rows, channels]`; weight: fp32 `[taps, channels]`; bias: `[channels]` or None; state: `[taps − 1, channels]`, left as
    it is.
    """
    rows, channels = x.shape
    taps = weight.shape[0]
    bias = None if bias is None else bias.float()
    size = rows if x.is_cuda else max(BLOCK_ELEMENTS // channels, taps)
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    for first in range(0, rows, size):
        count = min(size, rows - first)
        inputs = x[first - taps + 1 : first + count] if first else torch.cat((state, x[:count]))
        inputs = inputs.float()
        out[first : first + count] = _silu_of_taps([inputs[j : j + count] for j in range(taps)], weight, bias)
    return out, window_at(x, state, rows)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, out_slots: Tensor | None = None
) -> Tensor:
    """One row of each sequence: its output, `[sequences, channels]` in x's dtype; the states are advanced in place.

    states: the pool, `[num_slots, taps − 1, channels]`; slots: int64 `[sequences]`, where each state is read; out_slots: where
    it is written (`slots` where it is None), each slot once.
    """
    window = torch.cat((states.index_select(0, slots), x[:, None].to(states.dtype)), 1)
    taps = [tap.float() for tap in window[:, :-1].unbind(1)]
    out = _silu_of_taps([*taps, x.float()], weight, None if bias is None else bias.float())
    states.index_copy_(0, slots if out_slots is None else out_slots, window[:, 1:])
    return out.to(x.dtype)


def window_at(x: Tensor, state: Tensor, num_rows: int) -> Tensor:
    """The state after the first `num_rows` of the rows x, `[taps − 1, channels]`: a copy. state: the one before the first."""
    assert 0 <= num_rows <= x.shape[0], f"{num_rows} of {x.shape[0]} rows"
    keep = state.shape[0]
    return torch.cat((state[min(num_rows, keep) :], x[max(0, num_rows - keep) : num_rows].to(state.dtype)))


def windows_per_row(x: Tensor, state: Tensor) -> Tensor:
    """The state after each of the rows x, `[rows, taps − 1, channels]`."""
    keep = state.shape[0]
    if keep == 0:
        return state.new_empty(x.shape[0], 0, x.shape[1])
    return torch.cat((state, x.to(state.dtype))).unfold(0, keep, 1)[1:].transpose(1, 2).contiguous()


def _silu_of_taps(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 `[rows, channels]` of the taps' inputs, oldest first, each fp32 `[rows, channels]`."""
    y = taps[0] * weight[0] if bias is None else torch.addcmul(bias, taps[0], weight[0])
    for tap, weights in zip(taps[1:], weight[1:], strict=True):
        y.addcmul_(tap, weights)
    return functional.silu(y, inplace=True)
