"""A LightningModule with a Trainer that reads torchrun's environment variables; only the output folder is set.

On one machine: LAUNCHER_OUTPUT=/tmp/spirals torchrun --nproc-per-node 2 jobs/gallery/with_lightning.py
"""

import argparse
import os
from typing import Any

import pytorch_lightning as pl
import report
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

OUTPUT = report.OUTPUT


def spirals(count: int = 1024, classes: int = 3) -> TensorDataset:
    """Points on the arms of a spiral; the label is the arm."""
    random = torch.Generator().manual_seed(0)
    labels, radius = torch.arange(count) % classes, torch.rand(count, generator=random)
    angle = 5 * radius + labels * 2 * torch.pi / classes + 0.1 * torch.randn(count, generator=random)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        points, labels = batch
        logits = self.network(points)
        loss = cross_entropy(logits, labels)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Progress(pl.Callback):
    """Writes lines for `launcher status`, and a log line per epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *batch: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % trainer.log_every_n_steps == 0:
            step, steps = trainer.global_step, int(trainer.estimated_stepping_batches)
            epochs = {"epoch": trainer.current_epoch + 1, "epochs": trainer.max_epochs}
            report.step(step, steps, float(outputs["loss"]), **epochs)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            accuracy = float(trainer.callback_metrics["accuracy"])
            print(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}: accuracy {accuracy:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per process")
    args = parser.parse_args()

    pl.seed_everything(0)
    checkpoints = OUTPUT / "checkpoints"
    trainer = pl.Trainer(
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=args.epochs,
        log_every_n_steps=8,
        logger=TensorBoardLogger(OUTPUT, name="tensorboard", version=""),
        callbacks=[ModelCheckpoint(checkpoints, filename="last", enable_version_counter=False), Progress()],
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        print(f"{trainer.world_size} processes", flush=True)
    last = checkpoints / "last.ckpt"
    loader = DataLoader(spirals(), args.batch_size, shuffle=True)  # the Trainer gives each rank its share
    model = Classifier()
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)
    report.at_the_end(model, float(trainer.callback_metrics["loss"]), trainer.world_size)


if __name__ == "__main__":
    main()
