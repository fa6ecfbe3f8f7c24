"""Process group of the ranks of one tensor-parallel worker, and the collectives that they use.

    CUDA, with one GPU per rank                    NCCL
    CPUs of one host, with a C++ compiler          shared memory
    other CPUs                                     gloo
    one GPU for several ranks, only for tests      shared memory or gloo, through the host

Messages that are not in device memory, such as those of ``agree``, use shared memory or gloo in
all cases.

Rank 0 creates a store and gives its address to the others; each rank then joins the group through
the store. This module does not use torch.distributed's process-wide default group, so a process may
hold several groups. Each listening socket of the store and of gloo is bound to one address. This is
the given address, or else the one from which the rank reaches the store. NCCL chooses its own
address.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its stubs
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from everlift import logs
from worker.parallel import collectives
from worker.parallel.collectives import Collectives

log = logs.get_logger(__name__)

#: Time after which a rank that has not joined a collective is considered lost.
TIMEOUT = timedelta(minutes=5)

_GPU_KEY = "everlift/gpu"
#: Prefix of gloo's keys in the store, which would otherwise equal those of NCCL.
_GLOO_KEY = "everlift/gloo"

#: Dtypes that shared memory can sum, with their numbers in collectives.cpp.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3}


class Group:
    """Group of ranks, as one rank uses it.

    This base class is the group of a single rank, whose collectives return their arguments. Every
    rank must call the same collectives in the same order, with tensors of the same shape and dtype.
    If a rank is lost, collectives raise RuntimeError, and the group cannot be used any more.
    """

    rank = 0
    size = 1
    #: whether collectives are operations of the device like any other: no host waits for them, and
    #: CUDA graphs can capture them
    on_device = True
    #: number of sums, gathers and broadcasts that this rank has taken part in; ``agree`` and
    #: ``barrier`` do not count, and a single rank counts nothing
    num_collectives = 0

    @staticmethod
    def single() -> Group:
        return Group()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks, and return it."""
        return tensor

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        """Collect the shards of all ranks on rank 0.

        Return them concatenated in the last dimension on rank 0, and None on the other ranks.
        """
        return shard

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Replace the content of ``tensor`` by that of rank 0's tensor, and return ``tensor``."""
        return tensor

    def join_gather(self, shard: Tensor, buffer: Tensor) -> None:
        """Take part in the other ranks' ``gather_to_first``, when the result is not needed.

        Rank 0 receives the shards in ``buffer``, which must be contiguous and as large as all
        shards together. The other ranks do not use ``buffer``, which may be empty there.
        """

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks.

        Waits until all ranks have called ``agree``, but not for work of their devices.
        """
        return ok

    def barrier(self) -> None:
        """Wait until every rank has called ``barrier``."""

    def close(self) -> None:
        """Release the resources of the group. May be called again."""


class _SharedMemoryGroup(Group):
    on_device = False

    def __init__(self, ranks: Collectives, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._ranks = ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous()
        self._sum(flat)
        self.num_collectives += 1
        return tensor if flat is tensor else tensor.copy_(flat)

    def _sum(self, flat: Tensor) -> None:
        self._ranks.all_reduce(flat.data_ptr(), flat.numel(), _KINDS[flat.dtype])

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        shard = shard.contiguous()
        *rows, width = shard.shape
        out = shard.new_empty(*rows, width * self.size) if self.rank == 0 else None
        self._gather(shard, out)
        return out

    def _gather(self, shard: Tensor, out: Tensor | None) -> None:
        self._ranks.gather(
            shard.data_ptr(),
            shard.nbytes,
            shard.shape[-1] * shard.itemsize,
            0 if out is None else out.data_ptr(),
        )
        self.num_collectives += 1

    def join_gather(self, shard: Tensor, buffer: Tensor) -> None:
        self._gather(shard, buffer if self.rank == 0 else None)

    def broadcast(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous()
        self._ranks.broadcast(flat.data_ptr(), flat.nbytes)
        self.num_collectives += 1
        return tensor if flat is tensor else tensor.copy_(flat)

    def agree(self, ok: bool) -> bool:
        num_failed = torch.tensor([int(not ok)])
        self._sum(num_failed)
        return not num_failed.item()

    def barrier(self) -> None:
        self._ranks.barrier()

    def close(self) -> None:
        self._ranks.close()


class _CollectiveGroup(Group):
    on_device = False

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._backend.allreduce([tensor]).wait()
        self.num_collectives += 1
        return tensor

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        shard = shard.contiguous()
        parts = [torch.empty_like(shard) for _ in range(self.size)] if self.rank == 0 else []
        self._gather(shard, parts)
        return torch.cat(parts, dim=-1) if parts else None

    def _gather(self, shard: Tensor, parts: list[Tensor]) -> None:
        self._backend.gather(parts, shard, 0).wait()
        self.num_collectives += 1

    def join_gather(self, shard: Tensor, buffer: Tensor) -> None:
        self._gather(shard, [*buffer.view(self.size, *shard.shape)] if self.rank == 0 else [])

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._backend.broadcast(tensor, 0).wait()
        self.num_collectives += 1
        return tensor

    def agree(self, ok: bool) -> bool:
        num_failed = torch.tensor([int(not ok)])
        self._backend.allreduce([num_failed]).wait()
        return not num_failed.item()

    def barrier(self) -> None:
        self._backend.barrier().wait()

    def close(self) -> None:
        if self._backend is not None:
            self._end(self._backend)
            self._backend = None  # gloo listens until the object is destroyed

    def _end(self, backend: Any) -> None:
        backend.shutdown()


class _NcclGroup(_CollectiveGroup):
    """Group over torch's ProcessGroupNCCL; ``agree`` uses the group ``host``, in host memory.

    CUDA graphs that captured its collectives must be deleted before it is closed, because NCCL
    would wait for them forever.
    """

    on_device = True

    def __init__(self, backend: Any, rank: int, size: int, host: Group) -> None:
        super().__init__(backend, rank, size)
        self._host = host

    def agree(self, ok: bool) -> bool:
        return self._host.agree(ok)

    def close(self) -> None:
        super().close()
        self._host.close()

    def _end(self, backend: Any) -> None:
        # A shutdown would wait for collectives that another rank may never join.
        backend.abort()


class _ThroughHost(Group):
    """Group for tensors on GPUs, which runs its collectives on copies in host memory.

    The group ``host`` performs the collectives; results are copied back to the GPUs.
    """

    on_device = False

    def __init__(self, host: Group) -> None:
        self.rank = host.rank
        self.size = host.size
        self._host = host

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = self._host.all_reduce(tensor.cpu())
        self.num_collectives += 1
        return tensor.copy_(total)

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        gathered = self._host.gather_to_first(shard.cpu())
        self.num_collectives += 1
        return None if gathered is None else gathered.to(shard.device)

    def join_gather(self, shard: Tensor, buffer: Tensor) -> None:
        self._host.join_gather(shard.cpu(), buffer.cpu())
        self.num_collectives += 1

    def broadcast(self, tensor: Tensor) -> Tensor:
        received = self._host.broadcast(tensor.cpu())
        self.num_collectives += 1
        return tensor.copy_(received)

    def agree(self, ok: bool) -> bool:
        return self._host.agree(ok)

    def barrier(self) -> None:
        self._host.barrier()

    def close(self) -> None:
        self._host.close()


def create_store(host: str = "127.0.0.1") -> tuple[TCPStore, str]:
    """Create rank 0's store on a free port of ``host``; return it and its address, host:port."""
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
    """Connect to rank 0's store at ``address``, host:port, and return the connection."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), timeout=TIMEOUT)


def init_group(
    store: TCPStore, rank: int, size: int, device: torch.device, host: str | None = None
) -> Group:
    """Join as ``rank`` of ``size`` ranks, and return the group when all ranks have joined.

    ``device`` holds this rank's tensors. ``host`` is the address at which this rank listens for the
    others; None stands for the address from which it reaches the store.
    """
    if size == 1:
        return Group.single()
    group: Group
    if device.type == "cpu":
        way, group = _host_group(store, rank, size, host)
    elif _have_a_gpu_each(store, rank, size, device):
        _, host_group = _host_group(store, rank, size, host)
        way, group = "NCCL", _NcclGroup(_nccl(store, rank, size), rank, size, host_group)
    else:
        log.warning("ranks share a GPU: collectives go through the host, which is slow", rank=rank)
        way, host_group = _host_group(store, rank, size, host)
        group = _ThroughHost(host_group)
    group.barrier()
    log.info("ranks joined", rank=rank, ranks=size, collectives=way, on_device=group.on_device)
    return group


def _host_group(store: TCPStore, rank: int, size: int, host: str | None) -> tuple[str, Group]:
    """Join a group for tensors in host memory; return the name of its transport, and the group.

    The transport is shared memory if all ranks share it, and gloo otherwise. gloo listens at
    ``host``; None stands for the address from which this rank reaches the store.
    """
    if (ranks := collectives.init_collectives(store, rank, size, TIMEOUT)) is not None:
        return "shared memory", _SharedMemoryGroup(ranks, rank, size)
    backend = _gloo(store, rank, size, host or _own_address(store))
    return "gloo", _CollectiveGroup(backend, rank, size)


def _have_a_gpu_each(store: TCPStore, rank: int, size: int, device: torch.device) -> bool:
    store.set(f"{_GPU_KEY}/{rank}", _name_of(device))
    return len({store.get(f"{_GPU_KEY}/{other}") for other in range(size)}) == size


def _name_of(gpu: torch.device) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _gloo(store: TCPStore, rank: int, size: int, host: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo binds to the address that the machine's own name resolves to.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(PrefixStore(_GLOO_KEY, store), rank, size, options)


def _nccl(store: TCPStore, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only in CUDA builds

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def _own_address(store: TCPStore) -> str:
    family, kind, _, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
