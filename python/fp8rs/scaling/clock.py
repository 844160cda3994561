"""What time it is for one model: which forward this is, and whether it has been trained since."""

from __future__ import annotations


class Clock:
    """Counts the forwards and optimizer steps of one model.

    ::

                      begin_forward                      end_forward
            idle ----------------------> forward ----------------------> idle
             |  ^                         |   ^
             |  | end_forward             |   | begin_forward: an exception ended the last
             v  |                         +---+ one without a word
          recomputing     (begin_forward in a backward, with gradients: a checkpoint of the whole
                           model runs the forward again, which is the same forward)

    Histories roll at the first step after amaxes were written: a step is one roll, whatever the
    micro-batches, and two optimizers' steps are one.

    A forward without gradients inside a backward is a forward: of a teacher, in a hook of its
    student's backward.

    Nothing here knows modules, tensors or ranks. What differs between ranks (a cache's validity, a
    tensor's version) must not be asked here: collectives hang on the answers.

    Attributes:
        forward: how many forwards have begun.
        in_forward: one is running, and is no recomputation.
        training: the last forward was one in training mode: its amaxes are recorded, as BatchNorm's
            statistics are.
        differentiable: gradients may follow the last forward, so that gathers in a backward are
            its own.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.in_forward = False
        self.training = False
        self.differentiable = False
        #: A forward of the model is running again inside a backward.
        self.recomputing = False
        self._steps = 0
        #: The last step may have followed a forward that was not announced.
        self.unannounced = False
        self._stepped_at = 0
        #: The step that histories were last rolled for.
        self._rolled = 0
        #: A forward in training mode has begun since.
        self._recorded = False

    def begin_forward(self, *, training: bool, grad: bool, in_backward: bool) -> bool:
        """The model's forward begins; returns whether it is a new one, and no recomputation.

        Args:
            training: the model is in training mode.
            grad: gradients are enabled.
            in_backward: a backward, of whatever model, is running in this thread.
        """
        if in_backward and grad and self.forward:
            self.recomputing = True
            return False
        self.forward += 1
        self.in_forward = True
        self.recomputing = False
        self.training = training
        # A reentrant checkpoint of the whole model runs its forward without gradients, in training
        # mode.
        self.differentiable = grad or training
        return True

    def end_forward(self) -> None:
        """The model's forward has returned or raised."""
        if self.recomputing:
            self.recomputing = False
        else:
            self.in_forward = False

    def recorded(self) -> None:
        """Amaxes are being written."""
        self._recorded = True

    def stepped(self, silent: bool = False) -> None:
        """An optimizer that owns parameters of this model has stepped.

        Args:
            silent: forwards have been compiled with all hooks, so that some are not announced. One
                is taken to have come before each step that no announced one in training mode did.
        """
        self._steps += 1
        self.unannounced = silent and (self._stepped_at == self.forward or not self.training)
        self._stepped_at = self.forward

    @property
    def has_recorded(self) -> bool:
        """Whether amaxes have been written since the last roll."""
        return self._recorded

    @property
    def roll_is_due(self) -> bool:
        """Whether there was a step since the last roll, after amaxes had been written."""
        return self._recorded and self._steps != self._rolled

    def rolled(self) -> None:
        """The histories have been rolled."""
        self._rolled = self._steps
        self._recorded = False
