"""TransformerModel: one loaded model, made by one factory, its capabilities as one object each."""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.cache.blocks import BlockPool
from engine.cache.ssm_pool import SsmPool
from engine.circuit.packed_weights import PackedGroup, packable, read_packed
from engine.config import EngineConfig
from engine.device import Device
from engine.errors import CheckpointError
from engine.families import family_named, identify, match_tensors
from engine.families.base import TensorSpec
from engine.families.config import ModelConfig
from engine.layers.rope import RopeTable
from engine.memory_plan import MemoryPlan, plan_memory, ssm_layout
from engine.model.base import ModelSsmState
from engine.model.build import build_plain
from engine.model.circuit import Circuit
from engine.model.forward import Forward
from engine.model.lifecycle import Lifecycle
from engine.model.logits import Logits
from engine.model.state_files import StateFiles
from engine.model.streams import streams_for
from engine.model.verify import Verify
from engine.model.weights import ModelWeights
from engine.view import MemoryItem, SsmView
from engine.weights.checkpoint import open_checkpoint
from engine.weights.store import WeightStore

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]


class TransformerModel:
    """A model and everything it holds on its device.

    Capabilities: `forward`, `lifecycle`, `logits`, `ssm_state`, `verify`, `streams`, `circuit`. `teardown` releases the device
    memory newest first and is idempotent; the model is a context manager that ends with it.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        plan: MemoryPlan,
        store: WeightStore,
        device: Device,
        weights: ModelWeights | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.plan = plan
        self.store = store
        self.weights = weights or ModelWeights(store)
        self.streams = streams_for(device.torch_device)
        to = device.torch_device
        slots = (plan.num_kv_blocks + 1) * engine_config.block_size
        # fill_ touches every page: memory a person sees in the plan is memory the process holds from the start.
        self.kv_cache = torch.empty(
            (config.num_attention_layers, 2, slots, config.num_kv_heads, config.head_dim), device=to, dtype=device.dtype
        )
        self.kv_cache.fill_(0)
        max_blocks = -(-plan.max_seq_len // engine_config.block_size)
        builder = BatchBuilder(
            engine_config.max_batch,
            engine_config.max_batch_tokens,
            engine_config.max_batch,
            max_blocks,
            engine_config.block_size,
            plan.num_kv_blocks * engine_config.block_size,
            to,
        )
        blocks = BlockPool(plan.num_kv_blocks, engine_config.block_size, plan.kv_block_bytes)
        layout = ssm_layout(config, engine_config)
        self.ssm_pool = SsmPool(*layout, to, device.dtype) if layout is not None else None
        self.lifecycle = Lifecycle(
            blocks,
            builder,
            engine_config.max_batch,
            plan.max_seq_len,
            plan.kv_block_bytes,
            StateFiles(self.kv_cache, self.ssm_pool, store.digest, engine_config.block_size, config.vocab_size),
            Path(engine_config.spill_dir) if engine_config.spill_dir is not None else None,
            self.streams,
            self.ssm_pool,
            engine_config.ssm_checkpoint_interval,
        )
        self.ssm_state = self.lifecycle.ssm or ModelSsmState()
        self.logits = Logits(engine_config.max_batch, config.vocab_size, config.hidden_size, to, device.dtype)
        used = {layer.rope for layer in config.layers if layer.kind == "attention"}
        ropes = {rope: RopeTable(rope, plan.max_seq_len, to, device.dtype) for rope in used}
        self._workspace_bytes = builder.num_bytes + self.logits.num_bytes + sum(table.num_bytes for table in ropes.values())
        self.forward = forward = Forward(config, ropes, builder, self.lifecycle, self.logits)
        kv_cache, ssm_pool = self.kv_cache, self.ssm_pool
        self.circuit = Circuit(
            config, device, self.weights, forward, kv_cache, lambda tensors: build_plain(config, tensors, kv_cache, ssm_pool)
        )
        self.circuit.start(engine_config.circuit)
        self.verify = Verify(forward, self.lifecycle, self.logits)

    # What the seed's TransformerModel says of itself

    @property
    def config_ref(self) -> ModelConfig:
        """The model's config."""
        return self.config

    @property
    def gpu_backend(self) -> torch.device:
        """The device the model lives on."""
        return self.device.torch_device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def bind_gpu_to_thread(self) -> None:
        """Make the model's device the calling thread's; the engine thread calls it before it uses the model."""
        self.device.bind_to_thread()

    def adopt_weight_store(self, store: WeightStore) -> None:
        """Take over the ledger of the model's own weights, for teardown."""
        self.store = store

    def memory_items(self) -> tuple[MemoryItem, ...]:
        """The bytes this model holds, by kind."""
        weights = [MemoryItem(f"weights: {kind}", size) for kind, size in self.store.bytes_by_kind().items() if size]
        pool = self.ssm_pool
        ssm = (MemoryItem("recurrent state", pool.num_bytes),) if pool is not None else ()
        borrowed = self.weights.num_borrowed_bytes
        if borrowed:
            weights.append(MemoryItem(f"weights: read again for {self.circuit.forward_disclosure().name}", borrowed))
        workspace = self._workspace_bytes + self.circuit.num_scratch_bytes
        return (*weights, MemoryItem("kv blocks", self.kv_cache.nbytes), *ssm, MemoryItem("workspace", workspace))

    def ssm_view(self) -> SsmView | None:
        """The recurrent-state pool as the console draws it, None without one."""
        prefix = self.lifecycle.prefix
        return self.ssm_pool.view(prefix.num_hits, prefix.num_lookups) if self.ssm_pool is not None else None

    def teardown(self) -> None:
        """Release the device memory this model owns, newest first; idempotent. The model can't be used afterwards."""
        if not hasattr(self, "forward"):
            return
        if self.lifecycle.spill is not None:
            self.lifecycle.spill.close()
        self.weights.give_back()
        del self.verify, self.circuit, self.forward, self.logits, self.ssm_state, self.lifecycle, self.ssm_pool, self.kv_cache
        self._workspace_bytes = 0
        self.store.teardown()
        if self.device.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def __enter__(self) -> TransformerModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.teardown()


