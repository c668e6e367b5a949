"""The engine's one exception tree. Every message is a sentence that says what was wrong, where, and what to do."""

from __future__ import annotations


class FootplateError(Exception):
    """Base of every error a person can meet; `str(error)` is a complete sentence."""


class CheckpointError(FootplateError):
    """A model file or directory that can't be used: missing, truncated, lying, or of an unknown kind."""


class TokenizerError(FootplateError):
    """A tokenizer or chat template that is missing or can't do what was asked."""


class MemoryPlanError(FootplateError):
    """The memory plan doesn't fit; the message holds the figures and the flag to change."""


class RequestError(FootplateError):
    """A request that can't be served: refused at submit, or ended by an error while it ran."""


class BatchRefused(FootplateError):
    """A batch that can't be admitted; raised before any sequence was touched."""


class CommandRefused(FootplateError):
    """An operator command that was refused; nothing was changed."""


class EngineStopped(FootplateError):
    """The engine has stopped (shut down, or failed) and takes no more work."""


class Unsupported(FootplateError):
    """A capability this model doesn't have (the seed's "Default: an error")."""


class InvariantBroken(FootplateError):
    """A recount by an owner's `check()` differs from its books: a defect of the engine itself."""


class SavedStateError(FootplateError):
    """A saved sequence that can't be written, or read: cut short, damaged, of another model, or too large."""
