"""The gated delta rule (arXiv 2412.06464) with torch's operators: a token each of many sequences, a few rows of one sequence
with the state after each, or many rows in chunks of 64.

All three compute in fp32 whatever the inputs' dtype, and read and write states fp32 `[v_heads, k_dim, v_dim]`. Letters, with
S the state and α = e^g the decay: S_t = α S_{t−1} + k ⊗ δ with δ = β (v − α S_{t−1}ᵀ k), and o_t = S_tᵀ q · scale.

q, k: `[rows, k_heads, k_dim]`; v: `[rows, v_heads, v_dim]`; value head h reads key head h // (v_heads // k_heads); g (log
decay, ≤ 0) and beta: `[rows, v_heads]`. `scale` multiplies q; where it is None it is k_dim^-0.5. A row with beta = 0 and
g = 0 leaves the state as it is, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ROWS = 64
PAD_ROWS = 16  # a chunk that isn't full is computed as the next multiple of this

# exp gives 0 in fp32 from −104 on: the bound changes no decay, makes −inf legal, and keeps differences of sums exact.
MIN_LOG_DECAY = -200.0


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(Σx² + eps)` over the last dimension: fp32, in x's shape."""
    x = x.float()
    # sqrt and division are exact wherever a row lies; torch's rsqrt on a CPU depends on its place in a vector.
    return x / ((x * x).sum(-1, keepdim=True) + eps).sqrt_()


# One row at a time


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ready for `advance`, fp32: kq `[rows, v_heads, 2, k_dim]`, the key and the scaled query; v `[rows, v_heads, v_dim]`;
    decay, beta, and k·q: `[rows, v_heads, 1]`."""

    kq: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    dot: Tensor

    def flat(self) -> _Rows:
        """All heads of all rows as the heads of one row."""
        return _Rows(*(x.flatten(0, 1)[None] for x in (self.kq, self.v, self.decay, self.beta, self.dot)))

    def advance(self, row: int, state: Tensor, new_state: Tensor) -> Tensor:
        """The outputs of one row, fp32 `[heads, v_dim]`. Writes the state after it to new_state, which may be `state` itself."""
        kq, decay = self.kq[row], self.decay[row]
        # One pass over the state serves both reads: S_tᵀ q = α S_{t−1}ᵀ q + (k·q) δ.
        seen = torch.bmm(kq, state)
        delta = (self.v[row] - decay * seen[:, 0]) * self.beta[row]
        torch.mul(state, decay[:, :, None], out=new_state).baddbmm_(kq[:, :1].transpose(1, 2), delta[:, None])
        return decay * seen[:, 1] + self.dot[row] * delta


def _rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> _Rows:
    k = k.float()
    kq = torch.stack((k, q.float() * (k.shape[2] ** -0.5 if scale is None else scale)), 2)
    dot = (kq[:, :, 0] * kq[:, :, 1]).sum(-1, keepdim=True)
    kq, dot = _per_v_head(kq, v.shape[1]), _per_v_head(dot, v.shape[1])
    return _Rows(kq, v.float(), g.float().exp()[:, :, None], beta.float()[:, :, None], dot)


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    out_slots: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """One token of each sequence: its output, `[sequences, v_heads, v_dim]` in v's dtype; the states are advanced in place.

    states: the pool, `[num_slots, v_heads, k_dim, v_dim]`; slots: int64 `[sequences]`, where each state is read;
    out_slots: where it is written (`slots` where it is None), each slot once.
    """
    rows = _rows(q, k, v, g, beta, scale)
    out_slots = slots if out_slots is None else out_slots
    if states.is_cuda:
        state = states.index_select(0, slots)
        flat = state.flatten(0, 1)
        out = rows.flat().advance(0, flat, flat).view(v.shape)
        states.index_copy_(0, out_slots, state)
        return out.to(v.dtype)
    # On a CPU each state is advanced where it lies: a gather and a scatter would double the bytes moved. It also makes a
    # sequence's bits independent of what else is in the batch.
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for row, (source, target) in enumerate(zip(slots.tolist(), out_slots.tolist(), strict=True)):
        out[row] = rows.advance(row, states[source], states[target])
    return out.to(v.dtype)


def recurrent_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs `[rows, v_heads, v_dim]` in v's dtype, the state after each row fp32 `[rows, v_heads, k_dim, v_dim]`) of one
    sequence; the same arithmetic as `recurrent_step` row by row. state: the one before the first row, left as it is."""
    rows = _rows(q, k, v, g, beta, scale)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    states = torch.empty(v.shape[0], *state.shape, dtype=torch.float32, device=v.device)
    for row in range(v.shape[0]):
        out[row] = rows.advance(row, states[row - 1] if row else state, states[row])
    return out.to(v.dtype), states


