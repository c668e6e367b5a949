"""Tiny random hybrid checkpoints of the Qwen line: Qwen3.5, Qwen3.5-MoE and Qwen3-Next, saved by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 256
# Two key heads for four value heads; 128 channels of the convolution; two kinds of layers, the last one recurrent.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def make_qwen3_5(seed: int = 31, **changes: Any) -> PreTrainedModel:
    """A random Qwen3.5 text model in float32."""
    sizes = {**SIZES, "rope_parameters": ROPE, **changes}
    return _made(seed, lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)))


def make_qwen3_5_moe(seed: int = 32, **changes: Any) -> PreTrainedModel:
    """A random Qwen3.5-MoE text model in float32."""
    sizes = {**SIZES, **EXPERTS, "rope_parameters": ROPE, **changes}
    return _made(seed, lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**sizes)))


def make_qwen3_next(seed: int = 33, **changes: Any) -> PreTrainedModel:
    """A random Qwen3-Next in float32."""
    sizes = {**SIZES, **EXPERTS, "rope_parameters": ROPE, "norm_topk_prob": True, **changes}
    return _made(seed, lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)))


def _made(seed: int, make: Callable[[], Any]) -> Any:
    """Norms, decays and biases are random too, for left as transformers makes them (ones, zeros) leaving one out would change
    nothing; decays are slow enough that a state still matters a hundred tokens later; routers choose clearly."""
    torch.manual_seed(seed)
    model = make().to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith(("norm.weight", ".bias")):
                parameter.normal_(0.0, 0.2)
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.4)
            elif name.endswith("A_log"):
                parameter.uniform_(-5.0, 0.0)
            elif name.endswith("dt_bias"):
                parameter.normal_(0.0, 0.5)
            elif name.endswith("mlp.gate.weight") or ".experts." in name:
                parameter.normal_(0.0, 0.2)
    return model


def save_beside_vision(model: PreTrainedModel, directory: Path, architecture: str, model_type: str) -> None:
    """The text model as a checkpoint with vision holds it: its config in text_config, its tensors under
    model.language_model., and others beside it that a text engine has no use for."""
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    text = {**config, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    whole = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32},
        "image_token_id": 250,
        "video_token_id": 251,
        "vision_start_token_id": 252,
        "vision_end_token_id": 253,
        "tie_word_embeddings": tied,
    }
    (directory / "config.json").write_text(json.dumps(whole))
    [file] = directory.glob("*.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor.clone()
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    garbage = {
        "mtp.fc.weight": torch.full((64, 128), 3.0),
        "mtp.layers.0.input_layernorm.weight": torch.full((64,), 3.0),
        "model.visual.blocks.0.attn.qkv.weight": torch.full((96, 32), 3.0),
    }
    save_file({**tensors, **garbage}, file, metadata={"format": "pt"})
