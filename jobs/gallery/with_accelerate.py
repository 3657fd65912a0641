"""A small byte-level language model with Accelerate, built from a configuration, so nothing is downloaded.

On one machine: LAUNCHER_OUTPUT=/tmp/bytes torchrun --nproc-per-node 2 jobs/gallery/with_accelerate.py
"""

import argparse
import math
from pathlib import Path

import report
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

OUTPUT = report.OUTPUT
SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}


def text(folder: str | None) -> bytes:
    """Return the text files of a folder, or generated sums: `12+7=19`."""
    if folder:
        return b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.suffix in (".txt", ".md"))
    return "".join(f"{a}+{b}={a + b}\n" for a in range(50) for b in range(50)).encode()


def blocks(data: bytes, length: int = 64) -> TensorDataset:
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return TensorDataset(whole[: len(whole) // length * length].view(-1, length))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder with .txt or .md files (default: generated sums)")
    parser.add_argument("--model", default="llama", help="model type in transformers: llama, qwen2, mistral, ...")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="batch size per process")
    args = parser.parse_args()

    project = ProjectConfiguration(project_dir=OUTPUT, logging_dir=OUTPUT / "tensorboard")
    # On a machine without GPUs Accelerate connects the ranks only with cpu=True; else each trains a separate model.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with="tensorboard", project_config=project)
    accelerator.init_trackers("bytes")
    accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device.type}", flush=True)
    set_seed(0)
    loader = DataLoader(blocks(text(args.data)), args.batch_size, shuffle=True, drop_last=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(args.model, **SHAPE, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = args.epochs * len(loader)

    begin, mean = 0, math.nan
    saved = sorted((OUTPUT / "checkpoints").glob("epoch-*"))  # complete: see below
    if saved:
        accelerator.load_state(saved[-1])
        begin = int(saved[-1].name.removeprefix("epoch-"))
    for epoch in range(begin, args.epochs):
        loader.set_epoch(epoch)
        for index, (batch,) in enumerate(loader, 1):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = epoch * len(loader) + index
            if step % 10 == 0:
                mean = float(accelerator.reduce(loss.detach(), "mean"))
                accelerator.log({"loss": mean}, step=step)
                if accelerator.is_main_process:
                    report.step(step, steps, mean, epoch=epoch + 1, epochs=args.epochs)
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}", flush=True)
        unfinished = OUTPUT / "checkpoints" / "unfinished"
        accelerator.save_state(unfinished)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            unfinished.rename(OUTPUT / "checkpoints" / f"epoch-{epoch + 1:04}")
        accelerator.wait_for_everyone()
    report.at_the_end(model, mean, accelerator.num_processes)
    accelerator.end_training()


if __name__ == "__main__":
    main()
