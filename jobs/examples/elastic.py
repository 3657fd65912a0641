"""For a job with min_nodes: when a node is lost, training continues with the remaining ranks.

To support this, every node stores the checkpoint; all ranks agree on the newest one, comparing generations before
steps; each generation starts by saving a checkpoint; the global batch does not depend on the number of ranks.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--batch", type=int, default=48, help="global batch size")
parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
parser.add_argument("--pause", type=float, default=0, metavar="SECONDS", help="pause after each step")

RUN, NODE, GENERATION = (os.environ[f"LAUNCHER_{name}"] for name in ("RUN", "NODE", "GENERATION"))
CHECKPOINTS = Path(os.environ["LAUNCHER_OUTPUT"], "checkpoints")
CURVES = Path(os.environ["LAUNCHER_GENERATION_OUTPUT"])  # every node writes them, so that the loss of a node loses none
FIRST_OF_NODE = os.environ["LOCAL_RANK"] == "0"


def age(state: dict[str, Any]) -> tuple[bool, int, int]:
    """Sort key, higher is newer. Generations are counted per run, so checkpoints of --resume sort first."""
    return state["run"] == RUN, state["generation"], state["step"]


def load_newest(**parts: Any) -> int:
    """Load the newest checkpoint of all nodes on every rank; return its step."""
    mine = max((torch.load(path, map_location="cpu") for path in CHECKPOINTS.glob("*.pt")), key=age, default=None)
    ages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ages, age(mine) if mine else (False, 0, 0))
    newest = [mine]
    dist.broadcast_object_list(newest, src=ages.index(max(ages)))
    if newest[0] is None:
        return 0
    for name, part in parts.items():
        part.load_state_dict(newest[0][name])
    return int(newest[0]["step"])


def save(step: int, **parts: Any) -> None:
    if FIRST_OF_NODE:
        state = {"run": RUN, "generation": int(GENERATION), "step": step}
        CHECKPOINTS.mkdir(exist_ok=True)
        torch.save(state | {name: part.state_dict() for name, part in parts.items()}, CHECKPOINTS / f"{NODE}.tmp")
        (CHECKPOINTS / f"{NODE}.tmp").replace(CHECKPOINTS / f"{NODE}.pt")


def main() -> None:
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    begin = load_newest(model=model, optimizer=optimizer)
    save(begin, model=model, optimizer=optimizer)
    dist.barrier()  # wait until all nodes have saved, before the first step
    if rank == 0:
        print(f"generation {GENERATION} begins after step {begin} with {world} ranks", flush=True)

    ddp = DistributedDataParallel(model)
    writer = SummaryWriter(CURVES / "tensorboard", purge_step=begin + 1) if FIRST_OF_NODE else None
    for step in range(begin + 1, args.steps + 1):
        x = 6 * torch.rand(args.batch, 1, generator=torch.Generator().manual_seed(step)) - 3
        share = x[rank::world].to(device)
        loss = mse_loss(ddp(share), share.sin(), reduction="sum") / args.batch
        optimizer.zero_grad()
        (loss * world).backward()  # DDP divides the sum of all ranks' gradients by their number
        optimizer.step()
        if step % args.save_every == 0:
            save(step, model=model, optimizer=optimizer)
            total = loss.detach()
            dist.all_reduce(total)
            if writer:
                writer.add_scalar("loss", total, step)
                writer.flush()
                line = {"kind": "step", "time": time.time(), "step": step, "steps": args.steps, "loss": float(total)}
                with (CURVES / "metrics.jsonl").open("a") as metrics:
                    metrics.write(json.dumps(line) + "\n")
            if rank == 0:
                print(f"step {step}: loss {float(total):.6f}", flush=True)
        time.sleep(args.pause)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
