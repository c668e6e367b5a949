"""What a family is: how its checkpoints name things, and how a layer is put together."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.families.config import ModelConfig, Reader

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a file that becomes part of a larger one: its name there, its shape, and the index of the larger one that it
    fills; an empty index: it is the whole."""

    source: str
    shape: tuple[int, ...]
    into: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a model needs. `kind` is its line in the memory picture; `source` its name in the file.

    parts: what it is put together from where the file holds no `source` (a mixture's experts, often stored one by one).
    arrange: makes it of what the file holds, whose shape is source_shape (None: the same as `shape`). GGUF's llama, for one,
    keeps the rows of q and k in another order. offset: added on load. exact: kept in fp32 whatever the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    source: str
    arrange: Callable[[Tensor], Tensor] | None = None
    source_shape: tuple[int, ...] | None = None
    offset: float = 0.0
    exact: bool = False
    parts: tuple[TensorPart, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape the file must have it in."""
        return self.shape if self.source_shape is None else self.source_shape

    def parts_in(self, tensors: Container[str]) -> tuple[TensorPart, ...]:
        """What to read of a file that holds these tensors: `source`, or the parts where it isn't there."""
        if self.parts and self.source not in tensors:
            return self.parts
        return (TensorPart(self.source, self.stored_shape),)


class Family(Protocol):
    """One model family: a module-level object in a file of its own, listed in `engine.families`."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """The `architectures` of a config.json it takes."""

    @property
    def gguf_architectures(self) -> tuple[str, ...]:
        """The `general.architecture` of GGUF files it takes."""

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        """The ModelConfig of a config.json."""

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        """The ModelConfig of GGUF metadata; `checkpoint` tells what tensors there are."""

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        """Every tensor the model needs, in load order, under this engine's (Hugging Face's) names."""

    def ignored(self, source: str) -> bool:
        """Whether a tensor of the file may be left unread because it changes nothing."""
