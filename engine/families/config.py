"""ModelConfig: what a checkpoint says of its architecture, in one vocabulary for every family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base θ, rotated channels, and what stretches it. `kind` "default", "linear" (positions divided by
    `factor`), or "llama3" (wavelengths over original_max_position / low_freq_factor divided by `factor`, those in between
    blended; Llama 3.1's model card). `freq_factors` (GGUF's rope_freqs) divide each inverse frequency directly."""

    theta: float = 10000.0
    rotary_dim: int = 0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: tuple[float, ...] = ()

    def inv_freq(self) -> list[float]:
        """Radians per token of each rotated pair, `rotary_dim / 2` numbers (arXiv 2104.09864, section 3.2.2)."""
        freqs = [self.theta ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]
        if self.freq_factors:
            freqs = [f / divisor for f, divisor in zip(freqs, self.freq_factors, strict=True)]
        if self.kind == "linear":
            return [f / self.factor for f in freqs]
        if self.kind == "llama3":
            return [self._llama3(f) for f in freqs]
        return freqs

    def _llama3(self, freq: float) -> float:
        wavelength = 2 * math.pi / freq
        if wavelength < self.original_max_position / self.high_freq_factor:
            return freq
        if wavelength > self.original_max_position / self.low_freq_factor:
            return freq / self.factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * freq / self.factor + smooth * freq


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What distinguishes one layer: `kind` of its token mixer ("attention" or "gated_delta"); `window` in tokens (a query sees
    keys in (p − window, p]), None for full attention; which rope it uses; its `mlp`, "dense" or "moe"."""

    kind: str = "attention"
    window: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    mlp: str = "dense"


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Sizes of Gated DeltaNet layers (arXiv 2412.06464): heads, channels a head, and taps of the causal convolution before it."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """Channels that go through the convolution: q, k and v side by side."""
        return 2 * self.num_k_heads * self.key_dim + self.num_v_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts: how many, how many of them a token uses, and each one's width. norm_topk: whether the weights of those
    used are divided by their sum. shared_intermediate_size: the width of an expert that every token uses too; 0: there is none."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk: bool
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a decoder. Sizes count elements; `max_position` is the context it was made for, in tokens.

    source_prefix: what the file's tensor names begin with instead of "model.". norm_offset: added to every norm weight (Gemma
    stores w − 1). sandwich_norms: norms after attention and MLP too. output_gate: q_proj makes a sigmoid gate for attention's
    output too. gated_delta: sizes of the recurrent layers, None without any. moe: the layers' mixtures of experts, None without
    any. attention_scale: multiplies q·k. embedding_scale: multiplies the embedded rows.
    """

    family: str
    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"
    attention_scale: float = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    tied_head: bool = False
    source_prefix: str = "model."
    output_gate: bool = False
    gated_delta: GatedDeltaConfig | None = None
    moe: MoeConfig | None = None

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values in the paged cache."""
        return sum(layer.kind == "attention" for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def check(self, where: str) -> None:
        """Raise `CheckpointError` for sizes that can't be a model, before anything is sized by them."""
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position"):
            value = getattr(self, name)
            if not 1 <= value <= 2**27:
                raise CheckpointError(f"{where}: {name} is {value}; a model has between 1 and {2**27}. The file is damaged.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{where}: {self.num_heads} heads can't share {self.num_kv_heads} kv heads evenly.")
        if not (math.isfinite(self.rms_eps) and self.rms_eps > 0):
            raise CheckpointError(f"{where}: the norm epsilon is {self.rms_eps}; it must be a positive number.")
        delta = self.gated_delta
        if delta is not None:
            sizes = (delta.num_k_heads, delta.num_v_heads, delta.key_dim, delta.value_dim, delta.conv_kernel - 1)
            if not all(1 <= size <= 2**16 for size in sizes) or delta.num_v_heads % delta.num_k_heads:
                raise CheckpointError(f"{where}: its Gated DeltaNet sizes ({delta}) can't be those of a model.")
        moe = self.moe
        if moe is not None:
            widths = (moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size + 1)
            if not all(1 <= width <= 2**16 for width in widths) or not 1 <= moe.top_k <= moe.num_experts:
                raise CheckpointError(f"{where}: its mixture of experts ({moe}) can't be that of a model.")
        for layer in self.layers:
            if layer.kind != "attention":
                continue
            rope = layer.rope
            if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim:
                raise CheckpointError(f"{where}: {rope.rotary_dim} rotary channels don't fit a head of {self.head_dim}.")
            if rope.freq_factors and (len(rope.freq_factors) != rope.rotary_dim // 2 or min(rope.freq_factors) <= 0):
                raise CheckpointError(
                    f"{where}: {len(rope.freq_factors)} rope factors don't fit {rope.rotary_dim // 2} rotated pairs."
                )
            if not all(math.isfinite(x) and x > 0 for x in (rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor)):
                raise CheckpointError(f"{where}: a rope parameter isn't a positive number ({rope}).")


class Reader:
    """Typed reads from a config.json or GGUF metadata; remembers what was understood, so the rest can be refused by name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()

    def whole(self, key: str, default: int | None = None) -> int:
        """The integer at `key`; raises `CheckpointError` when it is missing without a default, or no integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {key} must be a whole number, not {value!r}.")
        return value

    def layer_count(self, key: str) -> int:
        """The number of layers at `key`, bounded before anything is made that long."""
        value = self.whole(key)
        if not 1 <= value <= 4096:
            raise CheckpointError(f"{self.where}: {key} is {value}; between 1 and 4096 layers are possible. The file is damaged.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The number at `key`, as a float."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.where}: {key} must be a number, not {value!r}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """The boolean at `key`."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} must be true or false, not {value!r}.")
        return value

    def text(self, key: str, default: str) -> str:
        """The string at `key`."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} must be a string, not {value!r}.")
        return value

    def get(self, key: str) -> Any:
        """The value at `key`, or None."""
        self._read.add(key)
        return self.values.get(key)

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing; the checkpoint is incomplete.")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse `key` by name when its value would change the maths in a way this engine doesn't know."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.where}: {key} = {value!r} isn't supported (only {', '.join(map(repr, allowed))}).")

    def with_values(self, **values: Any) -> Reader:
        """The same reader with some values put in; what was read so far stays read."""
        other = Reader({**self.values, **values}, self.where)
        other._read = self._read
        return other

    def ignore(self, *keys: str) -> None:
        """Note keys that change nothing of the forward pass."""
        self._read.update(keys)

    def refuse_rest(self, prefix: str = "") -> None:
        """Refuse by name any key under `prefix` that was neither read nor ignored, unless it is null, false, empty or zero."""
        for key, value in self.values.items():
            if key.startswith(prefix) and key not in self._read and value not in (None, False, 0, "", [], {}):
                raise CheckpointError(
                    f"{self.where}: {key} = {str(value)[:60]!r} isn't understood, and it may change the result; "
                    "this checkpoint needs a newer footplate."
                )


