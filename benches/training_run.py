"""Train a Llama on all text that the installed packages ship, in bf16 and in FP8, and compare.

    python benches/training_run.py data OUT            # tokens of the text, once
    python benches/training_run.py train OUT current   # one variant; resumes if it was interrupted
    python benches/training_run.py report OUT          # table, OUT/report.json and OUT/report.svg

The text is the sources and documentation in the standard library and in site-packages. A byte-level
BPE is trained on it (with tokenizers), or bytes are the tokens (--vocabulary 256). Files with equal
contents count once, and one file in 64 is held out.

Each variant is a process of its own, so several GPUs train side by side:

    n=0
    for variant in bf16-0 bf16-1 bf16-2 current mxfp8 fp8-weights torchao; do
        CUDA_VISIBLE_DEVICES=$n python benches/training_run.py train OUT $variant &
        n=$((n + 1))
    done
    wait

One call trains several variants, one after another. The sets are names of lists of variants:

    python benches/training_run.py train OUT moments        # FP8 moments, beta2 0.95
    python benches/training_run.py train OUT moments-seeds  # the same with seeds 1 and 2
    python benches/training_run.py train OUT moments-999    # beta2 0.999
    python benches/training_run.py train OUT 8-bit          # 8-bit optimizers on the bf16 model
    python benches/training_run.py train OUT fine-tune      # rates of 1e-6, after bf16-0

The fine-tuning variants start from the weights of bf16-0, which has to be trained first.

The variants have equal settings, and equal initial weights and batches except those with another
seed, such as bf16-1, which show how far results depend on it. A variant writes OUT/VARIANT.json and
a checkpoint in OUT/VARIANT, and resumes from them. With ``--save-every 0`` it writes no checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import Report, launch
from meter import peak_memory
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8rs import checkpoint, convert_to_float8_training
from fp8rs.demo.data import Corpus
from fp8rs.demo.model import LlamaConfig, parameter_count
from fp8rs.demo.train import (
    HIGH_PRECISION,
    Settings,
    build_model,
    held_out_loss,
    make_optimizer,
    shard,
    train_step,
)
from fp8rs.optim import AdamW


@dataclass(frozen=True)
class Variant:
    """One of the trainings that are compared."""

    title: str
    library: str = "torch"
    recipe: str | None = None
    fp8_weights: bool = False
    seed: int = 0
    #: "torch", "fp8rs", "torchao-8bit", "torchao-fp8" or "bitsandbytes-8bit"; by default fp8rs with
    #: FP8 weights, else torch.
    optimizer: str | None = None
    #: The state_dtype of fp8rs's AdamW.
    moments: str = "float32"
    masters: bool = True
    beta2: float = 0.95
    #: The variant whose weights it starts from.
    start: str | None = None
    #: A constant factor of the learning rate.
    rate: float = 1.0

    @property
    def optimizer_name(self) -> str:
        """The optimizer's library."""
        return self.optimizer or ("fp8rs" if self.fp8_weights else "torch")

    @property
    def is_reference(self) -> bool:
        """Whether it is a bf16 training with torch's optimizer."""
        return self.library == "torch" and self.optimizer_name == "torch"

    @property
    def can_resume(self) -> bool:
        """Whether its optimizer's state can be saved."""
        return self.optimizer_name in ("torch", "fp8rs")


