"""Counts the forward passes and optimizer steps of one model."""

from __future__ import annotations


class StepTracker:
    """Counts the forward passes and optimizer steps of one model.

    Histories roll at the first step after amaxes were recorded. A step is one roll, however many
    micro-batches it has, and the steps of two optimizers are one roll.

    A forward with gradients inside a backward is a recomputation (activation checkpointing of the
    whole model) and counts as the forward that it repeats. A forward without gradients inside a
    backward is a forward of its own, such as a teacher's in a backward hook of its student.

    The counts are equal on all ranks, because collectives depend on them. State that may differ
    between ranks, such as tensor versions, does not belong here.

    Attributes:
        forward_id: number of forwards that have begun.
        in_forward: a forward is running.
        training: the last forward was in training mode, so its amaxes are recorded.
        unannounced: the last step may have followed a forward that no hook announced.
    """

    def __init__(self) -> None:
        self.forward_id = 0
        self.in_forward = False
        self.training = False
        self.unannounced = False
        self._steps = 0
        self._stepped_at = 0
        #: The step of the last roll.
        self._rolled = 0
        #: Amaxes have been recorded since the last roll.
        self._recorded = False

    def begin_forward(self, *, training: bool, grad: bool, in_backward: bool) -> bool:
        """Begin a forward of the model. Return False if it is a recomputation.

        Args:
            training: the model is in training mode.
            grad: gradients are enabled.
            in_backward: this thread is inside a backward, of any model.
        """
        if in_backward and grad and self.forward_id:
            return False
        self.forward_id += 1
        self.in_forward = True
        self.training = training
        return True

    def end_forward(self) -> None:
        """End a forward that returned or raised."""
        self.in_forward = False

    def recorded(self) -> None:
        """Note that amaxes are being recorded."""
        self._recorded = True

    def stepped(self, silent: bool = False) -> None:
        """Note a step of an optimizer that has parameters of this model.

        Args:
            silent: some forwards are compiled together with their hooks and are not announced. Each
                step without an announced forward in training mode then follows an unannounced one.
        """
        self._steps += 1
        self.unannounced = silent and (self._stepped_at == self.forward_id or not self.training)
        self._stepped_at = self.forward_id

    @property
    def has_recorded(self) -> bool:
        """Whether amaxes have been recorded since the last roll."""
        return self._recorded

    @property
    def roll_is_due(self) -> bool:
        """Whether a step has followed recorded amaxes since the last roll."""
        return self._recorded and self._steps != self._rolled

    def rolled(self) -> None:
        """Note that the histories have been rolled."""
        self._rolled = self._steps
        self._recorded = False
