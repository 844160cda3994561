"""Integration with the Trainer of transformers 5: a callback that logs `fp8rs.monitor`.

    convert_to_float8_training(model, recipe="current", filter_fqns=["lm_head"])
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(MonitorCallback(trainer))

Training a converted model with the Trainer needs no integration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from fp8rs.monitoring import Monitor, monitor

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):
    """Reports the statistics of ``fp8rs.monitor`` to the Trainer's trackers.

    The progress bar and ``log_history`` do not get them, because there are several per operand of
    each layer.

    Args:
        trainer: the Trainer, whose trackers are set by ``TrainingArguments(report_to=...)``.
        every: interval in steps. The default is ``logging_steps``.
        file: as in ``fp8rs.monitor``.

    Attributes:
        monitor: the `fp8rs.Monitor`, after training has begun.
    """

    monitor: Monitor

    def __init__(
        self, trainer: Any, every: int | None = None, *, file: str | Path | None = None
    ) -> None:
        self._trainer, self._every, self._file = trainer, every, file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the monitor. The model is sharded and loaded."""
        every = self._every or max(1, int(args.logging_steps))
        first = int(state.global_step)
        self.monitor = monitor(kwargs["model"], every, file=self._file, first_step=first)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the statistics after an optimizer step."""
        statistics = self.monitor.step()
        trackers = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self._trainer.callback_handler.callbacks if statistics else ():
            if isinstance(callback, trackers):
                callback.on_log(args, state, control, logs=statistics, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        self.monitor.close()
