"""Which forward serves: `legacy`, the plain layer loop, or a circuit compiled for this model; and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.circuit.executor import Executor
from engine.circuit.ir import model_ops
from engine.circuit.packed_rules import PACKED_RULES
from engine.circuit.plan import Plan, compile_plan
from engine.circuit.rules import REFERENCE_RULES, Site
from engine.device import Device
from engine.errors import Unsupported
from engine.families.config import ModelConfig
from engine.model.base import ModelCircuit
from engine.model.forward import Forward, PlainLayers
from engine.model.weights import ModelWeights
from engine.view import ForwardView, LaunchView
from kernels.packed_linear.fused import Scratch

LEGACY, REFERENCE, FUSED = "legacy", "circuit-reference", "circuit"
CIRCUITS = (LEGACY, REFERENCE, FUSED)


def chosen(name: str, packed: bool) -> str:
    """The circuit that the flag's `name` stands for: "auto" is the circuit where the model's weights are held packed, which it wins
    by computing from, and else legacy."""
    return name if name != "auto" else FUSED if packed else LEGACY


@dataclass(frozen=True, slots=True)
class _Served:
    """What serves: its name, and for a circuit its plan and what runs it; for those that read dense weights, the plain layers."""

    name: str
    plain: PlainLayers | None
    executor: Executor | None
    site: Site | None = None

    @property
    def plan(self) -> Plan | None:
        return self.executor.plan if self.executor is not None else None


class Circuit(ModelCircuit):
    """The circuits of one model. `set_forward` acts from the next step on; nothing runs when it is called."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        weights: ModelWeights,
        forward: Forward,
        kv_cache: Tensor,
        build: Callable[[Mapping[str, Tensor]], PlainLayers],
    ) -> None:
        self._config = config
        self._device = device
        self._weights = weights
        self._forward = forward
        self._kv_cache = kv_cache
        self._build = build
        self._served = _Served(LEGACY, None, None)

    @property
    def plan(self) -> Plan | None:
        """The plan that serves, None for legacy."""
        return self._served.plan

    @property
    def site(self) -> Site | None:
        """What the plan that serves was compiled for, None for legacy."""
        return self._served.site

    @property
    def executor(self) -> Executor | None:
        """What runs the plan, None for legacy."""
        return self._served.executor

    @property
    def num_scratch_bytes(self) -> int:
        """Bytes that the circuit that serves dequantises into."""
        return self.site.scratch.num_bytes if self.site is not None else 0

    def start(self, name: str) -> None:
        """Serve with `name` from the start; "auto": the circuit where the model was loaded packed, else legacy."""
        self._serve(self._made(chosen(name, self._weights.loaded_packed)))

    def set_forward(self, name: str) -> None:
        """Serve with circuit `name` from the next step. Raises `Unsupported` with the reason where it can't serve this model;
        what served before then serves on, and nothing has changed."""
        if name == self._served.name:
            return
        self._serve(self._made(name))

    def forward_disclosure(self) -> ForwardView:
        """The forward that runs now."""
        plan = self._served.plan
        if plan is None:
            return ForwardView(name=LEGACY, digest="", launches_per_step=None)
        return ForwardView(name=plan.name, digest=plan.digest, launches_per_step=plan.launches_per_step)

    def last_profile(self) -> tuple[LaunchView, ...]:
        """The rules of the plan that serves, with what each took of the step profiled last; empty for legacy."""
        executor = self._served.executor
        return executor.profile if executor is not None else ()

    def profile_next_step(self) -> None:
        """Time each launch of the next step. Raises `Unsupported` for legacy, which has no launches to time."""
        if self._served.executor is None:
            raise Unsupported("legacy has no plan to profile; serve with a circuit first.")
        self._served.executor.profile_next_step()

    def _serve(self, served: _Served) -> None:
        self._forward.serve(served.plain, served.executor)
        self._served = served
        if self._needs_packed(served.name) == self._weights.loaded_packed:
            self._weights.give_back()

    def _needs_packed(self, name: str) -> bool:
        return name == FUSED and bool(self._weights.groups)

    def _made(self, name: str) -> _Served:
        if name not in CIRCUITS:
            raise Unsupported(f"there is no circuit {name!r}; these are: {', '.join(CIRCUITS)}.")
        if name == FUSED and self._device.is_cuda:
            raise Unsupported(f"circuit {name!r} can't serve this model: its rules are a CPU's, and this model is on a GPU.")
        packed = self._needs_packed(name)
        held = self._weights.num_borrowed_bytes
        try:
            self._weights.borrow(packed, self._device.available_bytes())
        except Unsupported as error:
            raise Unsupported(f"circuit {name!r} can't serve this model: {error}") from error
        try:
            plain = None if packed else self._build(self._weights.dense_tensors())
            if name == LEGACY:
                return _Served(name, plain, None)
            rules = (*PACKED_RULES, *REFERENCE_RULES) if name == FUSED else REFERENCE_RULES
            site = self._site(plain, packed)
            plan = compile_plan(name, model_ops(self._config), rules, site)
            return _Served(name, plain, Executor(plan, self._kv_cache), site)
        except BaseException:
            if not held:
                self._weights.give_back()
            raise

    def _site(self, plain: PlainLayers | None, packed: bool) -> Site:
        config, groups = self._config, self._weights.groups if packed else ()
        attention = [index for index, layer in enumerate(config.layers) if layer.kind == "attention"]
        return Site(
            config=config,
            device=self._device.torch_device,
            dtype=self._device.dtype,
            tensors=self._weights.dense_tensors(),
            packed=self._weights.packed if packed else {},
            scratch=Scratch([self._weights.packed[group.names] for group in groups if group.is_projection]),
            layers=plain.layers if plain is not None else (),
            kv_cache=self._kv_cache,
            ropes=self._forward.ropes,
            num_rows={spec.name: spec.shape[0] for group in groups for spec in group.specs},
            kv_layer={layer: index for index, layer in enumerate(attention)},
        )
