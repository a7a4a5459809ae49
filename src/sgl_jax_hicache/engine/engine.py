"""The engine as a library: prompts in, answers out, from any thread.

    with build_engine(EngineArgs(model_path="smollm2")) as engine:
        print(engine.generate("The capital of France is", {"max_new_tokens": 8})["text"])

The scheduler runs on a thread of its own, which alone touches the prefix cache and the device buffers.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.errors import StorageAttachError
from sgl_jax.srt.mem_cache.hicache.storage_mount import DetachedStorage, StorageMount

from .forward_batch import SamplingParams
from .generation import Generation
from .outputs import OutputChunk, OutputSink
from .req import GenerateRequest
from .requests import GenerateSpec, RequestChecker, RequestError
from .scheduler import Scheduler
from .scheduler_thread import EngineStoppedError, SchedulerThread
from .tokenizer import Tokenizer
from .tree_cache import TreeCache

_INFO_TIMEOUT_S = 30.0


class EngineBusyError(RuntimeError):
    """As many requests are in the engine as it takes; try again later."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of. `info` is what /get_server_info shows of its settings and its model."""

    scheduler: Scheduler
    tree: TreeCache
    tokenizer: Tokenizer
    checker: RequestChecker
    registry: CollectorRegistry
    served_model_name: str
    max_queued_requests: int
    info: Mapping[str, Any]


