"""The ranks of one tensor-parallel worker: how they meet, and the collectives that they use.

    on CUDA, a GPU each                            NCCL
    on CPUs of one host, with a C++ compiler       memory that they share
    on CPUs else                                   gloo
    on one GPU together, which is for tests        one of the latter two, through the host

Rank 0 creates a store and tells the others its address; each rank then joins the group over it.
Nothing here touches torch.distributed's process-wide default group, so a process may hold several.
Every listening socket is bound to one address: the one by which its rank reaches the store, unless
it is given.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its stubs
    ProcessGroupGloo,
    TCPStore,
)

from everlift import logs
from worker import collectives
from worker.collectives import Collectives

log = logs.get(__name__)

#: A rank that has not come to a collective after this long is taken for lost.
TIMEOUT = timedelta(minutes=5)

_GPU_KEY = "everlift/gpu"

#: What shared memory sums, by its number for collectives.cpp.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3}


class Group:
    """A rank's end of its group. This class is the group of one: each collective is the identity.

    Every rank calls the same collectives in the same order with tensors of the same shape and
    dtype. A lost peer raises RuntimeError, and the group is of no more use.
    """

    rank = 0
    size = 1
    #: its collectives are work of the device like any other: no host waits for them, and they can
    #: be captured
    on_device = True

    @staticmethod
    def single() -> Group:
        return Group()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """``tensor``, replaced by the sum over all ranks."""
        return tensor

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        """The ranks' shards side by side along the last dimension, on rank 0; None elsewhere."""
        return shard

    def broadcast(self, tensor: Tensor) -> Tensor:
        """``tensor``, replaced by rank 0's."""
        return tensor

    def barrier(self) -> None:
        """Returns when every rank has come here."""

    def close(self) -> None:
        """Releases what the group holds. May be called again."""


class _SharedMemoryGroup(Group):
    """A group of ranks of one host. Sums are of float32, bfloat16, float16 and int64."""

    on_device = False

    def __init__(self, ranks: Collectives, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._ranks = ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous()
        self._ranks.all_reduce(flat.data_ptr(), flat.numel(), _KINDS[tensor.dtype])
        return tensor if flat is tensor else tensor.copy_(flat)

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        shard = shard.contiguous()
        *rows, width = shard.shape
        out = shard.new_empty(*rows, width * self.size) if self.rank == 0 else None
        self._ranks.gather(
            shard.data_ptr(),
            shard.nbytes,
            width * shard.itemsize,
            0 if out is None else out.data_ptr(),
        )
        return out

    def broadcast(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous()
        self._ranks.broadcast(flat.data_ptr(), flat.nbytes)
        return tensor if flat is tensor else tensor.copy_(flat)

    def barrier(self) -> None:
        self._ranks.barrier()

    def close(self) -> None:
        self._ranks.close()


class _CollectiveGroup(Group):
    """A group over a torch.distributed backend (ProcessGroupGloo or ProcessGroupNCCL)."""

    def __init__(self, backend: Any, rank: int, size: int, on_device: bool) -> None:
        self.rank = rank
        self.size = size
        self.on_device = on_device
        self._backend = backend

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._backend.allreduce([tensor]).wait()
        return tensor

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(self.size)] if self.rank == 0 else []
        self._backend.gather(parts, shard, 0).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._backend.broadcast(tensor, 0).wait()
        return tensor

    def barrier(self) -> None:
        self._backend.barrier().wait()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None  # gloo listens until it is destroyed


class _ThroughHost(Group):
    """A group for tensors of a GPU over ``host``, one for those of CPUs."""

    on_device = False

    def __init__(self, host: Group) -> None:
        self.rank = host.rank
        self.size = host.size
        self._host = host

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._host.all_reduce(tensor.cpu()))

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        gathered = self._host.gather_to_first(shard.cpu())
        return None if gathered is None else gathered.to(shard.device)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._host.broadcast(tensor.cpu()))

    def barrier(self) -> None:
        self._host.barrier()

    def close(self) -> None:
        self._host.close()


def create_store(host: str = "127.0.0.1") -> tuple[TCPStore, str]:
    """Rank 0's meeting point, on a free port of ``host``, and its address for join_store."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))  # TCPStore alone would listen on every interface
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=TIMEOUT,
    )
    return store, f"{host}:{port}"


def join_store(address: str) -> TCPStore:
    """Another rank's end of the store at ``address``."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), timeout=TIMEOUT)


def init_group(
    store: TCPStore, rank: int, size: int, device: torch.device, host: str | None = None
) -> Group:
    """Joins rank ``rank`` of ``size``; returns when all of them have.

    ``host`` is this rank's own address, found from its way to the store when None.
    """
    if size == 1:
        return Group.single()
    group: Group
    if device.type == "cpu":
        way, group = _host_group(store, rank, size, host)
    elif _have_a_gpu_each(store, rank, size, device):
        backend = _nccl(store, rank, size)
        way, group = "NCCL", _CollectiveGroup(backend, rank, size, on_device=True)
    else:
        log.warning("ranks share a GPU: their sums go through the host, which is slow", rank=rank)
        way, host_group = _host_group(store, rank, size, host)
        group = _ThroughHost(host_group)
    group.barrier()
    log.info("ranks joined", rank=rank, ranks=size, collectives=way, on_device=group.on_device)
    return group


def _host_group(store: TCPStore, rank: int, size: int, host: str | None) -> tuple[str, Group]:
    """And how it is called."""
    if (ranks := collectives.meet(store, rank, size, TIMEOUT)) is not None:
        return "shared memory", _SharedMemoryGroup(ranks, rank, size)
    backend = _gloo(store, rank, size, host or _own_address(store))
    return "gloo", _CollectiveGroup(backend, rank, size, on_device=False)


def _have_a_gpu_each(store: TCPStore, rank: int, size: int, device: torch.device) -> bool:
    """NCCL refuses ranks that share one."""
    store.set(f"{_GPU_KEY}/{rank}", _name_of(device))
    return len({store.get(f"{_GPU_KEY}/{each}") for each in range(size)}) == size


def _name_of(gpu: torch.device) -> str:
    """No other one in the world has it."""
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _gloo(store: TCPStore, rank: int, size: int, host: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo binds to whatever the machine's own name resolves to.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: TCPStore, rank: int, size: int) -> Any:
    """NCCL picks its interface itself, or by NCCL_SOCKET_IFNAME."""
    from torch.distributed import ProcessGroupNCCL  # only in CUDA builds

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def _own_address(store: TCPStore) -> str:
    """From which address this machine reaches the store. A datagram connect sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