VARIANTS = {
    "bf16-0": Variant("bf16"),
    "bf16-1": Variant("bf16, seed 1", seed=1),
    "bf16-2": Variant("bf16, seed 2", seed=2),
    "current": Variant("fp8rs current", "fp8rs", "current"),
    "mxfp8": Variant("fp8rs mxfp8", "fp8rs", "mxfp8"),
    "fp8-weights": Variant("fp8rs current, FP8 weights", "fp8rs", "current", fp8_weights=True),
    "torchao": Variant("torchao tensorwise", "torchao"),
    # FP8 moments. In FP8 weights, the optimizer is fp8rs's.
    "fp8-moments": Variant(
        "FP8 weights, 8-bit moments", "fp8rs", "current", fp8_weights=True, moments="fp8"
    ),
    "fp8-moments-no-masters": Variant(
        "FP8 weights, 8-bit moments, no masters",
        "fp8rs",
        "current",
        fp8_weights=True,
        moments="fp8",
        masters=False,
    ),
    "bf16-999": Variant("bf16, beta2 0.999", beta2=0.999),
    "fp8-weights-999": Variant(
        "FP8 weights, beta2 0.999", "fp8rs", "current", fp8_weights=True, beta2=0.999
    ),
    "fp8-moments-999": Variant(
        "FP8 weights, 8-bit moments, beta2 0.999",
        "fp8rs",
        "current",
        fp8_weights=True,
        moments="fp8",
        beta2=0.999,
    ),
    "fp8-moments-no-masters-999": Variant(
        "FP8 weights, 8-bit moments, no masters, beta2 0.999",
        "fp8rs",
        "current",
        fp8_weights=True,
        moments="fp8",
        masters=False,
        beta2=0.999,
    ),
    # 8-bit optimizers on the model in bf16, whose parameters are fp32.
    "8bit-fp8rs": Variant("bf16, fp8rs AdamW, 8-bit moments", optimizer="fp8rs", moments="fp8"),
    "8bit-torchao": Variant("bf16, torchao AdamW8bit", optimizer="torchao-8bit"),
    "8bit-torchao-fp8": Variant("bf16, torchao AdamWFp8", optimizer="torchao-fp8"),
    "8bit-bitsandbytes": Variant("bf16, bitsandbytes AdamW8bit", optimizer="bitsandbytes-8bit"),
    # Small rates, after bf16-0, with master weights.
    "tune-fp32": Variant(
        "fine-tuning, fp32 moments",
        "fp8rs",
        "current",
        optimizer="fp8rs",
        beta2=0.999,
        start="bf16-0",
        rate=1 / 600,
    ),
    "tune-fp8-moments": Variant(
        "fine-tuning, 8-bit moments",
        "fp8rs",
        "current",
        optimizer="fp8rs",
        moments="fp8",
        beta2=0.999,
        start="bf16-0",
        rate=1 / 600,
    ),
}

# Trainings with other seeds show whether a difference to bf16 is more than chance.
for _name in ("fp8-weights", "fp8-moments", "fp8-moments-no-masters"):
    for _seed in (1, 2):
        VARIANTS[f"{_name}-{_seed}"] = dataclasses.replace(
            VARIANTS[_name], title=f"{VARIANTS[_name].title}, seed {_seed}", seed=_seed
        )


#: Variants that one call trains, by the name of their set.
SETS = {
    "moments": [
        "bf16-0",
        "bf16-1",
        "bf16-2",
        "fp8-weights",
        "fp8-moments",
        "fp8-moments-no-masters",
    ],
    "moments-seeds": [
        "fp8-weights-1",
        "fp8-weights-2",
        "fp8-moments-1",
        "fp8-moments-2",
        "fp8-moments-no-masters-1",
        "fp8-moments-no-masters-2",
    ],
    "moments-999": [
        "bf16-999",
        "fp8-weights-999",
        "fp8-moments-999",
        "fp8-moments-no-masters-999",
    ],
    "8-bit": ["8bit-fp8rs", "8bit-torchao", "8bit-torchao-fp8", "8bit-bitsandbytes"],
    "fine-tune": ["tune-fp32", "tune-fp8-moments"],
}

#: Sizes of the model without its vocabulary: 308 M and 973 M parameters, and one for tests. A
#: vocabulary of 32768 tokens adds 67 M and 134 M.
SIZES: dict[str, dict[str, int]] = {
    "350m": {"dim": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "hidden": 2816},
    "1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192},
    "tiny": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 128},
}

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp", ".js"}
#: Shorter files are mostly empty, longer ones mostly tables of data.
SHORTEST, LONGEST = 256, 1 << 20
HELD_OUT_EVERY = 64
HELD_OUT_BATCHES = 8


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _options(arguments)
    code: int = options.run(options)
    return code


