"""transformers' Trainer: a callback that watches what quantization does.

    convert_to_float8_training(model, recipe="current", filter_fqns=["lm_head"])
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(MonitorCallback(trainer))

To convert, nothing is needed: the model is converted before the Trainer has it.

(Written for transformers 5.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from fp8rs.monitoring import Monitor, monitor

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):
    """Reports the statistics of ``fp8rs.monitor`` to the trackers that the Trainer reports to.

    Not to its progress bar and its ``log_history``: there are some for each operand of each layer.

    Args:
        trainer: whose trackers, those of ``TrainingArguments(report_to=...)``.
        every: one step of so many is logged; ``logging_steps`` by default.
        file: see ``fp8rs.monitor``.

    Attributes:
        monitor: the `fp8rs.Monitor`, once the training has begun.
    """

    monitor: Monitor

    def __init__(
        self, trainer: Any, every: int | None = None, *, file: str | Path | None = None
    ) -> None:
        self._trainer, self._every, self._file = trainer, every, file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is sharded, and a checkpoint is loaded."""
        every = self._every or max(1, int(args.logging_steps))
        first = int(state.global_step)
        self.monitor = monitor(kwargs["model"], every, file=self._file, first_step=first)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        statistics = self.monitor.step()
        trackers = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self._trainer.callback_handler.callbacks if statistics else ():
            if isinstance(callback, trackers):
                callback.on_log(args, state, control, logs=statistics, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch no more."""
        self.monitor.close()
