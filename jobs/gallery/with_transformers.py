"""A language model under the Trainer of transformers, as in its run_clm.py. Options: those of TrainingArguments.

On one machine: LAUNCHER_OUTPUT=/tmp/trainer torchrun --nproc-per-node 2 jobs/gallery/with_transformers.py --use_cpu
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
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

TINY = Path(__file__).parent / "tiny"
CHECKPOINTS = report.OUTPUT / "checkpoints"
LENGTH = 64  # tokens of a block


class Progress(TrainerCallback):
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **more: Any
    ) -> None:
        if state.is_world_process_zero and "loss" in logs:
            report.step(state.global_step, state.max_steps, logs["loss"])


def main() -> None:
    options = ["--output_dir", str(CHECKPOINTS), "--report_to", "tensorboard", *sys.argv[1:]]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(options)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    # Yours: AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), its tokenizer, and load_dataset("wikitext", ...)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    sums = load_dataset("json", data_files=str(TINY / "sums.jsonl"), split="train")

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        text = "\n".join(map("".join, zip(rows["prompt"], rows["completion"], strict=True)))
        tokens = tokenizer(text)["input_ids"]
        return {"input_ids": [tokens[at : at + LENGTH] for at in range(0, len(tokens) - LENGTH + 1, LENGTH)]}

    with args.main_process_first(local=True):  # the others of this node read its cache
        dataset = sums.map(blocks, batched=True, remove_columns=sums.column_names)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=collator, callbacks=[Progress()])
    saved = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
    done = trainer.train(resume_from_checkpoint=saved)
    report.at_the_end(model, done.training_loss, trainer.accelerator.num_processes)


if __name__ == "__main__":
    main()
