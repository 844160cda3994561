"""Train LoRA adapters on the codes of a published FP8 checkpoint, save them alone, and merge them.

Needs transformers and peft.

torchrun --standalone --nproc-per-node 2 examples/lora_fp8_checkpoint.py, on GPUs or on CPUs with
gloo. Without --checkpoint, a small model with random weights stands for the published one.

The base keeps the codes of the files, 1 byte per weight, and FSDP2 gathers them as they are. It is
frozen, so its layers compute no gradients of weights and save no inputs. The adapters are bf16.
"""

import argparse
import inspect
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.export import load, save_pretrained

BF16 = torch.bfloat16


def small_checkpoint(folder, width, layers):
    """Write a checkpoint as DeepSeek and Qwen publish theirs: blocks of 128x128."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 128),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(BF16)
    convert_to_float8_training(model, recipe="block", filter_fqns=["lm_head"])
    save_pretrained(model, folder, format="fp8-block")


def frozen_base(checkpoint, fp8, device):
    """Return the model of a checkpoint, with the codes of the files or dequantized to bf16."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(checkpoint)
        del config.quantization_config  # transformers would quantize the model itself
        model = AutoModelForCausalLM.from_config(config, dtype=BF16)
        if fp8:
            convert_to_float8_training(
                model,
                recipe="block",
                filter_fqns=["lm_head"],
                gemms="fp8",
                fp8_weights=True,
            )
    model.to_empty(device=device)
    # The buffers of rotary positions are computed and not in the files.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    loaded = load(model, checkpoint)
    assert len(loaded.exact) == (7 * config.num_hidden_layers if fp8 else 0)
    return model.requires_grad_(False)


def batches(steps, length, rank, ranks, device):
    """Yield bytes of Python sources, (1, length) for each rank."""
    data = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    data = data.repeat(-(-ranks * length // len(data))).long()
    rows = data[: len(data) // length * length].view(-1, length)
    for step in range(steps):
        yield rows[(step * ranks + rank) % len(rows)].unsqueeze(0).to(device)


def merge(checkpoint, adapters, folder):
    """Merge adapters into the dequantized base and save it in bf16. One process does this."""
    model = frozen_base(checkpoint, fp8=False, device="cpu")
    PeftModel.from_pretrained(model, adapters).merge_and_unload().save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", help="the folder of an FP8 checkpoint")
    parser.add_argument("--base", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--width", type=int, default=128, help="of the small model")
    parser.add_argument("--layers", type=int, default=2, help="of the small model")
    parser.add_argument("--length", type=int, default=64, help="tokens of a batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="a folder for the adapters, and for the merged model")
    args = parser.parse_args(argv)

    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)

    checkpoint = args.checkpoint
    if checkpoint is None and rank == 0:
        checkpoint = tempfile.mkdtemp()
        small_checkpoint(checkpoint, args.width, args.layers)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    checkpoints = [checkpoint]
    dist.broadcast_object_list(checkpoints, 0)
    checkpoint = checkpoints[0]

    model = frozen_base(checkpoint, args.base == "fp8", device)
    torch.manual_seed(0)  # equal adapters on all ranks
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses = []
    start = time.perf_counter()
    for step, tokens in enumerate(batches(args.steps, args.length, rank, ranks, device)):
        if step == args.steps // 2:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()  # the first steps are slower
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())

    mean_losses = torch.stack(losses) / ranks
    dist.all_reduce(mean_losses)
    losses = mean_losses.tolist()
    timed_steps = args.steps - args.steps // 2
    step_ms = 1e3 * (time.perf_counter() - start) / timed_steps
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    if rank == 0:
        print(f"{args.base} base: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
        print(f"{step_ms:.1f} ms per step, {peak_gb:.2f} GB at most", flush=True)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)  # on every rank; rank 0 gets the tensors
    if rank == 0 and args.save:
        model.save_pretrained(args.save, state_dict=state)
    time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
    dist.destroy_process_group()
    if rank == 0 and args.save:
        merge(checkpoint, args.save, os.path.join(args.save, "merged"))
    if rank == 0 and args.checkpoint is None:
        shutil.rmtree(checkpoint)
    return {"losses": losses}


if __name__ == "__main__":
    main()