# Many rows in chunks


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK_ROWS, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs `[rows, v_heads, v_dim]` in v's dtype, the state after the last row, the states at the chunks' starts fp32
    `[chunks, v_heads, k_dim, v_dim]`) of one sequence from `state` on, which is left as it is.

    The UT transform (arXiv 2406.06484, section 3.2; with gates arXiv 2412.06464, section 3.3): within a chunk that starts from
    S, (I + A) δ = β (v − a Sᵀk), where A is the strictly lower triangle of β_i (k_i·k_j) a_i/a_j and a the decay since the
    chunk's start. Only that solve and the state run from chunk to chunk; the rest is computed for all chunks at once.
    """
    rows = v.shape[0]
    whole = rows - rows % chunk
    factor = q.shape[2] ** -0.5 if scale is None else scale
    outs, starts = [], state[None]
    if whole:
        first = slice(0, whole)
        scan = _scan(k[first], v[first], g[first], beta[first], state, chunk)
        outs.append(_outputs(q[first], scan, factor))
        starts = scan.states
    if whole < rows:
        scan = _scan(k[whole:], v[whole:], g[whole:], beta[whole:], starts[-1], _padded(rows - whole))
        outs.append(_outputs(q[whole:], scan, factor))
        return torch.cat(outs).to(v.dtype), scan.states[-1], starts
    return outs[0].to(v.dtype), starts[-1], starts[:-1]


def state_at(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_start_state: Tensor, num_rows: int) -> Tensor:
    """The state after the first `num_rows` (≤ 64) rows of a chunk, fp32 `[v_heads, k_dim, v_dim]`; rows after them, given or
    not, are masked. Bit-equal to the last state of `chunked` over a sequence that ends there."""
    assert 0 <= num_rows <= min(CHUNK_ROWS, v.shape[0]), f"{num_rows} rows don't lie in a chunk of which {v.shape[0]} are given"
    if num_rows == 0:
        return chunk_start_state.clone()
    first = slice(0, num_rows)
    return _scan(k[first], v[first], g[first], beta[first], chunk_start_state, _padded(num_rows)).states[-1]


def _padded(rows: int) -> int:
    """How many rows a chunk that isn't full is computed as: the rest are exact no-ops."""
    return -(-rows // PAD_ROWS) * PAD_ROWS


def _outputs(q: Tensor, scan: _Scan, scale: float) -> Tensor:
    """o_t = a_t Sᵀ q + Σ_{s ≤ t} (a_t/a_s) (q·k_s) δ_s, fp32 `[rows, v_heads, v_dim]`."""
    queries = _chunks(q, scan.keys.shape[2]).mul_(scale)
    pairs = _grouped(queries @ scan.keys.transpose(2, 3), scan.pair_decay)
    out = (_per_v_head(queries, scan.decay.shape[1]) * scan.decay) @ scan.states[:-1]
    out += pairs @ scan.deltas
    return out.transpose(1, 2).flatten(0, 1)[: q.shape[0]]


@dataclass(frozen=True, slots=True)
class _Scan:
    """What a scan over chunks leaves, fp32: keys `[chunks, k_heads, chunk, k_dim]`; deltas `[chunks, v_heads, chunk, v_dim]`;
    decay `[chunks, v_heads, chunk, 1]` since the chunk's start; pair_decay `[chunks, v_heads, chunk, chunk]` from column to
    row, 0 above the diagonal; states `[chunks + 1, v_heads, k_dim, v_dim]`, chunk starts and the end."""

    keys: Tensor
    deltas: Tensor
    decay: Tensor
    pair_decay: Tensor
    states: Tensor


def _scan(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int) -> _Scan:
    keys, values = _chunks(k, chunk), _chunks(v, chunk)
    betas = _chunks(beta, chunk)[..., None]
    # Sums in fp64: a difference of two large sums is a small decay that must keep its digits.
    sums = _chunks(g, chunk).clamp_(min=MIN_LOG_DECAY).double().cumsum(2)
    pair_decay = (sums[:, :, :, None] - sums[:, :, None, :]).float().clamp_(max=0.0).exp_().tril_()
    decay = sums.float().exp_()[..., None]
    to_end = (sums[:, :, -1:] - sums).float().exp_()[..., None]
    system = _grouped(keys @ keys.transpose(2, 3), pair_decay).mul_(betas)
    eye = torch.eye(chunk, device=v.device).expand_as(system)
    # Forward substitution, not a product of powers of A: with like keys those grow as binomials and cancel.
    solve = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
    head_keys = _per_v_head(keys, v.shape[1])
    read_keys = head_keys * (betas * decay)
    write_keys = (head_keys * to_end).transpose(2, 3)
    values = values.mul_(betas)
    chunk_decay = decay[:, :, -1:]
    states = torch.empty(len(keys) + 1, *state.shape, dtype=torch.float32, device=v.device)
    states[0] = state
    deltas = torch.empty_like(values)
    for i in range(len(keys)):
        surprise = torch.baddbmm(values[i], read_keys[i], states[i], alpha=-1)
        torch.bmm(solve[i], surprise, out=deltas[i])
        torch.mul(states[i], chunk_decay[i], out=states[i + 1]).baddbmm_(write_keys[i], deltas[i])
    return _Scan(keys, deltas, decay, pair_decay, states)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """`[rows, heads, …]` as fp32 `[chunks, heads, chunk, …]`, a copy, zero rows after the last."""
    rows = x.shape[0]
    whole = rows // chunk
    out = torch.empty(-(-rows // chunk), x.shape[1], chunk, *x.shape[2:], dtype=torch.float32, device=x.device)
    out[:whole] = x[: whole * chunk].view(whole, chunk, *x.shape[1:]).transpose(1, 2)
    if whole < len(out):
        out[whole, :, : rows - whole * chunk] = x[whole * chunk :].transpose(0, 1)
        out[whole, :, rows - whole * chunk :] = 0.0
    return out


def _grouped(pairs: Tensor, pair_decay: Tensor) -> Tensor:
    """Products of keys `[chunks, k_heads, chunk, chunk]`, each times the decays of its value heads: a new tensor in
    pair_decay's shape."""
    chunks, k_heads, rows = pairs.shape[:3]
    return (pairs[:, :, None] * pair_decay.view(chunks, k_heads, -1, rows, rows)).flatten(1, 2)


def _per_v_head(x: Tensor, v_heads: int) -> Tensor:
    """`[…, k_heads, …]` of dimension 1 repeated to `v_heads`; x itself where there are as many."""
    group = v_heads // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)
