"""The memory plan: what a model will take, worked out from its config before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.ssm_layout import SsmShape, SsmSizes
from engine.config import EngineConfig
from engine.errors import MemoryPlanError
from engine.families.config import ModelConfig

# Where --num-kv-blocks isn't given: tokens a CPU's pool is made for at most, and the share of what is left after weights
# and workspace that the pool may take. A GPU's memory is the engine's own; a CPU's is shared with everything else.
CPU_KV_TOKENS = 65536
CPU_KV_SHARE = 0.25
GPU_KV_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a model will take. `kv_bytes` = (num_kv_blocks + 1) · kv_block_bytes: one block more than are ever handed out,
    always zero, stands in for padding."""

    weights_bytes: int
    kv_bytes: int
    ssm_bytes: int
    workspace_bytes: int
    available_bytes: int
    num_kv_blocks: int
    kv_block_bytes: int
    max_seq_len: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.ssm_bytes + self.workspace_bytes


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    weights_elements: int,
    itemsize: int,
    available_bytes: int,
    on_gpu: bool,
    packed_bytes: int = 0,
    scratch_bytes: int = 0,
) -> MemoryPlan:
    """The MemoryPlan of a model whose elements take `itemsize` bytes each, and `packed_bytes` more of weights that are held packed,
    with `scratch_bytes` to compute with them. Raises `MemoryPlanError`, with the figures and
    the flag to change, when it doesn't fit into `available_bytes`."""
    if config.max_seq_len is not None and config.max_seq_len > model.max_position:
        raise MemoryPlanError(
            f"--max-seq-len {config.max_seq_len} is over what {model.name} was made for, {model.max_position} tokens; lower it."
        )
    max_seq_len = config.max_seq_len or model.max_position
    size = config.block_size
    layer_token_bytes = 2 * model.num_kv_heads * model.head_dim * itemsize
    block_bytes = layer_token_bytes * max(model.num_attention_layers, 1) * size
    weights = weights_elements * itemsize + packed_bytes
    workspace = _workspace_bytes(model, config, max_seq_len, itemsize, layer_token_bytes) + scratch_bytes
    ssm = _ssm_bytes(model, config, itemsize)
    left = available_bytes - weights - workspace - ssm
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
    elif on_gpu:
        # Twice what a full batch of full contexts needs: the rest could only serve the prefix cache, and others need it more.
        most = 2 * config.max_batch * -(-max_seq_len // size)
        blocks = min(most, int(left * GPU_KV_SHARE) // block_bytes - 1)
    else:
        blocks = min(-(-min(2 * max_seq_len, CPU_KV_TOKENS) // size), int(left * CPU_KV_SHARE) // block_bytes - 1)
    blocks = max(blocks, 1)
    plan = MemoryPlan(weights, (blocks + 1) * block_bytes, ssm, workspace, available_bytes, blocks, block_bytes, max_seq_len)
    if plan.total_bytes > available_bytes:
        figures = (
            f"{model.name} needs {_mib(weights)} for weights, {_mib(plan.kv_bytes)} for {plan.num_kv_blocks} KV blocks, "
            f"{_mib(ssm)} for recurrent state and {_mib(workspace)} of workspace, {_mib(plan.total_bytes)} in all; "
            f"{_mib(available_bytes)} are available"
        )
        if config.num_kv_blocks is not None and left >= 2 * block_bytes:
            advice = f"lower --num-kv-blocks to {left // block_bytes - 1} or less"
        elif ssm > available_bytes // 2:
            advice = "lower --ssm-cache-slots, --max-batch or --ssm-draft-rows"
        elif itemsize == 4:
            advice = "use --dtype bfloat16, lower --max-batch-tokens or --max-seq-len, or choose a smaller model"
        else:
            advice = "lower --max-batch-tokens or --max-seq-len, or choose a smaller model"
        raise MemoryPlanError(f"{figures}: {advice}.")
    return plan


def ssm_layout(model: ModelConfig, config: EngineConfig) -> tuple[SsmShape, SsmSizes] | None:
    """The recurrent-state pool of a hybrid model, None for one without recurrent layers."""
    delta = model.gated_delta
    layers = model.num_layers - model.num_attention_layers
    if delta is None or not layers:
        return None
    shape = SsmShape(layers, delta.num_v_heads, delta.key_dim, delta.value_dim, delta.conv_channels, delta.conv_kernel - 1)
    return shape, SsmSizes(config.max_batch, config.ssm_draft_rows, config.ssm_cache_slots)


def _ssm_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    layout = ssm_layout(model, config)
    return layout[1].num_slots * layout[0].slot_bytes(itemsize) if layout is not None else 0


def _workspace_bytes(model: ModelConfig, config: EngineConfig, max_seq_len: int, itemsize: int, layer_token_bytes: int) -> int:
    """An upper estimate of a step's temporaries: activations, gathered pages of one layer, masks, and the logits arena."""
    rows = config.max_batch_tokens
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    moe, inter = model.moe, model.intermediate_size
    experts = 0
    if moe is not None:
        # All rows may choose one expert; their sums are fp32. Routing takes ten numbers of 8 bytes for each expert used.
        inter = max(inter, moe.intermediate_size + moe.shared_intermediate_size)
        experts = rows * (8 * model.hidden_size + 8 * moe.num_experts + 80 * moe.top_k)
    activations = rows * itemsize * (6 * model.hidden_size + 3 * inter + 3 * heads) + experts
    pages = layer_token_bytes * max_seq_len * 2
    masks = rows * max_seq_len * (1 + itemsize)
    arena = config.max_batch * (model.vocab_size * (itemsize + 8) + model.hidden_size * itemsize)
    return activations + pages + masks + arena


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