def load_model(
    checkpoint: Checkpoint, engine_config: EngineConfig, device: Device, progress: Progress = lambda *_: None
) -> TransformerModel:
    """The model of an opened checkpoint. Everything the headers can tell is checked, and the memory plan made, before
    the first tensor is read. `progress(stage, done_bytes, total_bytes)` is called after every tensor; what it raises
    ends the load."""
    family, config = identify(checkpoint)
    specs = match_tensors(family, config, checkpoint)
    groups = packable(config, specs, checkpoint, device)
    packed = packed_at_load(config, engine_config, specs, checkpoint, device)
    plan = planned(config, engine_config, specs, packed, device)
    total = sum(checkpoint.tensors[part.source].nbytes for spec in specs for part in spec.parts)
    done = 0

    def read(spec: TensorSpec) -> Tensor:
        nonlocal done
        dtype = torch.float32 if spec.exact else device.dtype
        tensor = torch.empty(spec.stored_shape if len(spec.parts) > 1 else 0, dtype=dtype)
        for part in spec.parts:
            piece = checkpoint.read(part.source, dtype)
            if part.into:
                tensor[part.into] = piece
            else:
                tensor = piece
            done += checkpoint.tensors[part.source].nbytes
            progress(f"reading {spec.kind} weights", done, total)
        return tensor

    def note(spec: TensorSpec) -> None:
        nonlocal done
        done += checkpoint.tensors[spec.source].nbytes
        progress(f"reading {spec.kind} weights", done, total)

    def read_dense(path: Path, missing: SequenceOf[TensorSpec], into: WeightStore) -> None:
        with open_checkpoint(path) as again:
            for spec in missing:
                _enter(config, spec, again.read(spec.source, device.dtype), device, into)

    store = WeightStore()
    try:
        weights = ModelWeights(
            store,
            groups,
            read_packed(packed, checkpoint, store, note) if packed else None,
            checkpoint.path,
            read_dense,
            device.dtype,
        )
        held = {name for group in packed for name in group.names}
        for spec in specs:
            if spec.name not in held:
                _enter(config, spec, read(spec), device, store)
        return TransformerModel(config, engine_config, plan, store, device, weights)
    except BaseException:
        store.teardown()
        raise


def packed_at_load(
    config: ModelConfig, engine_config: EngineConfig, specs: SequenceOf[TensorSpec], checkpoint: Checkpoint, device: Device
) -> SequenceOf[PackedGroup]:
    """What a load holds packed: all that can be, where the circuit asked for computes from it."""
    return packable(config, specs, checkpoint, device) if engine_config.circuit in ("auto", "circuit") else ()


def random_model(config: ModelConfig, engine_config: EngineConfig, device: Device, seed: int = 0) -> TransformerModel:
    """A model of a real shape with random weights (normal, std 0.02; norms 1), made on the device."""
    specs = family_named(config.family).tensors(config, gguf=False)
    generator = torch.Generator(device.torch_device).manual_seed(seed)

    def make(spec: TensorSpec) -> Tensor:
        if spec.kind == "norm":
            return torch.full(spec.shape, 1.0 - spec.offset, device=device.torch_device, dtype=device.dtype)
        dtype = torch.float32 if spec.exact else device.dtype
        weight = torch.empty(spec.stored_shape, device=device.torch_device, dtype=dtype)
        return weight.normal_(0.0, 0.02, generator=generator)

    plan = planned(config, engine_config, specs, (), device)
    store = WeightStore()
    try:
        for spec in specs:
            _enter(config, spec, make(spec), device, store)
        return TransformerModel(config, engine_config, plan, store, device)
    except BaseException:
        store.teardown()
        raise


def planned(
    config: ModelConfig,
    engine_config: EngineConfig,
    specs: SequenceOf[TensorSpec],
    packed: SequenceOf[PackedGroup],
    device: Device,
) -> MemoryPlan:
    """The memory plan of a model whose weights `packed` are held so, all others dense. Raises as `plan_memory`."""
    held = {name for group in packed for name in group.names}
    dense = sum(torch.Size(spec.shape).numel() for spec in specs if spec.name not in held)
    return plan_memory(
        config,
        engine_config,
        weights_elements=dense,
        itemsize=device.dtype.itemsize,
        available_bytes=device.available_bytes(),
        on_gpu=device.is_cuda,
        packed_bytes=sum(group.num_bytes for group in packed),
        scratch_bytes=max((group.scratch_bytes for group in packed if group.is_projection), default=0),
    )


def _enter(config: ModelConfig, spec: TensorSpec, tensor: Tensor, device: Device, store: WeightStore) -> None:
    """Put a tensor as the file holds it into the store as the model needs it."""
    if spec.arrange is not None:
        tensor = spec.arrange(tensor)
    if spec.offset:
        tensor = tensor + spec.offset
    tensor = tensor.to(device.torch_device).contiguous()
    if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        raise CheckpointError(f"{config.name}: tensor {spec.source} holds values that aren't finite; the file is damaged.")
    store.add(spec.name, tensor, spec.kind, str(tensor.dtype).removeprefix("torch."))
