"""StepTracker: forwards and recomputations."""

import itertools

import pytest

from fp8rs.scaling.steps import StepTracker


def begin(tracker, training=True, grad=True, in_backward=False):
    return tracker.begin_forward(training=training, grad=grad, in_backward=in_backward)


def test_a_forward_is_counted_and_ends():
    tracker = StepTracker()
    assert not tracker.in_forward
    assert begin(tracker)
    assert (tracker.forward_id, tracker.in_forward) == (1, True)
    tracker.end_forward()
    assert (tracker.forward_id, tracker.in_forward) == (1, False)


def test_recomputed_forward_is_not_counted():
    tracker = StepTracker()
    begin(tracker)
    tracker.end_forward()
    assert not begin(tracker, in_backward=True)
    assert (tracker.forward_id, tracker.in_forward) == (1, False)
    tracker.end_forward()
    assert (tracker.forward_id, tracker.in_forward) == (1, False)


def test_forward_without_gradients_in_a_backward_counts():
    tracker = StepTracker()
    begin(tracker, training=False, grad=False)
    tracker.end_forward()
    assert begin(tracker, training=False, grad=False, in_backward=True)
    assert (tracker.forward_id, tracker.in_forward) == (2, True)


def test_first_forward_inside_a_backward_counts():
    tracker = StepTracker()
    assert begin(tracker, in_backward=True)
    assert tracker.in_forward


def test_unfinished_forward_ends_with_the_next():
    tracker = StepTracker()
    begin(tracker)
    assert begin(tracker)  # no end_forward: a KeyboardInterrupt runs no hooks
    tracker.end_forward()
    assert (tracker.forward_id, tracker.in_forward) == (2, False)


@pytest.mark.parametrize(("training", "grad"), list(itertools.product([True, False], repeat=2)))
def test_amaxes_are_recorded_in_training_mode(training, grad):
    tracker = StepTracker()
    begin(tracker, training=training, grad=grad)
    assert tracker.training == training
