"""Times GRPO steps of TRL; runs in TRL's own environment, called by bench_vs_trl.py.

    python trl_step.py '{"model": FOLDER, "prompts": [...], "dtype": "float32", ...}'

Prints one JSON line: seconds of every step, from one optimizer step to the next.
"""

import json
import os
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Wall time at the end of every optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.perf_counter())


def even_digits(completions: list[str], **_: object) -> list[float]:
    """A reward with a spread, so that every group has gradients."""
    return [sum(c in "02468" for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    clock = StepClock()
    rollouts = job["groups"] * job["group_size"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["microbatch_rollouts"],
            gradient_accumulation_steps=rollouts // job["microbatch_rollouts"],
            num_generations=job["group_size"],
            max_completion_length=job["max_new_tokens"],
            generation_kwargs={"min_new_tokens": job["max_new_tokens"]},
            max_steps=job["steps"],
            learning_rate=1e-5,
            temperature=1.0,
            top_p=1.0,
            beta=0.0,
            bf16=job["dtype"] == "bfloat16",
            model_init_kwargs={"dtype": job["dtype"]},
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=even_digits,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in job["prompts"]]),
            callbacks=[clock],
        )
        trainer.train()
        log = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    steps = [after - before for before, after in zip(clock.ends, clock.ends[1:])]
    print(json.dumps({"step_s": steps, "mean_length": log[-1]["completions/mean_length"]}))


if __name__ == "__main__":
    main()
