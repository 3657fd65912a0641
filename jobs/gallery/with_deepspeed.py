"""A tiny transformer under DeepSpeed's ZeRO, built from a configuration; the ranks are those of torchrun.

On one machine: LAUNCHER_OUTPUT=/tmp/zero torchrun --nproc-per-node 2 jobs/gallery/with_deepspeed.py
"""

import argparse
import json
import math
from pathlib import Path

import deepspeed
import report
import torch
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

TINY = Path(__file__).parent / "tiny"
CHECKPOINTS = report.OUTPUT / "checkpoints"
LENGTH = 64  # tokens of a block


def sums() -> TensorDataset:
    rows = [json.loads(line) for line in (TINY / "sums.jsonl").read_text().splitlines()]
    text = "\n".join(row["prompt"] + row["completion"] for row in rows)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(TINY)(text)["input_ids"])
    return TensorDataset(tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="batch size per process")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    args = parser.parse_args()

    set_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "tensorboard": {"enabled": True, "output_path": str(report.OUTPUT / "tensorboard"), "job_name": ""},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    # Reads RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, which torchrun has set, and selects NCCL or gloo
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=sums(), config=config
    )
    _, state = engine.load_checkpoint(CHECKPOINTS)
    steps, last = args.epochs * len(loader), math.nan
    for epoch in range((state or {}).get("epoch", 0), args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for (batch,) in loader:
            tokens = batch.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        last = float(mean) / engine.world_size
        if engine.global_rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {last:.4f}", flush=True)
            report.step(engine.global_steps, steps, last)
        engine.save_checkpoint(CHECKPOINTS, client_state={"epoch": epoch + 1})  # on all ranks: each has its shard
    report.at_the_end(engine.module, last, engine.world_size)


if __name__ == "__main__":
    main()
