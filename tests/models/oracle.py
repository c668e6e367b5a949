"""transformers as the oracle: its logits of ids cut into chunks, and its own float32 load of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch
from closeness import Expected, Split, expect
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, ids: Sequence[int], split: Split) -> Tensor:
    """transformers' logits of every position, `[tokens, vocab]`, with the ids fed in chunks of `split` over its own cache."""
    assert sum(split) == len(ids)
    cache, out, start = DynamicCache(config=model.config), [], 0
    for size in split:
        chunk = torch.tensor([ids[start : start + size]])
        out.append(model(chunk, cache=cache, use_cache=True).logits[0])
        start += size
    return torch.cat(out)


def expected_of(model: PreTrainedModel, ids: Sequence[int], splits: Sequence[Split] | None = None) -> Expected:
    """What transformers says of `ids`, and its ε over five splits."""
    return expect(lambda split: oracle_logits(model, ids, split), len(ids), splits)


class _Names:
    """What `load_gguf_checkpoint` needs of a model to map names: it builds a map anew for each of a module's descendants,
    though the first one, of the full names, has them all."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def oracle_from_gguf(path: Path, **config: Any) -> PreTrainedModel:
    """The float32 model that transformers makes of a GGUF file: its own reading of the config, names, permutation and blocks.

    `config`: what it doesn't read and would take for granted, such as a head's size. As `from_pretrained(gguf_file=…)` without
    accelerate; the file is parsed once, and its vocabulary left out, which takes most of the time.
    """
    reader = gguf.GGUFReader(path)
    for name in [name for name in reader.fields if name.startswith("tokenizer.")]:
        del reader.fields[name]
    with patch.object(gguf, "GGUFReader", lambda _: reader):
        found = AutoConfig.for_model(**{**load_gguf_checkpoint(path)["config"], **config})
        model = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=_Names(model), torch_dtype=torch.float32)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()
