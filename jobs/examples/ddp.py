"""An ordinary torchrun script, independent of the launcher: an image classifier with DDP.

On one machine: torchrun --nproc-per-node 2 jobs/examples/ddp.py --dir /tmp/stripes
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models
from torchvision.transforms import v2

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True, help="output folder for checkpoints and curves")
parser.add_argument("--data", help="image folder with a folder per class (default: generated images)")
parser.add_argument("--model", default="shufflenet_v2_x0_5", help="torchvision classifier")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=16, help="batch size per process")


def stripes(count: int = 512, side: int = 32) -> TensorDataset:
    """Noisy images of stripes; the label is their direction, one of four."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 4
    angle, phase = labels[:, None, None] * torch.pi / 4, torch.rand(count, 1, 1, generator=random) * 6.3
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    waves = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    return TensorDataset(waves[:, None] + 0.5 * torch.randn(count, 3, side, side, generator=random), labels)


def main() -> None:
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    first = dist.get_rank() == 0

    torch.manual_seed(0)
    read = v2.Compose([v2.ToImage(), v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True)])
    data = datasets.ImageFolder(args.data, read) if args.data else stripes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = models.get_model(args.model, num_classes=len(data.classes) if args.data else 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    # Rank 0 reads the checkpoint and broadcasts it, so only the first machine needs it.
    last = args.dir / "checkpoints" / "last.pt"
    found = [torch.load(last, map_location="cpu") if first and last.exists() else None]
    dist.broadcast_object_list(found)
    if found[0]:
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
    ddp = DistributedDataParallel(model)
    writer = SummaryWriter(args.dir / "tensorboard") if first else None

    for epoch in range(found[0]["epochs"] if found[0] else 0, args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(3, device=device)  # loss, correct predictions, images
        for batch in loader:
            images, labels = (tensor.to(device) for tensor in batch)
            logits = ddp(images)
            loss = cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[0] += loss.detach() * len(labels)
            seen[1] += (logits.argmax(1) == labels).sum()
            seen[2] += len(labels)
        dist.all_reduce(seen)
        if writer:
            loss, accuracy = (seen[:2] / seen[2]).tolist()
            print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.1%}", flush=True)
            writer.add_scalar("loss", loss, epoch + 1)
            writer.add_scalar("accuracy", accuracy, epoch + 1)
            writer.flush()
            last.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, last.with_suffix(".tmp"))
            last.with_suffix(".tmp").replace(last)  # atomic: a kill during the write keeps the previous one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
