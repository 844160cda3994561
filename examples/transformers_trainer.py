"""Train with transformers' Trainer.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import argparse
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from fp8rs import convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu
from fp8rs.optim import AdamW, MasterWeights


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--fp8-weights", action="store_true", help="store weights in FP8")
    parser.add_argument("--fp8-moments", action="store_true", help="AdamW with 8-bit moments")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output", default="trainer-output", help="folder of the checkpoints")
    parser.add_argument("--resume", help="a checkpoint: FOLDER/checkpoint-N")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        fsdp2_on_cpu()  # accelerate, which Trainer uses, shards only on accelerators
    training = TrainingArguments(
        output_dir=args.output,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        save_steps=3,
        logging_steps=1,
        report_to="none",
    )
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    optimizer = {}  # Trainer creates torch's AdamW.
    if args.recipe != "bf16":
        options = {"filter_fqns": ["lm_head"], "fp8_weights": args.fp8_weights}
        options["preserve_high_precision_init_val"] = args.fp8_weights
        convert_to_float8_training(model, recipe=args.recipe, **options)
    if args.fp8_weights:  # without masters, updates smaller than half a code are lost
        options = {"optimizer_class": torch.optim.AdamW, "lr": training.learning_rate}
        optimizer = {"optimizer_cls_and_kwargs": (MasterWeights, options)}
    if args.fp8_moments:
        options = {"lr": training.learning_rate, "weight_decay": 0.0, "state_dtype": "fp8"}
        optimizer = {"optimizer_cls_and_kwargs": (AdamW, options)}
    rows = torch.tensor(list(inspect.getsource(argparse).encode())[: 64 * 1024]).view(-1, 64)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, training, train_dataset=data[64:], eval_dataset=data[:64], **optimizer)
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "evaluation": trainer.evaluate()["eval_loss"]}


if __name__ == "__main__":
    main()