# Keys of a config.json that have no bearing on the forward pass of a text decoder.
HARMLESS_KEYS = (
    "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures", "attention_dropout",
    "attn_implementation", "auto_map", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "dtype", "early_stopping", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "is_llama_config", "label2id", "length_penalty", "max_length", "max_window_layers", "min_length", "model_type",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "rope_interleaved", "sep_token_id", "temperature",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers_version", "transformers.js_config", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
)  # fmt: skip


def read_rope(reader: Reader, rotary_dim: int, default_theta: float) -> RopeConfig:
    """The RopeConfig of a config.json, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    parameters = reader.get("rope_parameters")
    scaling = reader.get("rope_scaling")
    table = parameters if isinstance(parameters, dict) else scaling if isinstance(scaling, dict) else {}
    theta = reader.number("rope_theta", float(table.get("rope_theta", default_theta)))
    return rope_from_table(table, theta, rotary_dim, reader.where)


def rope_from_table(table: Mapping[str, Any], theta: float, rotary_dim: int, where: str) -> RopeConfig:
    """The RopeConfig of one rope table; a kind or key it doesn't know is refused by name."""
    inner = Reader(table, f"{where} (rope)")
    kind = inner.text("rope_type", inner.text("type", "default"))
    inner.ignore("rope_theta", "rope_type", "type", "partial_rotary_factor")
    if kind == "default":
        rope = RopeConfig(theta=theta, rotary_dim=rotary_dim)
    elif kind == "linear":
        rope = RopeConfig(theta=theta, rotary_dim=rotary_dim, kind=kind, factor=inner.number("factor"))
    elif kind == "llama3":
        rope = RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            kind=kind,
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position=inner.whole("original_max_position_embeddings"),
        )
    else:
        raise CheckpointError(f"{where}: rope type {kind!r} isn't supported (default, linear and llama3 are).")
    inner.refuse_rest()
    return rope
