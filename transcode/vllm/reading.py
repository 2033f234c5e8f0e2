"""Parts of files into tensors: parallel reads into a few pinned buffers, copied as they fill."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transcode.errors import CheckpointError
from transcode.vllm.slices import Piece

CHUNK = 8 << 20
"""The largest piece that is read at once, in bytes."""

THREADS = 8
BUFFERS = 2
"""Each thread fills one buffer while the other one is copied: 128 MB of host memory in all."""


@dataclass(frozen=True)
class Job:
    """A piece of a file, and the tensor that it is a piece of, as flat uint8."""

    path: Path
    piece: Piece
    into: Tensor


class File:
    """A file that is read at many places; rows that are cut are taken from its mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)

    def fill(self, piece: Piece, into: np.ndarray[Any, Any]) -> None:
        """A piece into as many bytes, one row's runs after the other's."""
        if piece.rows == len(piece.runs) == 1:
            self._read(piece.start + piece.runs[0][0], into.data)
            return
        done = 0
        for offset, size in piece.runs:
            shape = (piece.rows, size)
            source = np.ndarray(shape, np.uint8, self.map, piece.start + offset, (piece.stride, 1))
            np.ndarray(shape, np.uint8, into.data, done, (piece.width, 1))[...] = source
            done += size

    def _read(self, start: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self.fd, [into], start)
            if count <= 0:
                raise CheckpointError(f"{self.path.name}: ends at byte {start}; did it change?")
            start, into = start + count, into[count:]

    def close(self) -> None:
        """Give the file back."""
        self.map.close()
        os.close(self.fd)


class Slot:
    """A pinned buffer, and when its last copy is done."""

    def __init__(self) -> None:
        self.buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.buffer.numpy()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]


class Reader:
    """Reads into tensors of one device; host memory stays bounded however much is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = ThreadPoolExecutor(THREADS, "transcode-read")
        self.files: dict[Path, File] = {}
        self.lock = Lock()
        self.own = local()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(self, jobs: Iterable[Job]) -> None:
        """Read all of them. On a GPU the copies may still run; the current stream waits for them.

        Raises CheckpointError for a file that ends too early.
        """
        if self.stream is None:
            list(self.pool.map(self._here, jobs))
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        list(self.pool.map(self._there, jobs))
        current.wait_stream(self.stream)

    def _file(self, path: Path) -> File:
        with self.lock:
            if path not in self.files:
                self.files[path] = File(path)
            return self.files[path]

    def _here(self, job: Job) -> None:
        piece = job.piece
        self._file(job.path).fill(piece, job.into[piece.at :][: piece.nbytes].numpy())

    def _there(self, job: Job) -> None:
        piece, slot = job.piece, self._slot()
        slot.done.synchronize()
        self._file(job.path).fill(piece, slot.bytes[: piece.nbytes])
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            target = job.into[piece.at :][: piece.nbytes]
            target.copy_(slot.buffer[: piece.nbytes], non_blocking=True)
            slot.done.record()

    def _slot(self) -> Slot:
        """This thread's buffers in turn."""
        if not hasattr(self.own, "slots"):
            self.own.slots, self.own.turn = [Slot() for _ in range(BUFFERS)], 0
        self.own.turn = (self.own.turn + 1) % BUFFERS
        slot: Slot = self.own.slots[self.own.turn]
        return slot

    def close(self) -> None:
        """Wait for the copies, and give threads, buffers and files back."""
        if self.stream is not None:
            self.stream.synchronize()
        self.pool.shutdown()
        for file in self.files.values():
            file.close()