# Text


def prepare_data(options: argparse.Namespace) -> int:
    """Write OUT/tokens.pt: the tokens of the training text and of the held-out text."""
    roots = options.roots or [Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib")]
    parts: tuple[list[str], list[str]] = ([], [])
    for name, text in texts(roots):
        parts[zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0].append(text)
    if not all(parts):
        print(f"too little text below {', '.join(map(str, roots))}", file=sys.stderr)
        return 2
    encode = _tokenizer(parts[0], options.vocabulary)
    train, held_out = map(encode, parts)
    text_data = {
        "train": train,
        "held_out": held_out,
        "vocabulary": options.vocabulary,
        "files": sum(map(len, parts)),
        "bytes": sum(len(text.encode()) for part in parts for text in part),
        "sha256": hashlib.sha256(train.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(text_data, options.out / "tokens.pt")
    print(
        f"{text_data['files']} files, {text_data['bytes'] / 1e6:.1f} MB, "
        f"{train.numel():,} tokens to train on, {held_out.numel():,} held out, "
        f"sha256 {text_data['sha256'][:16]}"
    )
    return 0


def texts(roots: list[Path]) -> Iterator[tuple[str, str]]:
    """Return names and contents of the text files below some folders, sorted, each content once."""
    digests = set()
    paths = {str(path.relative_to(root)): path for root in roots for path in root.rglob("*")}
    for name, path in sorted(paths.items()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        if not SHORTEST <= path.stat().st_size <= LONGEST:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        with contextlib.suppress(UnicodeDecodeError):
            if digest not in digests:
                yield name, content.decode()
        digests.add(digest)


def _tokenizer(training: list[str], vocabulary: int) -> Any:
    """Return a function from texts to int32 tokens. 256 tokens are bytes, more are a BPE."""
    if vocabulary == 256:
        return lambda part: torch.frombuffer(
            bytearray("".join(part).encode()), dtype=torch.uint8
        ).int()
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    # A part of the text suffices: every 8th file.
    tokenizer.train_from_iterator(training[::8], vocab_size=vocabulary, show_progress=False)

    def encode(part: list[str]) -> torch.Tensor:
        pieces = []
        for start in range(0, len(part), 256):
            for text in tokenizer.encode_batch(part[start : start + 256]):
                pieces.append(torch.tensor(text.ids, dtype=torch.int32))
        return torch.cat(pieces)

    return encode


# Training


def train(options: argparse.Namespace) -> int:
    """Train a variant, or the variants of a set, up to the last step or until the time limit."""
    code = 0
    for variant in SETS.get(options.variant, [options.variant]):
        code = max(code, train_one(options, variant))
    return code


def train_one(options: argparse.Namespace, variant: str) -> int:
    """Train one variant up to its last step, or until the time limit."""
    tokens = torch.load(options.out / "tokens.pt", weights_only=True, mmap=True)
    model = LlamaConfig(tokens["vocabulary"], **SIZES[options.size], rope_base=500_000.0)
    settings = Settings(
        model,
        options.device,
        options.steps,
        options.rows,
        options.length,
        options.learning_rate * VARIANTS[variant].rate,
        seed=VARIANTS[variant].seed,
    )
    result = launch(
        train_variant,
        variant,
        settings,
        str(options.out),
        {name: getattr(options, name) for name in ("every", "save_every", "compile", "seconds")},
        ranks=options.ranks,
        device=options.device,
        on_event=lambda event: print(event["line"], flush=True),
    )[0]
    return 0 if result["step"] == options.steps else 3


def train_variant(
    name: str, settings: Settings, out: str, options: dict[str, Any], report: Report
) -> dict[str, Any]:
    """Train on this rank. Resume from the checkpoint of an earlier call.

    Args:
        name: the name of the variant.
        settings: settings of the training, equal on all ranks.
        out: the folder of the tokens and the results.
        options: "every" is the number of steps between evaluations, "save_every" between
            checkpoints (0: none), "compile" whether to compile blocks, "seconds" when to stop.
        report: called with lines of progress.
    """
    begun = time.monotonic()
    variant = VARIANTS[name]
    ranks = dist.get_world_size()
    tokens = torch.load(Path(out, "tokens.pt"), weights_only=True, mmap=True)
    corpus = Corpus(tokens["train"], tokens["held_out"])

    model = build_model(settings)
    params = parameter_count(model)
    after_step = _convert(model, variant, settings.device)
    if options["compile"]:
        for block in model.blocks:
            block.compile()
    shard(model)
    optimizer = _optimizer(model, settings, variant)

    file = Path(out, f"{name}.json")
    folder = Path(out, name)
    state: dict[str, Any] = {"model": checkpoint.Model(model)}
    if variant.start is not None:
        start = json.loads(Path(out, f"{variant.start}.json").read_text())
        checkpoint.load({**state}, Path(out, variant.start, f"step-{start['step']}"))
    resumes = variant.can_resume and options["save_every"] > 0
    if resumes:
        state["optimizer"] = checkpoint.Optimizer(model, optimizer)

    # What two calls of a resumed training must agree about.
    fixed = {
        "variant": name,
        "title": variant.title,
        "settings": dataclasses.asdict(settings),
        "ranks": ranks,
        "compiled": options["compile"],
        "params": params,
        "tokens": tokens["sha256"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
    }

    run: dict[str, Any] = {"step": 0, "train": [], "held_out": [], "speeds": [], "peak_memory": 0}
    is_partial = file.exists() and json.loads(file.read_text())["step"] < settings.steps
    if is_partial and not resumes:
        file.unlink()  # its state was not saved, so it begins again
    if file.exists():
        run = json.loads(file.read_text())
        differing = [key for key, value in _plain(fixed).items() if run.get(key) != value]
        if differing:
            raise ValueError(f"{file} is of a run with other {', '.join(differing)}: remove {file}")
        if resumes:
            checkpoint.load({**state}, folder / f"step-{run['step']}")
    run |= _plain(fixed)
    if run["step"] == 0:
        run["held_out"] = [[0, held_out_loss(model, corpus, settings, HELD_OUT_BATCHES)]]

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    stop = run["step"] == settings.steps
    while not stop:
        first = run["step"]
        until = min(first + options["every"], settings.steps)
        losses = torch.zeros((), device=settings.device)
        started = _now(settings.device)
        for step in range(first, until):
            rows = corpus.batch(settings.seed, step, settings.rows, settings.length)
            rows = rows.chunk(ranks)[dist.get_rank()].to(settings.device, non_blocking=True)
            with sdpa_kernel(kernels, set_priority=True):
                losses += train_step(model, optimizer, settings, step, rows)
            after_step(model)

        seconds = _now(settings.device) - started
        dist.all_reduce(losses)
        run["step"] = until
        run["train"].append([until, losses.item() / ranks / (until - first)])
        run["held_out"].append([until, held_out_loss(model, corpus, settings, HELD_OUT_BATCHES)])
        run["speeds"].append((until - first) * settings.rows * settings.length / seconds)
        run["peak_memory"] = max(run["peak_memory"], peak_memory(settings.device))
        run["state_bytes"] = _state_bytes(optimizer)

        stop = until == settings.steps or _expired(begun, options["seconds"], settings)
        if stop or not resumes or until % options["save_every"] == 0:
            _save(state, run, folder, file)
        report(
            {
                "line": f"{name}: step {until}/{settings.steps}, held-out loss "
                f"{run['held_out'][-1][1]:.4f}, {run['speeds'][-1]:,.0f} tokens/s"
            }
        )
    return run


def _convert(model: torch.nn.Module, variant: Variant, device: str) -> Any:
    """Convert the model, and return a function to call after each optimizer step."""
    if variant.library == "fp8rs":
        fp8 = variant.fp8_weights
        recipe: Any = variant.recipe
        convert_to_float8_training(
            model,
            recipe=recipe,
            gemms="fp8",
            filter_fqns=HIGH_PRECISION,
            fp8_weights=fp8,
            preserve_high_precision_init_val=fp8,
        )
    elif variant.library == "torchao":
        from torchao import float8

        config = float8.Float8LinearConfig(
            enable_fsdp_float8_all_gather=True, emulate=device == "cpu"
        )
        float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name != "head"
        )
        return float8.precompute_float8_dynamic_scale_for_fsdp
    return lambda model: None


def _optimizer(
    model: torch.nn.Module, settings: Settings, variant: Variant
) -> torch.optim.Optimizer:
    if variant.optimizer_name == "torch":
        optimizer = make_optimizer(model, settings)
        for group in optimizer.param_groups:
            group["betas"] = (0.9, variant.beta2)
        return optimizer

    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (0.9, variant.beta2),
        "weight_decay": 0.1,
    }
    if variant.optimizer_name == "fp8rs":
        options["state_dtype"] = "fp8" if variant.moments == "fp8" else torch.float32
        options["master_weights"] = variant.masters
        if variant.recipe is None:
            # As in the converted model: all linear layers except the head.
            weights = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.")}
            options["state_filter"] = lambda param: id(param) in weights and param.ndim == 2
        return AdamW(model.parameters(), **options)
    if variant.optimizer_name == "bitsandbytes-8bit":
        import bitsandbytes

        return _on_local_tensors(model, bitsandbytes.optim.AdamW8bit, options)
    from torchao import optim

    # A changed rate must be a tensor, or the step is compiled again.
    options["lr"] = torch.tensor(settings.learning_rate, device=settings.device)
    kind = optim.AdamW8bit if variant.optimizer_name == "torchao-8bit" else optim.AdamWFp8
    return kind(model.parameters(), **options)


def _on_local_tensors(
    model: torch.nn.Module, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer that does not support DTensors, of this rank's parts of the parameters.

    A step moves the gradients from the parameters to the parts.
    """
    parts = {}
    for param in model.parameters():
        local: Any = param
        parts[param] = torch.nn.Parameter(local.to_local().detach())
    optimizer = kind(parts.values(), **options)

    def move_gradients(*_: Any) -> None:
        for param, part in parts.items():
            gradient: Any = param.grad
            part.grad = gradient.to_local()
            param.grad = None

    optimizer.register_step_pre_hook(move_gradients)
    return optimizer


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    count = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                count += _tensor_bytes(value)
    return count


def _tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors that a subclass consists of."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_tensor_bytes(getattr(tensor, name)) for name in names)
    return int(tensor.nbytes)


def _plain(values: dict[str, Any]) -> Any:
    """Return values as they are after they were written to a JSON file and read."""
    return json.loads(json.dumps(values))


def _expired(begun: float, seconds: float, settings: Settings) -> bool:
    """Return whether the time limit has passed on any rank."""
    over = torch.tensor(float(time.monotonic() - begun > seconds), device=settings.device)
    dist.all_reduce(over)
    return over.item() > 0


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _save(state: dict[str, Any], found: dict[str, Any], folder: Path, file: Path) -> None:
    """Save a checkpoint, then the results, and remove older checkpoints.

    If this is interrupted, the results name a checkpoint that exists.
    """
    first, path = dist.get_rank() == 0, folder / f"step-{found['step']}"
    if first:
        shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(exist_ok=True)
    dist.barrier()
    if "optimizer" in state:
        checkpoint.save({**state}, path)
    elif first:
        path.mkdir()
    if first:
        written = file.with_suffix(".partial")
        written.write_text(json.dumps(found, indent=1) + "\n")
        written.replace(file)
        for older in set(folder.iterdir()) - {path}:
            shutil.rmtree(older)
    dist.barrier()


# Results


def report(options: argparse.Namespace) -> int:
    """Write OUT/report.json and OUT/report.svg, and print the table."""
    files = {name: options.out / f"{name}.json" for name in VARIANTS}
    runs = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if not runs:
        print(f"{options.out} has no results: run the train command first", file=sys.stderr)
        return 2
    results = summary(runs)
    text = json.dumps({"summary": results, "runs": runs}, indent=1) + "\n"
    (options.out / "report.json").write_text(text)
    draw(runs, options.out / "report.svg")
    print(table(results))
    return 0


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the last loss, speed and memory of each run.

    The last loss is the mean of the last five evaluations. "above_bf16" is relative to the mean of
    the bf16 runs with the same beta2, at the same steps. A run that was stopped is thus compared
    with evaluations before the end of the bf16 runs. Fine-tuning is compared with fp32 moments
    instead.
    """
    results = {}
    for name, run in runs.items():
        steps = [step for step, _ in run["held_out"][-5:]]
        loss = mean_loss(run, steps)
        reference_losses = []
        for reference in references_of(name):
            # A reference that was stopped earlier has no loss at these steps.
            if reference in runs and runs[reference]["step"] >= run["step"]:
                reference_losses.append(mean_loss(runs[reference], steps))
        above = loss / statistics.fmean(reference_losses) - 1 if reference_losses else None
        speeds = run["speeds"]
        if len(speeds) > 1:
            speeds = speeds[1:]  # The first interval includes compilation.

        results[name] = {
            "title": VARIANTS[name].title,
            "step": run["step"],
            "loss": loss,
            "above_bf16": above,
            "tokens_per_second": statistics.median(speeds),
            "peak_memory": run["peak_memory"],
            "state_bytes_per_parameter": run.get("state_bytes", 0) * run["ranks"] / run["params"],
        }
    return results


def mean_loss(run: dict[str, Any], steps: list[int]) -> float:
    """Return the mean of a run's held-out losses after some steps."""
    losses = dict(run["held_out"])
    return statistics.fmean(losses[step] for step in steps)


def references_of(name: str) -> list[str]:
    """Return the variants that a variant is compared with."""
    variant = VARIANTS[name]
    if variant.start is not None:
        return ["tune-fp32"]
    return [
        other
        for other, reference in VARIANTS.items()
        if reference.is_reference and reference.beta2 == variant.beta2
    ]


def table(results: dict[str, Any]) -> str:
    """Return the summary as a Markdown table."""
    lines = [
        "| variant | steps | held-out loss | above mean of bf16 | tokens/s | peak GB "
        "| state, bytes a parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results.values():
        above = "" if row["above_bf16"] is None else f"{row['above_bf16']:+.2%}"
        lines.append(
            f"| {row['title']} | {row['step']:,} | {row['loss']:.4f} | {above} | "
            f"{row['tokens_per_second']:,.0f} | {row['peak_memory'] / 1e9:.1f} | "
            f"{row['state_bytes_per_parameter']:.2f} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw held-out losses, and in a panel for each group of variants their ratios to bf16.

    Fine-tuning starts from other weights, so it is in the table only.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "fp8rs"  # for reproducible bytes
    curves = {}
    variants_of_panels: dict[str, list[str]] = {}
    for name, run in runs.items():
        variant = VARIANTS[name]
        if variant.start is None:
            curves[name] = dict(run["held_out"])
            if not variant.is_reference:
                variants_of_panels.setdefault(panel_of(variant), []).append(name)

    rows = 1 + len(variants_of_panels) // 2
    figure = Figure(figsize=(10, 3.8 * rows), layout="constrained")
    losses, *panels = figure.subplots(rows, 2).flat
    compared = [name for names in variants_of_panels.values() for name in names]
    # All colors of the cycle but grey, which is the color of bf16.
    colors = dict(zip(compared, itertools.cycle(f"C{n}" for n in range(10) if n != 7)))
    for name, curve in curves.items():
        width = 1 if name in colors else 2
        losses.plot(curve.keys(), curve.values(), color=colors.get(name, "0.6"), linewidth=width)
    losses.set(xlabel="step", ylabel="nats per token", title="Held-out loss, bf16 in grey")
    losses.grid(alpha=0.3)

    for axes in panels[len(variants_of_panels) :]:
        axes.set_visible(False)
    for axes, (title, names) in zip(panels, variants_of_panels.items(), strict=False):
        draw_ratios(axes, names, curves, colors)
        axes.set(xlabel="step", ylabel="percent above the mean of bf16", title=title)
    figure.savefig(path, metadata={"Date": None})


def draw_ratios(
    axes: Any, names: list[str], curves: dict[str, dict[int, float]], colors: dict[str, str]
) -> None:
    """Draw ratios of losses to the mean of their common references, and the references' range."""
    references = [curves[name] for name in references_of(names[0]) if name in curves]
    steps = sorted(set.intersection(*map(set, references))) if references else []
    means = {step: statistics.fmean(curve[step] for curve in references) for step in steps}

    def above_mean(curve: dict[int, float]) -> dict[int, float]:
        return {step: 100 * (curve[step] / means[step] - 1) for step in curve if step in means}

    axes.axhline(0, color="0.6", linewidth=1)
    if len(references) > 1:
        ratios = [above_mean(curve) for curve in references]
        lowest = [min(curve[step] for curve in ratios) for step in steps]
        highest = [max(curve[step] for curve in ratios) for step in steps]
        axes.fill_between(steps, lowest, highest, color="0.85", label="range of bf16's seeds")
    for name in names:
        curve = above_mean(curves[name])
        title = VARIANTS[name].title
        axes.plot(curve.keys(), curve.values(), color=colors[name], linewidth=1, label=title)
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def panel_of(variant: Variant) -> str:
    """Return the title of the panel that a variant is drawn in. It has the same references."""
    title = "Optimizers of the bf16 model" if variant.library == "torch" else "FP8 models"
    return title if variant.beta2 == 0.95 else f"{title}, beta2 {variant.beta2}"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    data = commands.add_parser("data", help="write the tokens of the text")
    data.add_argument("out", type=Path, metavar="OUT")
    data.add_argument("--vocabulary", type=int, default=32768, help="256: bytes; more: a BPE")
    data.add_argument("--roots", type=Path, nargs="+", help="folders; default: Python's")
    data.set_defaults(run=prepare_data)

    cuda = torch.cuda.is_available()
    one = commands.add_parser("train", help="train one variant or a set of them, or resume it")
    one.add_argument("out", type=Path, metavar="OUT")
    choices = [*VARIANTS, *SETS]
    one.add_argument("variant", choices=choices, metavar="VARIANT", help=", ".join(choices))
    one.add_argument("--size", choices=SIZES, default="350m")
    one.add_argument("--steps", type=int, default=3000)
    one.add_argument("--rows", type=int, default=16, help="global batch size, in sequences")
    one.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    one.add_argument("--learning-rate", type=float, default=6e-4, help="its peak")
    one.add_argument("--every", type=int, default=50, help="steps between evaluations")
    one.add_argument(
        "--save-every",
        type=int,
        default=500,
        help="steps between checkpoints, in whole evaluations; 0: no checkpoints",
    )
    one.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    one.add_argument("--ranks", type=int, default=1)
    one.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    one.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    one.set_defaults(run=train)

    results = commands.add_parser("report", help="compare the variants that were trained")
    results.add_argument("out", type=Path, metavar="OUT")
    results.set_defaults(run=report)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
