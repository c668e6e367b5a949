"""EngineConfig: every engine flag of the command line, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import FootplateError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float32")
CIRCUITS = ("auto", "circuit", "circuit-reference", "legacy")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with; each field is the flag of the same name.

    `None` (and "auto") mean "decided at load time from the checkpoint and the machine"; the
    decision is shown in the view. The ssm_ fields concern hybrid models: snapshot slots of recurrent state, tokens between the
    snapshots of a long answer, and verify rows a sequence can roll back to. spill_dir: where the states of preempted requests
    go; without it they are computed again. Raises `FootplateError` naming the flag when a value can't work.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    circuit: str = "auto"
    threads: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    max_seq_len: int | None = None
    max_batch: int = 16
    max_batch_tokens: int = 512
    ssm_cache_slots: int = 16
    ssm_checkpoint_interval: int = 256
    ssm_draft_rows: int = 0
    spill_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise FootplateError("--model is empty; give a checkpoint directory, a .gguf file or a model's name.")
        if self.device not in DEVICES:
            raise FootplateError(f"--device {self.device!r} is unknown; choose one of {', '.join(DEVICES)}.")
        if self.dtype not in DTYPES:
            raise FootplateError(f"--dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
        if self.circuit not in CIRCUITS:
            raise FootplateError(f"--circuit {self.circuit!r} is unknown; choose one of {', '.join(CIRCUITS)}.")
        for flag in ("threads", "num_kv_blocks", "block_size", "max_seq_len", "max_batch", "max_batch_tokens"):
            value = getattr(self, flag)
            if value is None and flag in ("threads", "num_kv_blocks", "max_seq_len"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FootplateError(f"--{flag.replace('_', '-')} must be a whole number of at least 1, not {value!r}.")
        for flag, least in (("ssm_cache_slots", 0), ("ssm_checkpoint_interval", 1), ("ssm_draft_rows", 0)):
            value = getattr(self, flag)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise FootplateError(f"--{flag.replace('_', '-')} must be a whole number of at least {least}, not {value!r}.")
        if self.max_batch_tokens < self.max_batch:
            raise FootplateError(
                f"--max-batch-tokens {self.max_batch_tokens} is below --max-batch {self.max_batch}: a step could not "
                "hold one token of every running sequence. Raise the first or lower the second."
            )
