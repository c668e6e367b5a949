"""Gemma 3, text: local and global layers, norms around each branch, scaled embeddings (arXiv 2503.19786)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.families.base import TensorSpec
from engine.families.config import HARMLESS_KEYS, LayerConfig, ModelConfig, Reader, RopeConfig, read_rope, rope_from_table
from engine.families.decoder import decoder_tensors, gguf_decoder_config, read_windows

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint

LOCAL_THETA = 10000.0
LAYERS_PER_GLOBAL = 6


class Gemma3:
    name = "gemma3"
    architectures: tuple[str, ...] = ("Gemma3ForCausalLM",)
    gguf_architectures: tuple[str, ...] = ("gemma3",)

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        hidden, head_dim = reader.whole("hidden_size"), reader.whole("head_dim", 256)
        reader.expect("hidden_activation", "gelu_pytorch_tanh")
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "quantization_config"):
            reader.expect(key)
        reader.expect("use_bidirectional_attention", False)
        reader.expect("attention_bias", False)
        if reader.get("layer_types") is None:
            # Configs from before layer_types say it by this pattern: every n-th layer is global.
            every = reader.whole("sliding_window_pattern", LAYERS_PER_GLOBAL)
            kinds = _kinds(reader.layer_count("num_hidden_layers"), max(every, 1))
            reader = reader.with_values(layer_types=kinds, sliding_window=reader.whole("sliding_window", 4096))
        windows = read_windows(reader)
        local, full = self._ropes(reader, head_dim)
        config = ModelConfig(
            family=self.name,
            name=name,
            hidden_size=hidden,
            intermediate_size=reader.whole("intermediate_size"),
            num_heads=reader.whole("num_attention_heads"),
            num_kv_heads=reader.whole("num_key_value_heads"),
            head_dim=head_dim,
            vocab_size=reader.whole("vocab_size", 262208),
            max_position=reader.whole("max_position_embeddings", 131072),
            rms_eps=reader.number("rms_norm_eps", 1e-6),
            layers=tuple(LayerConfig(window=w, rope=full if w is None else local) for w in windows),
            activation="gelu_tanh",
            attention_scale=max(reader.number("query_pre_attn_scalar", 256), 1e-9) ** -0.5,
            qk_norm=True,
            norm_offset=1.0,
            sandwich_norms=True,
            embedding_scale=max(hidden, 1) ** 0.5,
            tied_head=reader.flag("tie_word_embeddings", True),
        )
        reader.ignore(*HARMLESS_KEYS, "sliding_window_pattern", "_sliding_window_pattern")
        reader.refuse_rest()
        return config

    def _ropes(self, reader: Reader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
        """(local, global) rope: from transformers 5's two tables, or the older keys."""
        tables = reader.get("rope_parameters")
        if isinstance(tables, dict) and {"full_attention", "sliding_attention"} <= set(tables):
            found = []
            for kind in ("sliding_attention", "full_attention"):
                table = tables[kind]
                if not isinstance(table, dict):
                    raise CheckpointError(f"{reader.where}: rope_parameters.{kind} must be a table, not {table!r}.")
                inner = Reader(table, f"{reader.where} (rope)")
                default = LOCAL_THETA if kind == "sliding_attention" else 1e6
                found.append(rope_from_table(table, inner.number("rope_theta", default), head_dim, reader.where))
            return found[0], found[1]
        local = RopeConfig(theta=reader.number("rope_local_base_freq", LOCAL_THETA), rotary_dim=head_dim)
        return local, read_rope(reader, head_dim, 1e6)

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        config = gguf_decoder_config(reader, "gemma3", self.name, name, checkpoint)
        window = reader.whole("gemma3.attention.sliding_window")
        full = config.layers[0].rope
        local = RopeConfig(theta=reader.number("gemma3.rope.freq_base_swa", LOCAL_THETA), rotary_dim=full.rotary_dim)
        layers = tuple(
            LayerConfig(window=window, rope=local) if kind == "sliding_attention" else LayerConfig(rope=full)
            for kind in _kinds(config.num_layers, LAYERS_PER_GLOBAL)
        )
        for key in ("gemma3.attn_logit_softcapping", "gemma3.final_logit_softcapping"):
            reader.expect(key, 0.0)
        # The file doesn't say query_pre_attn_scalar: it is head_dim but for the 27B model (62 layers), which has hidden / heads.
        scalar = config.hidden_size / config.num_heads if config.num_layers == 62 else config.head_dim
        reader.refuse_rest("gemma3.")
        # The converter stores norm weights with their offset of 1 added.
        return replace(
            config,
            layers=layers,
            activation="gelu_tanh",
            attention_scale=scalar**-0.5,
            sandwich_norms=True,
            embedding_scale=config.hidden_size**0.5,
        )

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        return decoder_tensors(config, gguf, None)

    def ignored(self, source: str) -> bool:
        return source.endswith("rotary_emb.inv_freq")


def _kinds(layers: int, every: int) -> list[str]:
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]


FAMILY = Gemma3()
