"""The trackers of transformers' Trainer and of accelerate log the statistics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fp8rs

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import INTEGRATION_TO_CALLBACK

from fp8rs.integrations.transformers import MonitorCallback
from internals import debug_of

ROWS = torch.arange(40 * 16).view(40, 16) % 64
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
    return fp8rs.convert_to_float8_training(model, recipe="delayed", filter_fqns=["lm_head"])


class Tracker(TrainerCallback):
    """Stands for TensorBoard, W&B and the others."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def test_statistics_go_to_the_trackers_and_nowhere_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tracker", Tracker)
    model = llama()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        save_strategy="no",
        report_to="tracker",
    )
    trainer = Trainer(model, arguments, train_dataset=DATA)
    callback = MonitorCallback(trainer, file=tmp_path / "run.jsonl")
    trainer.add_callback(callback)
    trainer.train()
    [tracker] = [c for c in trainer.callback_handler.callbacks if isinstance(c, Tracker)]
    reported = [(step, logs) for step, logs in tracker.logs if any("fp8/" in n for n in logs)]
    assert [step for step, _ in reported] == [1, 3, 5]
    name = "fp8/model.layers.0.self_attn.q_proj/input/sqnr_db"
    assert all(20 < logs[name] < 60 for _, logs in reported)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 2, 4]
    assert lines == [logs for _, logs in reported]
    assert not any("fp8/" in name for entry in trainer.state.log_history for name in entry)
    assert "fp8/" not in capsys.readouterr().out
    assert all(not debug_of(m) for m in model.modules() if isinstance(m, fp8rs.Float8Linear))


class Kept(GeneralTracker):
    """An accelerate tracker that records values in this process."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.logs = []

    @property
    def tracker(self):
        return self.logs

    def store_init_configuration(self, values):
        pass

    def log(self, values, step, **kwargs):
        self.logs.append((step, values))


def test_accelerate_page_logs_statistics():
    """Run the code block of accelerate's page with two micro-batches per step."""
    page = Path(__file__).parents[2] / "docs" / "clients" / "accelerate.md"
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if "fp8rs.monitor" in block
    ]
    tracker = Kept()
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    accelerator.init_trackers("run")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.stack([row["input_ids"] for row in DATA[:16]])
    data = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    names = {"model": model, "optimizer": optimizer, "data": data, "accelerator": accelerator}
    exec(code, names)
    [(step, logged)] = tracker.logs  # the first of two steps
    assert step == 1
    assert len(logged) == 7 * 18
    assert all(type(value) is float for value in logged.values())
