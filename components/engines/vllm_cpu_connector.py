"""A connector for vLLM without a GPU: hidden states are copied at once, where vLLM's own connector uses CUDA streams.

vLLM loads it in its own environment, by the path of this module (kv_connector_module_path), with this package's folder
on PYTHONPATH. Files, locks and replies are those of vLLM's ExampleHiddenStatesConnector (0.32.0).
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # type: ignore[import-not-found]
    ExampleHiddenStatesConnector,
)


class _Copied:
    """Stands where the parent class waits for a copy by the GPU: this one has been made."""

    def query(self) -> bool:
        """Whether it is made."""
        return True

    def synchronize(self) -> None:
        """Return once it is made."""


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes a finished request's hidden states from a cache in main memory."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        # blocks [B, states, tokens of a block, H] in the order of the request's tokens
        blocks = self._kv_cache[torch.tensor(pending.block_ids, dtype=torch.long)]
        states = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)].contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = _Copied()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
