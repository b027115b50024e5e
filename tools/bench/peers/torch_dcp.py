# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: with one and two threads, and its asynchronous saves with each way of staging."""

from __future__ import annotations

import functools
import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tools.bench.contestant import Background, Contestant, Flight
from tools.bench.disk import sync
from tools.bench.peers.torch_tensors import empty_like, tensors_of, touch_tensors
from tools.bench.workload import State

NAME = "torch DCP"


class Library:
    """DCP on one rank; it syncs its files, and we the directory."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, rest_s
        warnings.simplefilter("ignore")
        self.about = {"torch": torch.__version__}
        self._tensors = tensors_of(state)
        self._directory = directory

    def contestants(self) -> list[Contestant]:
        """Return it with one and two threads."""
        return [self._contestant(threads) for threads in (1, 2)]

    def _contestant(self, threads: int) -> Contestant:
        def save(path: Path) -> None:
            writer = FileSystemWriter(path, thread_count=threads)
            dcp_save(self._tensors, storage_writer=writer, no_dist=True)
            sync(path)

        def load(path: Path) -> None:
            loaded = empty_like(self._tensors)
            dcp_load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
            touch_tensors(loaded)

        name = f"{NAME}, {threads} thread{'s' if threads > 1 else ''}"
        return Contestant(name=name, mode="plain", actions={"save": save, "load": load})

    def backgrounds(self) -> list[Background]:
        """Return thread, thread with kept staging memory, the same while the caller computes, and process."""
        _join_one_rank(self._directory)
        return [
            self._background("thread", None),
            self._background("stager", _stager()),
            self._background("stager, late", _stager(is_late=True)),
            self._background("process", _stager(is_shared=True), is_process=True),
        ]

    def _background(
        self, mode: str, stager: DefaultStager | None, *, is_process: bool = False
    ) -> Background:
        kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
        start = functools.partial(self._start, kind=kind, stager=stager)
        close = stager.close if stager is not None else (lambda: None)
        return Background(name=NAME, mode=mode, start=start, close=close)

    def _start(
        self, path: Path, *, kind: AsyncCheckpointerType, stager: DefaultStager | None
    ) -> Flight:
        answer: Any = async_save(
            self._tensors,
            storage_writer=FileSystemWriter(path, thread_count=2),
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            upload: Future[Any] = answer.upload_completion
            return Flight(
                wait=lambda: _wait(upload, path), before_update=answer.staging_completion.result
            )
        return Flight(wait=lambda: _wait(answer, path))


def _wait(upload: Future[Any], path: Path) -> None:
    upload.result()
    sync(path)


def _stager(*, is_shared: bool = False, is_late: bool = False) -> DefaultStager:
    """Return a stager that keeps its memory; pinned memory and streams need an accelerator."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=is_shared,
            use_async_staging=is_late,
            use_non_blocking_copy=False,
        )
    )


def _join_one_rank(directory: Path) -> None:
    """Make the process group of one rank that asynchronous saves ask for."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        meeting = (directory / "dcp-ranks").absolute().as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
