"""Ranks of the learner: rank 0 lives in the stage's own process and leads, the others follow.

Rank 0 alone rolls out. What the others need (settings, trajectories as rows) it broadcasts with the
name of the method to run: every collective `Learner` method runs on all ranks with the same
arguments. On one host rank 0 starts its followers itself. Over several hosts a launcher sets RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and starts `python -m stages.train AGENT` for rank
0 and `python -m memsearcher.learner.follow` for the others.
"""

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=12)  # followers wait here while rank 0 rolls out


def _without_compiler() -> None:
    """Gloo reduces between CPU ranks. DeepSpeed would first compile a faster way with the machine's
    C++ compiler, which may not be there and takes a minute or more on every new machine."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Ranks:
    """This process's place among the ranks. `device` is where its share of the model lives."""

    def __init__(self, world: int) -> None:
        """Joins, and on rank 0 of a single host starts the followers. Once per process."""
        cuda = torch.cuda.is_available()
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
        if not cuda:
            _without_compiler()
        self._followers: list[subprocess.Popen[bytes]] = []
        if not dist.is_initialized():
            store: dist.Store | None = None
            if "RANK" not in os.environ:
                # port 0: bound at once, so nobody can take it between the choice and the use
                server = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
                store = dist.PrefixStore("default_pg", server)  # the name that followers look under
                place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
                os.environ.update(place)
                command = [sys.executable, "-m", "memsearcher.learner.follow"]
                for k in range(1, world):
                    mine = {**os.environ, "RANK": str(k), "LOCAL_RANK": str(k)}
                    self._followers.append(subprocess.Popen(command, env=mine))
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                timeout=PATIENCE,
                store=store,
                rank=int(os.environ["RANK"]) if store else -1,
                world_size=world if store else -1,
            )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.world != world and world:
            raise RuntimeError(f"train.ranks is {world} but the launcher started {self.world}")
        self._orders = dist.new_group(backend="gloo", timeout=PATIENCE)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)

    def tell(self, order: tuple[str, tuple[object, ...]]) -> None:
        """Rank 0: method name and arguments to all followers."""
        if self.world > 1 and self.rank == 0:
            dist.broadcast_object_list([order], src=0, group=self._orders)

    def hear(self) -> tuple[str, tuple[object, ...]]:
        box: list[tuple[str, tuple[object, ...]]] = [("", ())]
        dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All ranks' values, summed or so, on the CPU."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values, op=op)
        return values.cpu()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self._orders)

    def close(self) -> None:
        """Rank 0: waits for the followers to end, after they were told to."""
        for follower in self._followers:
            follower.wait(timeout=60)
