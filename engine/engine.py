"""Engine: the public face. It starts the engine thread, validates and submits requests, and reads the view.

This module doesn't import torch: the engine thread does, after it has started.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.clock import wake_promptly
from engine.commands import CancelRequest, Command, Refused, Ticket, Wake
from engine.config import EngineConfig
from engine.errors import EngineStopped, FootplateError, RequestError
from engine.request import Completion, Request, RequestHandle
from engine.sampling import MAX_SEED, SamplingParams
from engine.view import EngineState, EngineView, LoadProgress, ModelView

if TYPE_CHECKING:
    from engine.chat_template import ChatRenderer
    from engine.loop import EngineLoop, Message
    from engine.model.transformer import TransformerModel
    from engine.tokenizer import Tokenizer

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a caller's thread needs of a loaded model to check and prepare a request."""

    tokenizer: Tokenizer | None
    no_tokenizer: str
    renderer: ChatRenderer | None
    vocab_size: int
    max_seq_len: int
    kv_tokens: int
    num_kv_blocks: int
    chat_params: SamplingParams
    end_ids: frozenset[int]


class Engine:
    """A local engine on a thread of its own. Use it as a context manager, or `close` it.

    `view` is the latest frozen picture; `submit` and `generate` ask for tokens; `command` sends an operator's command. All
    methods may be called from any thread.
    """

    def __init__(self, config: EngineConfig | None = None, *, shape: str | None = None) -> None:
        self.config = config or EngineConfig()
        self.view = EngineView(loading=LoadProgress("starting"), monotonic_s=time.monotonic())
        self._shape = shape
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._door = threading.Lock()
        self._closed_because: str | None = None
        self._failure: BaseException | None = None
        self._served: Served | None = None
        self._thread: threading.Thread | None = None

    # Life

    @classmethod
    def load(cls, model: str | os.PathLike[str] | None = None, config: EngineConfig | None = None) -> Engine:
        """A running engine on `model` (a path, a name or a hub id; the config's own without one), once it is loaded. Raises
        the sentence that says why it can't be."""
        config = config or EngineConfig()
        if model is not None:
            config = dataclasses.replace(config, model=os.fspath(model))
        return cls(config)._started()

    @classmethod
    def from_shape(cls, shape: str, config: EngineConfig | None = None) -> Engine:
        """A running engine on random weights of a real shape (`engine.families.shapes`); prompts are token ids."""
        return cls(config, shape=shape)._started()

    def _started(self) -> Engine:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Start the engine thread, which loads the model; returns at once. `view.loading` shows how far it is."""
        if self._thread is not None or self._closed_because is not None:
            raise EngineStopped("this engine was started before; make a new one.")
        # A daemon: a process that must end doesn't wait for a forward pass.
        self._thread = threading.Thread(target=self._run, name="footplate-engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the model is loaded. Raises the error that ended the load, `TimeoutError` after `timeout` seconds."""
        if not self._ready.wait(timeout):
            raise TimeoutError(f"the model was not loaded after {timeout} s.")
        if self._failure is not None:
            raise self._failure
        if self._served is None:
            raise EngineStopped("the engine was closed before its model was loaded.")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End running requests as cancelled, free everything and join the thread, for at most `timeout_s`; idempotent."""
        self._stop.set()
        self._inbox.put(Wake())
        if self._thread is None:
            if self._closed_because is None:
                self._shut(None)
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None while loading or when the checkpoint has none."""
        return self._served.tokenizer if self._served else None

    @property
    def chat_params(self) -> SamplingParams:
        """The model's own sampling parameters for chat; the plain defaults while it loads."""
        return self._served.chat_params if self._served else SamplingParams()

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        params: SamplingParams | None = None,
        title: str = "",
    ) -> RequestHandle:
        """Queue a request and return its handle. `prompt` is raw text or token ids; `messages` (role, content) go through the
        model's chat template. Raises `RequestError` for what can never be served and `EngineStopped` when nothing serves."""
        served = self._serving()
        params = params or SamplingParams()
        ids, note = self._checked_ids(served, prompt, messages, params)
        return self._queue(served, ids, params, title, note)

    def sample(
        self,
        num_samples: int,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        params: SamplingParams | None = None,
        title: str = "",
    ) -> list[RequestHandle]:
        """Queue `num_samples` requests for one prompt and return their handles. The prompt is computed once: the others reuse its
        blocks from the prefix cache. Sample i draws with seed + i. Raises as `submit`, before any is queued."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise RequestError(f"the number of samples must be a whole number of at least 1, not {num_samples!r}.")
        served = self._serving()
        params = params or SamplingParams()
        ids, note = self._checked_ids(served, prompt, messages, params)
        seed = params.seed if params.seed is not None else secrets.randbelow(2**62)
        each = [dataclasses.replace(params, seed=(seed + i) % (MAX_SEED + 1)) for i in range(num_samples)]
        return [self._queue(served, ids, one, title, note) for one in each]

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Submit a request and wait for its Completion. Raises as `submit`, and `RequestError` if an error ended it."""
        return self.submit(prompt, messages=messages, params=params).result()

    def command(self, command: Command) -> Ticket:
        """Send an operator's command; its ticket says what became of it."""
        ticket = Ticket(command)
        with self._door:
            if self._closed_because is None:
                self._inbox.put(ticket)
                return ticket
        ticket.settle("cancelled", self.view.step, reason=self._closed_because, stopped=True)
        return ticket

    def _serving(self) -> Served:
        if self._closed_because is not None:
            raise EngineStopped(self._closed_because)
        if self._served is None:
            raise EngineStopped("the model is still loading; wait until the engine is idle.")
        return self._served

    def _token_ids(
        self, served: Served, prompt: str | Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[int], str | None]:
        if (prompt is None) == (messages is None):
            raise RequestError("give either a prompt or messages.")
        if messages is None and not isinstance(prompt, str):
            if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
                raise RequestError(f"the prompt must be text or token ids, not {type(prompt).__name__}.")
            return [*prompt], None
        if served.tokenizer is None:
            raise RequestError(served.no_tokenizer)
        if messages is None:
            assert isinstance(prompt, str)
            return served.tokenizer.encode(prompt), None
        if served.renderer is None:
            raise RequestError("the model has no chat template; send a raw prompt instead (`footplate run --raw`).")
        from engine.chat_template import render_chat

        rendered = render_chat(served.tokenizer, served.renderer, messages)
        return rendered.token_ids, rendered.note

    def _checked_ids(
        self,
        served: Served,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        params: SamplingParams,
    ) -> tuple[list[int], str | None]:
        """The prompt's ids and a note, of a request that can be served; a refusal is counted and shown as well as raised."""
        try:
            ids, note = self._token_ids(served, prompt, messages)
            self._check_request(served, ids, params)
        except RequestError as error:
            self._inbox.put(Refused(str(error)))
            raise
        return ids, note

    def _check_request(self, served: Served, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty; write something.")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < served.vocab_size:
                raise RequestError(f"token id {token_id!r} isn't in the vocabulary of {served.vocab_size}.")
        params.check_vocabulary(served.vocab_size)
        if len(ids) >= served.max_seq_len:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens, but the context holds {served.max_seq_len:,} and an answer needs one at "
                "least; shorten it or raise --max-seq-len."
            )
        if len(ids) >= served.kv_tokens:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens, but the {served.num_kv_blocks:,} KV blocks hold {served.kv_tokens:,} in all "
                "and an answer needs one at least; shorten it or raise --num-kv-blocks."
            )

    def _queue(self, served: Served, ids: list[int], params: SamplingParams, title: str, note: str | None) -> RequestHandle:
        from engine.sampler import RowState
        from engine.scheduler import Job
        from engine.text import TextStream

        seed = params.seed if params.seed is not None else secrets.randbelow(2**62)
        request = Request(tuple(ids), params, seed, title)
        tokenizer = served.tokenizer
        if params.stop and tokenizer is None:
            raise RequestError(f"stop strings need text, but {served.no_tokenizer}")
        end_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= served.end_ids
        job = Job(
            request=request,
            sampling=RowState(params, seed, request.prompt_token_ids, frozenset(i for i in end_ids if i < served.vocab_size)),
            budget_tokens=min(len(ids) + params.max_tokens, served.max_seq_len, served.kv_tokens),
            text=TextStream(tokenizer, params.stop) if tokenizer is not None and params.stop else None,
        )
        text = TextStream(tokenizer, params.stop) if tokenizer is not None else None
        with self._door:
            if self._closed_because is not None:
                raise EngineStopped(self._closed_because)
            self._inbox.put(job)
        return RequestHandle(request, text, lambda request_id: self.command(CancelRequest(request_id)), note)

    # The engine thread

    def _run(self) -> None:
        error: str | None = None
        try:
            self._load_and_serve()
        except _LoadCancelled:
            pass
        except BaseException as failure:
            self._failure = failure
            error = str(failure) if isinstance(failure, FootplateError) else f"{type(failure).__name__}: {failure}"
        finally:
            self._shut(error)

    def _shut(self, error: str | None) -> None:
        reason = f"the engine stopped: {error}" if error else "the engine was closed."
        with self._door:
            self._closed_because = reason
        self._settle_left_over(reason, failed=error is not None)
        if self._served is not None and self._served.renderer is not None:
            self._served.renderer.close()
        state: EngineState = "failed" if error else "stopped"
        self.view = dataclasses.replace(
            self.view,
            published=self.view.published + 1,
            monotonic_s=time.monotonic(),
            state=state,
            error=error,
            loading=None,
            requests=(),
            num_running=0,
            num_waiting=0,
        )
        self._ready.set()

    def _settle_left_over(self, reason: str, *, failed: bool) -> None:
        """Answer what is still in the inbox: no reader is left waiting."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Ticket):
                message.settle("cancelled", self.view.step, reason=reason, stopped=True)
            elif not isinstance(message, Wake):
                from engine.commit import finish
                from engine.scheduler import Job

                if isinstance(message, Job):
                    finish(message, "error" if failed else "cancelled", reason if failed else None)

    def _load_and_serve(self) -> None:
        self._progress("importing torch", 0, 0)
        # OpenMP's threads wait for each other by spinning; when another program (or the console) takes one of their cores, that
        # made a step up to thirty times slower. With a short spin they sleep instead, at no cost that could be measured.
        os.environ.setdefault("GOMP_SPINCOUNT", "100")
        wake_promptly()
        from engine.device import choose_device
        from engine.loop import EngineLoop

        device = choose_device(self.config)
        device.bind_to_thread()
        model, view, served = self._load_shape(device) if self._shape else self._load_checkpoint(device)
        loop: EngineLoop | None = None
        error: str | None = None
        try:
            loop = EngineLoop(model, view, self._inbox, self._publish, self.config.max_batch_tokens)
            self._served = served
            loop.publish()
            self._ready.set()
            loop.run(self._stop.is_set)
        except BaseException as failure:
            error = f"the engine stopped: {failure}"
            raise
        finally:
            if loop is not None:
                loop.stop(error)
                if error is None:
                    loop.publish()
                loop = None  # with it go the last references to the model's buffers but the model's own
            model.teardown()

    def _publish(self, view: EngineView) -> None:
        self.view = view

    def _progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stop.is_set():
            raise _LoadCancelled
        now = time.monotonic()
        loading = self.view.loading
        if loading is None or loading.stage != stage or now - self.view.monotonic_s >= 0.05 or done_bytes == total_bytes:
            self.view = EngineView(
                published=self.view.published + 1, monotonic_s=now, loading=LoadProgress(stage, done_bytes, total_bytes)
            )

    def _load_checkpoint(self, device: Any) -> tuple[TransformerModel, ModelView, Served]:
        from engine.errors import TokenizerError
        from engine.families import chat_defaults, end_token_ids
        from engine.model.transformer import load_model
        from engine.tokenizer import Tokenizer
        from engine.weights.checkpoint import open_checkpoint
        from engine.weights.locate import locate

        self._progress("finding the model", 0, 0)
        path = locate(self.config.model, progress=self._progress)
        self._progress("reading the header", 0, 0)
        with open_checkpoint(path) as checkpoint:
            tokenizer, no_tokenizer = None, ""
            try:
                tokenizer = (
                    Tokenizer.from_gguf(checkpoint.metadata) if checkpoint.kind == "gguf" else Tokenizer.from_directory(path)
                )
            except TokenizerError as error:
                no_tokenizer = str(error)
            model = load_model(checkpoint, self.config, device, self._progress)
            formats = sorted({info.format for info in checkpoint.tensors.values() if len(info.shape) > 1})
            defaults, end_ids = chat_defaults(checkpoint), end_token_ids(checkpoint)
        template = tokenizer.chat_template if tokenizer is not None else None
        renderer = None
        if tokenizer is not None and template is not None:
            from engine.chat_template import ChatRenderer

            renderer = ChatRenderer(template, tokenizer.bos_text, tokenizer.eos_text)
        view = self._model_view(model, path, "+".join(formats), renderer is not None)
        return model, view, self._served_by(model, tokenizer, no_tokenizer, renderer, defaults, end_ids)

    def _load_shape(self, device: Any) -> tuple[TransformerModel, ModelView, Served]:
        from engine.families.shapes import shape_named
        from engine.model.transformer import random_model

        self._progress("making random weights", 0, 0)
        model = random_model(shape_named(self._shape or ""), self.config, device)
        view = self._model_view(model, None, "random", False)
        return (
            model,
            view,
            self._served_by(model, None, "random weights have no tokenizer; prompts must be token ids.", None, SamplingParams()),
        )

    def _model_view(self, model: TransformerModel, path: Path | None, weight_format: str, has_chat_template: bool) -> ModelView:
        config = model.config
        return ModelView(
            name=config.name,
            source=str(path) if path else "random weights",
            family=config.family,
            num_layers=config.num_layers,
            num_parameters=model.store.num_parameters,
            vocab_size=config.vocab_size,
            max_seq_len=model.plan.max_seq_len,
            device=str(model.gpu_backend),
            dtype=model.device.dtype_name,
            threads=model.device.threads,
            weight_format=weight_format,
            has_chat_template=has_chat_template,
        )

    def _served_by(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer | None,
        no_tokenizer: str,
        renderer: ChatRenderer | None,
        defaults: SamplingParams,
        end_ids: frozenset[int] = frozenset(),
    ) -> Served:
        plan = model.plan
        return Served(
            tokenizer=tokenizer,
            no_tokenizer=no_tokenizer,
            renderer=renderer,
            vocab_size=model.vocab_size,
            max_seq_len=plan.max_seq_len,
            kv_tokens=plan.num_kv_blocks * self.config.block_size,
            num_kv_blocks=plan.num_kv_blocks,
            chat_params=defaults,
            end_ids=tokenizer.eos_token_ids if tokenizer is not None else end_ids,
        )


class _LoadCancelled(Exception):
    """`close` was called while the model was loading."""
