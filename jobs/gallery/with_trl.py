"""Supervised fine-tuning with TRL's SFTTrainer: a tiny model learns sums. Options: those of SFTConfig.

On one machine: LAUNCHER_OUTPUT=/tmp/trl torchrun --nproc-per-node 2 jobs/gallery/with_trl.py --use_cpu
"""

import sys
from pathlib import Path
from typing import Any

import report
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

TINY = Path(__file__).parent / "tiny"
CHECKPOINTS = report.OUTPUT / "checkpoints"


class Progress(TrainerCallback):
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **more: Any
    ) -> None:
        if state.is_world_process_zero and "loss" in logs:
            report.step(state.global_step, state.max_steps, logs["loss"])


def main() -> None:
    options = ["--output_dir", str(CHECKPOINTS), "--report_to", "tensorboard", *sys.argv[1:]]
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(options)
    set_seed(args.seed)
    # Yours: model="Qwen/Qwen3-0.6B", without processing_class, and load_dataset("trl-lib/Capybara")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)),
        processing_class=AutoTokenizer.from_pretrained(TINY),
        train_dataset=load_dataset("json", data_files=str(TINY / "sums.jsonl"), split="train"),
        args=args,
        callbacks=[Progress()],
    )
    saved = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    done = trainer.train(resume_from_checkpoint=saved)
    report.at_the_end(trainer.model, done.training_loss, trainer.accelerator.num_processes)


if __name__ == "__main__":
    main()
