"""Tiny random Qwen2, Qwen3 and Gemma 3 checkpoints, and the GGUF files llama.cpp's converter would make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from closeness import Expected
from gguf import GGMLQuantizationType, GGUFWriter
from oracle import expected_of
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 256
WINDOW = 24
# 70 ids: the window of 24 fits almost three times; a whole number of neither 4s nor 16s nor windows.
PROMPT = [(37 * i * i + 11 * i + 5) % VOCAB for i in range(70)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
}
# A window in every second layer: as a Qwen config lists it, and as one without layer_types says it.
MIXED_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATER_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}


def make_qwen2(seed: int = 21, **changes: Any) -> Qwen2ForCausalLM:
    """A random Qwen2 in float32."""
    return _made(seed, lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})))


def make_qwen3(seed: int = 22, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 in float32, with heads of 24 channels, more than hidden / heads."""
    return _made(seed, lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 24, **changes})))


def make_gemma3(seed: int = 23, **changes: Any) -> Gemma3ForCausalLM:
    """A random Gemma 3 text model in float32: seven layers, so that the sixth is a global one and a local one comes after it."""
    sizes = {**SIZES, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
    return _made(seed, lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**sizes, **changes})))


def _made(seed: int, make: Callable[[], Any]) -> Any:
    """Norm weights and biases are random too: as transformers makes them, leaving one out would change nothing."""
    torch.manual_seed(seed)
    model = make().to(torch.float32).eval()
    around = 0.0 if isinstance(model, Gemma3ForCausalLM) else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(around, 0.1)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
    return model


@dataclass(frozen=True)
class Tiny:
    """A checkpoint directory or file, the model it was made from, and what that says of the tests' prompt."""

    path: Path
    model: PreTrainedModel
    expected: Expected


class Variants:
    """The tiny checkpoints of one family by the names of their variants; each is made once."""

    def __init__(self, make: Callable[..., PreTrainedModel], changes: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
        self._make, self._changes, self._directory = make, changes, directory
        self._made: dict[str, Tiny] = {}

    def __getitem__(self, name: str) -> Tiny:
        if name not in self._made:
            model = self._make(**self._changes[name])
            path = self._directory / str(len(self._made))
            model.save_pretrained(path)
            self._made[name] = Tiny(path, model, expected_of(model, PROMPT))
        return self._made[name]


def rounded_to(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """A copy of the model, its matrices as `kind` can represent them: by the gguf package's own way there and back."""
    copy = type(model)(model.config).to(torch.float32).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() == 2:
                stored = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, kind).astype(np.float32)))
    return copy


def write_gguf(
    model: PreTrainedModel, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **metadata: int | float | str
) -> None:
    """The model as llama.cpp's convert_hf_to_gguf.py writes it, its matrices stored as `kind`, everything else in F32.

    `metadata`: keys to add or to replace, the dots of their names (after the architecture's) written as two underscores.
    """
    config = model.config
    arch = {"qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}[config.model_type]
    gemma = arch == "gemma3"
    ropes = config.rope_parameters
    rope = ropes["full_attention"] if gemma else ropes
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if arch != "qwen2":  # its converter leaves the head's size to hidden / heads
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if gemma:
        keys["attention.sliding_window"] = config.sliding_window
        local_theta = float(ropes["sliding_attention"]["rope_theta"])
        if local_theta != 10000.0:
            keys["rope.freq_base_swa"] = local_theta
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    keys |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = GGUFWriter(path, arch)
    writer.add_name("tiny")
    for key, value in keys.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        data = tensor.detach().numpy()
        to = f"{names.get_name(stem)}.{suffix}"
        if data.ndim == 1:
            # `Gemma3Model.modify_tensors`: the norms' weights are stored with their offset of 1 added.
            writer.add_tensor(to, data.astype(np.float32) + (1.0 if gemma and stem.endswith("norm") else 0.0))
        else:
            writer.add_tensor(to, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
