"""Tiny random Llama checkpoints, saved by transformers, and the GGUF files llama.cpp's converter would make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from closeness import Expected
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 256
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # small, so that every kind of wavelength occurs in a head of 16 channels
}
# What each variant changes of the base: grouped queries (4 heads on 2), a head of its own, no biases, plain rope.
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "one kv head, wide heads": {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "large rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
}


@dataclass(frozen=True)
class TinyLlama:
    """A checkpoint directory, the model it was saved from, and what that says of the tests' prompt."""

    path: Path
    model: LlamaForCausalLM
    expected: Expected


def make_llama(seed: int = 20, **changes: Any) -> LlamaForCausalLM:
    """A random model in float32. Norm weights and biases are random too: as transformers makes them (ones, zeros), leaving
    one out would change nothing."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.1)
    return model


def rounded_to(model: LlamaForCausalLM, kind: GGMLQuantizationType) -> LlamaForCausalLM:
    """A copy of the model, its matrices as `kind` can represent them: by the gguf package's own way there and back."""
    copy = LlamaForCausalLM(model.config).to(torch.float32).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() == 2:
                stored = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, kind).astype(np.float32)))
    return copy


def write_gguf(model: LlamaForCausalLM, path: Path, kind: GGMLQuantizationType, metadata: Mapping[str, Any] | None = None) -> None:
    """The model as llama.cpp's convert_hf_to_gguf.py writes it, its matrices stored as `kind`, everything else in F32.

    `metadata`: keys to add or to replace, ints or floats or strings.
    """
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rope = config.rope_parameters
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    keys: dict[str, Any] = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(rope["rope_theta"]),
        "llama.vocab_size": config.vocab_size,
    }
    if rope["rope_type"] == "linear":
        keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float(rope["factor"])}
    for key, value in {**keys, **(metadata or {})}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)

    def add_tensor(name: str, tensor: Tensor) -> None:
        data = tensor.detach().numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        if stem.endswith(("q_proj", "k_proj")):
            tensor = _permute(tensor, heads if stem.endswith("q_proj") else kv_heads)
        add_tensor(f"{names.get_name(stem)}.{suffix}", tensor)
    if rope["rope_type"] == "llama3":
        add_tensor("rope_freqs.weight", _llama3_divisors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permute(weights: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of q and k rows (`LlamaModel.permute`): the halves of each head interleaved."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """What the converter divides each frequency by (`LlamaModel.generate_extra_tensors`)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors, dtype=torch.float32)
