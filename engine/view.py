"""EngineView: the frozen, tensor-free picture of the engine that the console draws.

The engine thread builds one at most ten times a second (at once when a ticket changes) and publishes it by one
attribute store; a reader on any thread sees a consistent picture. Everything here is plain data and
imports nothing heavy, so a recorded view can be read without torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

EngineState = Literal["loading", "idle", "running", "stopped", "failed"]
RequestState = Literal["queued", "prefill", "decode", "preempted"]


class BlockState(IntEnum):
    """State of one KV block: free; active (one running sequence); shared (several); cached (only the prefix tree); pinned."""

    FREE = 0
    ACTIVE = 1
    SHARED = 2
    CACHED = 3
    PINNED = 4


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is: what is being done, and the weight bytes read of those to read (0 of 0 before the plan)."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelView:
    """The loaded model: `num_parameters` counts elements; `max_seq_len` is the served context in tokens."""

    name: str
    source: str
    family: str
    num_layers: int
    num_parameters: int
    vocab_size: int
    max_seq_len: int
    device: str
    dtype: str
    threads: int
    weight_format: str
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class ForwardView:
    """The forward that serves now: circuit name, plan digest, launches per decode step (None: not counted)."""

    name: str
    digest: str
    launches_per_step: int | None


@dataclass(frozen=True, slots=True)
class LaunchView:
    """What the launches of one rule are: the kernel, its numerics against legacy ("reference", "bit_identical", "differs"), how
    many there are in a step, and their microseconds together in the step profiled last (None: none was)."""

    rule: str
    kernel: str
    numerics: str
    count: int
    total_us: float | None = None


@dataclass(frozen=True, slots=True)
class KvView:
    """The paged KV cache. `states`, `refs`: one byte a block (`BlockState`; reference count, 255 means 255 or more).
    `owners`: int32 a block, native order (`memoryview(owners).cast("i")`): the request id, −1 none. `touched_steps`:
    int32 a block, the step that last allocated or read it, −1 never. Counts: the states' counts add up to num_blocks."""

    num_blocks: int
    block_size_tokens: int
    block_bytes: int
    states: bytes
    refs: bytes
    owners: bytes
    touched_steps: bytes
    num_free: int
    num_active: int
    num_shared: int
    num_cached: int
    num_pinned: int = 0


@dataclass(frozen=True, slots=True)
class SsmView:
    """The recurrent-state pool of a hybrid model. Live slots: one a running sequence, each with `ring_entries` and `draft_rows`
    more. `num_hits` of `num_lookups` prompts restored a snapshot."""

    num_live: int
    max_live: int
    ring_entries: int
    draft_rows: int
    num_snapshots: int
    max_snapshots: int
    slot_bytes: int
    num_hits: int
    num_lookups: int


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One part of the memory picture, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Items sum to `total_bytes` exactly: what `source` ("rss": the process; "nvml": the driver) reports;
    `capacity_bytes` is the machine's or the card's memory."""

    items: tuple[MemoryItem, ...]
    total_bytes: int
    capacity_bytes: int
    source: Literal["rss", "nvml"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One unfinished request. `cached_tokens` of the prompt came from the prefix cache; `cache_note` says why not more. A hybrid
    model may find more in its KV blocks, `kv_matched_tokens`, than a snapshot makes usable."""

    request_id: int
    title: str
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    num_blocks: int
    waited_ms: float
    cache_note: str = ""
    kv_matched_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TicketView:
    """An operator command's ticket as it stood when the view was made."""

    ticket_id: int
    text: str
    state: str
    reason: str | None
    step: int | None


@dataclass(frozen=True, slots=True)
class EventView:
    """One line of the event log: `step` it happened at, `wall_time` in seconds since the epoch."""

    step: int
    wall_time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the engine was loaded."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """Rings of the recent past, newest last, one entry per `interval_s`; None where nothing ran ("no data")."""

    interval_s: float = 0.5
    decode_tokens_per_s: tuple[float | None, ...] = ()
    prefill_tokens_per_s: tuple[float | None, ...] = ()
    step_ms: tuple[float | None, ...] = ()
    ttft_ms: tuple[float | None, ...] = ()
    num_running: tuple[int, ...] = ()
    num_waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine at one moment. `published` counts views; `monotonic_s` is `time.monotonic()` at publication."""

    published: int = 0
    monotonic_s: float = 0.0
    state: EngineState = "loading"
    error: str | None = None
    loading: LoadProgress | None = None
    model: ModelView | None = None
    forward: ForwardView | None = None
    profile: tuple[LaunchView, ...] = ()
    step: int = 0
    kv: KvView | None = None
    ssm: SsmView | None = None
    memory: MemoryView | None = None
    requests: tuple[RequestView, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    step_ms: float | None = None
    host_ms: float | None = None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    last_ttft_ms: float | None = None
    totals: Totals = field(default_factory=Totals)
    history: History = field(default_factory=History)
    tickets: tuple[TicketView, ...] = ()
    events: tuple[EventView, ...] = ()


def as_json(view: EngineView) -> dict[str, object]:
    """The view as JSON-ready data: tuples become lists, byte arrays lists of numbers."""
    return {name: _plain(name, value) for name, value in dataclasses.asdict(view).items()}


def _plain(name: str, value: object) -> object:
    if isinstance(value, bytes):
        return list(memoryview(value).cast("i")) if name in ("owners", "touched_steps") else list(value)
    if isinstance(value, dict):
        return {key: _plain(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    return value
