"""Transfers: saving and loading states off the engine thread, so that decode never waits for a disk.

The engine thread copies what is saved to the host, and installs what was loaded; files are written and read in between.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.commands import LoadState, SaveState, Ticket
from engine.errors import CommandRefused, FootplateError, SavedStateError
from engine.model.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state that was read and checked, on its way back to the engine thread."""

    ticket: Ticket
    token_ids: tuple[int, ...]
    tensors: list[Tensor]


class Transfers:
    """The tickets whose files are being written or read. `hand_back` brings a loaded state to the engine thread."""

    def __init__(self, lifecycle: Lifecycle, hand_back: Callable[[Loaded], None]) -> None:
        self.lifecycle = lifecycle
        self.hand_back = hand_back
        self._open: set[Ticket] = set()

    def begin(self, ticket: Ticket, step: int) -> None:
        """Start a SaveState or LoadState; the ticket is settled when it is done. Raises `CommandRefused`."""
        command = ticket.command
        if isinstance(command, SaveState):
            token_ids, tensors = self._gather(command.token_ids)
            self._start(ticket, step, lambda: self._write(Path(command.path), token_ids, tensors))
        elif isinstance(command, LoadState):
            self._start(ticket, step, lambda: self._read(ticket, Path(command.path)))

    def finish(self, loaded: Loaded, step: int) -> None:
        """Install a loaded state into the prefix cache, and settle its ticket."""
        self._open.discard(loaded.ticket)
        try:
            count = self._install(loaded)
        except FootplateError as error:
            loaded.ticket.settle("refused", step, reason=str(error))
        else:
            loaded.ticket.settle("applied", step, value=count)

    def abandon(self, step: int, reason: str) -> None:
        """The engine stops: no ticket is left open."""
        for ticket in list(self._open):
            ticket.settle("cancelled", step, reason=reason, stopped=True)
        self._open.clear()

    def _start(self, ticket: Ticket, step: int, work: Callable[[], int | None]) -> None:
        def run() -> None:
            try:
                value = work()
            except FootplateError as error:
                ticket.settle("refused", step, reason=str(error))
            except Exception as error:
                ticket.settle("refused", step, reason=f"{type(error).__name__}: {error}")
            else:
                if value is None:
                    return
                ticket.settle("applied", step, value=value)
            self._open.discard(ticket)

        self._open.add(ticket)
        threading.Thread(target=run, name="footplate-transfer", daemon=True).start()

    def _gather(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], list[Tensor]]:
        """What the prefix cache holds of these tokens, copied to the host."""
        if not self.lifecycle.num_free_rows:
            raise CommandRefused("every sequence row is taken; save when a request has ended.")
        vocab_size = self.lifecycle.states.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise CommandRefused(f"token id {token} isn't in the vocabulary of {vocab_size}.")
        # One id more, for a prefix match always leaves one to compute: the last of a full context, which never was.
        token_ids = token_ids[: self.lifecycle.max_seq_len - 1]
        seq = self.lifecycle.alloc_sequence_for(len(token_ids) + 1)
        try:
            found = self.lifecycle.adopt_prefix(seq, [*token_ids, 0])
            if not found.num_tokens:
                raise CommandRefused(f"nothing of it can be saved: {found.note}.")
            return token_ids[: found.num_tokens], self.lifecycle.states.gather(seq)
        finally:
            self.lifecycle.free_sequence(seq)

    def _write(self, path: Path, token_ids: tuple[int, ...], tensors: list[Tensor]) -> int:
        """Write to a file beside `path`, then rename: what was there stays until the new one is whole."""
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise SavedStateError(f"{path} can't be written: {error.strerror or error}. Choose another place.") from error
        try:
            with os.fdopen(handle, "wb") as file:
                self.lifecycle.states.write(file, token_ids, tensors)
            os.replace(name, path)
        except OSError as error:
            raise SavedStateError(f"{path} can't be written: {error.strerror or error}. Choose another place.") from error
        finally:
            Path(name).unlink(missing_ok=True)
        return len(token_ids)

    def _read(self, ticket: Ticket, path: Path) -> None:
        states = self.lifecycle.states
        try:
            with path.open("rb") as file:
                opened = states.open(file, min(self.lifecycle.max_seq_len, self._room_tokens()), path.stat().st_size)
                loaded = Loaded(ticket, opened.header.token_ids, states.load(opened))
        except OSError as error:
            raise SavedStateError(f"{path} can't be read: {error.strerror or error}. Check the path.") from error
        self.hand_back(loaded)

    def _room_tokens(self) -> int:
        return self.lifecycle.num_total_blocks * self.lifecycle.blocks.block_size

    def _install(self, loaded: Loaded) -> int:
        """Make the state a cached prefix; how many tokens of it a prompt can reuse."""
        count, block_size = len(loaded.token_ids), self.lifecycle.blocks.block_size
        if self.lifecycle.ssm is not None:
            if count % block_size:
                raise CommandRefused(
                    f"the state is that after {count} tokens, and this model can only go on from whole blocks of {block_size}."
                )
            if self.lifecycle.ssm.ssm_snapshot_occupancy() is None:
                raise CommandRefused("this engine keeps no snapshots of recurrent state; start it with --ssm-cache-slots.")
        if not self.lifecycle.num_free_rows:
            raise CommandRefused("every sequence row is taken; load when a request has ended.")
        self.lifecycle.reclaim_prefix_blocks_for((), 0, -(-count // block_size))
        seq = self.lifecycle.alloc_sequence_for(count)
        try:
            self.lifecycle.reserve(seq, count)
            self.lifecycle.install_state(seq, loaded.token_ids, loaded.tensors)
        except BaseException:
            self.lifecycle.free_sequence(seq)
            raise
        keys = self.lifecycle.prompt_keys(loaded.token_ids)
        self.lifecycle.retire_sequence(seq)
        usable = self.lifecycle.prefix.match(keys, count + 1).num_tokens
        if not usable:
            raise CommandRefused("every snapshot of recurrent state is in use; load when a request has ended.")
        return usable
