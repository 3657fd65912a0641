"""A program of Ray as verl and OpenRLHF are: one driver, on the first node, and an actor per GPU that trains under DDP.

On one machine: python3 jobs/gallery/with_ray.py, which starts Ray itself and trains with one actor
"""

import argparse
import hashlib
import socket
from typing import Any

import ray
import torch
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel


@ray.remote
class Worker:
    def meeting_point(self) -> str:
        """Called on the first: its address and a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, meeting: str, rank: int, ranks: int, steps: int) -> dict[str, Any]:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")  # Ray shows each actor its GPU only
        init_process_group("nccl" if cuda else "gloo", init_method=meeting, rank=rank, world_size=ranks)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(rank)  # each rank has data of its own
        for _ in range(steps):
            points = torch.rand(64, 2, device=device)
            loss = nn.functional.mse_loss(model(points), points.prod(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        destroy_process_group()
        weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
        digest = hashlib.sha256(weights).hexdigest()[:12]
        return {"node": get_node_ip_address(), "loss": float(loss.detach()), "weights": digest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    ray.init()  # joins the cluster that `ray symmetric-run` has started
    gpus = int(ray.cluster_resources().get("GPU", 0))
    ranks = gpus or len(ray.nodes())
    need = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
    group = placement_group([need] * ranks, strategy="PACK" if gpus else "STRICT_SPREAD")
    ray.get(group.ready())
    workers = [
        Worker.options(
            num_cpus=1,
            num_gpus=need.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(ranks)
    ]
    meeting = ray.get(workers[0].meeting_point.remote())
    done = ray.get([each.train.remote(meeting, rank, ranks, args.steps) for rank, each in enumerate(workers)])
    for rank, each in enumerate(done):
        print(f"rank {rank} of {ranks} on {each['node']}: loss {each['loss']:.4f}, weights {each['weights']}")


if __name__ == "__main__":
    main()