class Engine:
    """Serves requests until `shutdown`. Every method may be called from any thread."""

    def __init__(self, parts: EngineParts) -> None:
        """Starts the scheduler thread and waits until everything is compiled."""
        self.tokenizer = parts.tokenizer
        self.registry = parts.registry
        self.served_model_name = parts.served_model_name
        self._parts = parts
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._thread = SchedulerThread(parts.scheduler, parts.tree)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.shutdown()

    @property
    def healthy(self) -> bool:
        """True while requests are served."""
        return self._thread.alive

    # -- requests --------------------------------------------------------------------------------

    def submit(self, spec: GenerateSpec, sink: OutputSink) -> Generation:
        """Start one request; its chunks go to `sink` on the scheduler thread.

        Returns the empty answer, to be fed with those chunks. Raises RequestError for what cannot be served,
        EngineBusyError, EngineStoppedError.
        """
        checked = self._parts.checker.check(spec)
        rid = self._claim_rid(spec.rid)
        request = GenerateRequest(
            rid=rid,
            input_ids=checked.input_ids,
            sampling=checked.sampling,
            sink=lambda chunk: self._deliver(chunk, sink),
            arrival_s=time.perf_counter(),
            extra_key=spec.extra_key,
            return_logprob=spec.return_logprob,
            top_logprobs_num=spec.top_logprobs_num,
            stream=spec.stream,
            eos_token_ids=frozenset(self.tokenizer.eos_token_ids),
            stop_matcher=checked.stop_matcher,
        )
        try:
            self._thread.submit(request)
        except EngineStoppedError:
            self._forget_rid(rid)
            raise
        return Generation(rid, self.tokenizer, spec.sampling.stop)

    def check_batch(self, num_prompts: int) -> None:
        """Raises RequestError for more prompts in one request than the engine ever holds: waiting would not help."""
        limit = self._parts.max_queued_requests
        if num_prompts > limit:
            raise RequestError(
                "body",
                f"{num_prompts} prompts; this server takes {limit} at once (--max-queued-requests)",
            )

    def abort(self, rid: str) -> None:
        """End a request wherever it stands; its sink gets a last chunk. Nothing happens if it has ended."""
        self._thread.abort(rid)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        extra_key: str | None = None,
        stream: bool = False,
    ) -> Any:
        """Answer one prompt (a dictionary) or several (a list of them), blocking.

        A prompt is text or token ids. With `stream`, an iterator over the growing answer of one prompt.
        """
        base = GenerateSpec(
            sampling=_sampling(sampling_params),
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            extra_key=extra_key,
            stream=stream,
        )
        specs, is_batch = _specs(base, prompt, input_ids)
        if stream:
            if is_batch:
                raise RequestError("stream", "one prompt at a time")
            return self._stream(specs[0])
        self.check_batch(len(specs))
        started = [self._start(spec) for spec in specs]
        results = [_finish(generation, chunks) for generation, chunks in started]
        return results if is_batch else results[0]

    def _stream(self, spec: GenerateSpec) -> Iterator[dict[str, Any]]:
        generation, chunks = self._start(spec)
        try:
            while generation.finish is None:
                generation.feed(chunks.get())
                yield generation.result()
        finally:
            if generation.finish is None:
                self.abort(generation.rid)

    def _start(self, spec: GenerateSpec) -> tuple[Generation, queue.SimpleQueue[OutputChunk]]:
        chunks: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        return self.submit(spec, chunks.put), chunks

    def _claim_rid(self, rid: str | None) -> str:
        rid = rid if rid is not None else secrets.token_hex(16)
        with self._lock:
            if rid in self._unfinished:
                raise RequestError("rid", f"{rid!r} is the name of an unfinished request")
            if len(self._unfinished) >= self._parts.max_queued_requests:
                raise EngineBusyError(f"{len(self._unfinished)} requests are waiting or running")
            self._unfinished.add(rid)
        return rid

    def _forget_rid(self, rid: str) -> None:
        with self._lock:
            self._unfinished.discard(rid)

    def _deliver(self, chunk: OutputChunk, sink: OutputSink) -> None:
        if chunk.finish is not None:
            self._forget_rid(chunk.rid)
        sink(chunk)

    # -- the whole engine ------------------------------------------------------------------------

    def flush_cache(self, timeout_s: float = 30.0) -> bool:
        """Empty device and host tiers once neither requests nor transfers are left; storage gets what it lacks before.

        False, and nothing dropped, if that did not come about in time or another flush is under way.
        """
        return self._thread.flush_cache(timeout_s).result()

    def clear_cache(self, timeout_s: float = 30.0) -> int | None:
        """As `flush_cache`, and remove this model's pages from storage too; how many were removed.

        None, and nothing dropped, if that did not come about in time. Requests that arrive meanwhile are served without
        storage. Raises StorageAttachError if none is attached, StorageUnavailableError if it cannot list its pages.
        """
        if self.cache_statistics()["storage_path"] is None:
            raise StorageAttachError("no storage is attached")
        tree, gone = self._parts.tree, list[DetachedStorage]()
        flushed = self._thread.flush_cache(
            timeout_s, store=False, then=lambda: gone.append(tree.detach_storage())
        )
        if not flushed.result():
            return None
        (detached,) = gone
        detached.drained.result()  # nothing was under way
        try:
            return detached.mount.clear()
        finally:
            self._attach(detached.mount)

    def attach_storage(self, path: Path, max_bytes: int = 0) -> None:
        """Check a folder as at start and use it as L3 from now on; blocks as long as its disk does.

        Raises HiCacheConfigError for a path that cannot be used, StorageAttachError if a storage is attached.
        """
        self._attach(self._parts.tree.open_storage(path, max_bytes))

    def detach_storage(self, timeout_s: float = 30.0) -> bool:
        """Use L3 no longer, from now on. False if reads or writes were still under way there after `timeout_s`: they
        end by themselves, without effect. Raises StorageAttachError if none is attached."""
        detached = self._thread.call(self._parts.tree.detach_storage).result(_INFO_TIMEOUT_S)
        try:
            detached.drained.result(timeout_s)
        except TimeoutError:
            detached.drained.add_done_callback(lambda _: detached.mount.close())
            return False
        detached.mount.close()
        return True

    def _attach(self, mount: StorageMount) -> None:
        try:
            self._thread.call(lambda: self._parts.tree.attach_storage(mount)).result(
                _INFO_TIMEOUT_S
            )
        except BaseException:
            mount.close()
            raise

    def cache_statistics(self) -> dict[str, Any]:
        """What is where in the cache, and which tier served how many prompt tokens, as a JSON-able dictionary."""
        found = self._thread.call(self._parts.tree.statistics).result(_INFO_TIMEOUT_S)
        return found.as_dict()

    def get_server_info(self) -> dict[str, Any]:
        """Settings, model, and the state of scheduler and cache, as a JSON-able dictionary."""
        state = self._thread.call(self._parts.scheduler.state).result(_INFO_TIMEOUT_S)
        return {**self._parts.info, "state": state}

    def decode_step_seconds(self, num_steps: int) -> list[float]:
        """Wall time of the last decode steps, oldest first."""
        times = self._parts.scheduler.decode_times
        return self._thread.call(lambda: times.last(num_steps)).result(_INFO_TIMEOUT_S)

    def shutdown(self, deadline_s: float = 30.0) -> bool:
        """Finish what runs, store what is to be stored, end the thread; a second call returns at once.

        True if nothing had to be cut short at the deadline.
        """
        return self._thread.stop(deadline_s)


def _finish(generation: Generation, chunks: queue.SimpleQueue[OutputChunk]) -> dict[str, Any]:
    while generation.finish is None:
        generation.feed(chunks.get())
    return generation.result()


def _sampling(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    known = {field.name for field in fields(SamplingParams)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError("sampling_params", f"unknown {unknown}; known: {sorted(known)}")
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids"):
        values[name] = tuple(values.get(name) or ())
    return SamplingParams(**values)


def _specs(
    base: GenerateSpec,
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
) -> tuple[list[GenerateSpec], bool]:
    if (prompt is None) == (input_ids is None):
        raise RequestError("prompt", "give either a prompt or input_ids")
    if isinstance(prompt, str):
        return [replace(base, text=prompt)], False
    if prompt is not None:
        return [replace(base, text=text) for text in prompt], True
    many: Any = input_ids
    if many and not isinstance(many[0], int):
        return [replace(base, input_ids=ids) for ids in many], True
    return [replace(base, input_ids=many, prompt_field="input_ids")], False
