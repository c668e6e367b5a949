"""Qwen3.5, text: Gated DeltaNet and gated attention layers with dense MLPs. Vision and drafting tensors are left unread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.families.base import TensorSpec
from engine.families.config import ModelConfig, Reader
from engine.families.decoder import SpecList
from engine.families.hybrid import gated_delta_tensors, hybrid_config

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint


class Qwen35:
    name = "qwen3_5"
    architectures: tuple[str, ...] = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    gguf_architectures: tuple[str, ...] = ()

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        text = reader.get("text_config")
        if not isinstance(text, dict):
            return hybrid_config(reader, self.name, name)
        # A checkpoint with vision keeps its text model one level down.
        inner = Reader(text, f"{reader.where} (text_config)")
        tied = reader.flag("tie_word_embeddings", bool(text.get("tie_word_embeddings", False)))
        inner = inner.with_values(tie_word_embeddings=tied)
        return hybrid_config(inner, self.name, name, source_prefix="model.language_model.")

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        raise CheckpointError(f"{reader.where}: GGUF files of this family aren't supported; use its safetensors.")

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        specs = SpecList(config, gguf, config.source_prefix)
        specs.add("model.embed_tokens.weight", "", (config.vocab_size, config.hidden_size), "embedding")
        for i, layer in enumerate(config.layers):
            to = f"model.layers.{i}."
            specs.norm(to + "input_layernorm", "", config.hidden_size)
            if layer.kind == "attention":
                specs.attention(to, "")
            else:
                gated_delta_tensors(specs, to, fused=False)
            specs.norm(to + "post_attention_layernorm", "", config.hidden_size)
            specs.mlp(to, "")
        specs.end()
        return specs.specs

    def ignored(self, source: str) -> bool:
        return source.startswith(("mtp.", "model.visual.")) or source.endswith("rotary_emb.inv_freq")


FAMILY = Qwen35()
