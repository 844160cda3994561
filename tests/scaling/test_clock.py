"""The clock of one model: forwards, recomputations, steps, rolls."""

import itertools

import pytest

from fp8rs.scaling.clock import Clock


def begin(clock, training=True, grad=True, in_backward=False):
    return clock.begin_forward(training=training, grad=grad, in_backward=in_backward)


def test_a_forward_is_counted_and_ends():
    clock = Clock()
    assert not clock.in_forward
    assert begin(clock)
    assert (clock.forward, clock.in_forward) == (1, True)
    clock.end_forward()
    assert (clock.forward, clock.in_forward) == (1, False)


def test_a_forward_with_gradients_in_a_backward_is_the_same_forward_again():
    clock = Clock()
    begin(clock)
    clock.end_forward()
    assert not begin(clock, in_backward=True)
    assert (clock.forward, clock.in_forward, clock.recomputing) == (1, False, True)
    clock.end_forward()
    assert not clock.recomputing


def test_a_forward_without_gradients_in_a_backward_is_a_teachers():
    clock = Clock()
    begin(clock, training=False, grad=False)
    clock.end_forward()
    assert begin(clock, training=False, grad=False, in_backward=True)
    assert (clock.forward, clock.in_forward) == (2, True)
    assert not clock.differentiable


def test_a_first_forward_is_a_forward_wherever_it_runs():
    clock = Clock()
    assert begin(clock, in_backward=True)
    assert clock.in_forward


def test_a_forward_that_ended_without_a_word_ends_with_the_next():
    clock = Clock()
    begin(clock)
    assert begin(clock)  # no end_forward: a KeyboardInterrupt runs no hooks
    clock.end_forward()
    assert (clock.forward, clock.in_forward) == (2, False)


@pytest.mark.parametrize(("training", "grad"), list(itertools.product([True, False], repeat=2)))
def test_amaxes_are_recorded_in_training_mode(training, grad):
    clock = Clock()
    begin(clock, training=training, grad=grad)
    assert clock.training == training
    assert clock.differentiable == (training or grad)


def test_a_roll_is_due_once_a_step_and_only_if_there_is_something_to_roll():
    clock = Clock()
    clock.stepped()
    assert not clock.roll_is_due, "nothing was recorded"
    clock.recorded()
    assert clock.roll_is_due
    clock.rolled()
    assert not clock.roll_is_due
    clock.recorded()
    assert not clock.roll_is_due, "no step since"
    clock.stepped()
    clock.stepped()
    assert clock.roll_is_due
    clock.rolled()
    assert not clock.roll_is_due, "two steps are one roll"


def test_steps_follow_forwards_that_nobody_announces_where_some_are_silent():
    clock = Clock()
    clock.stepped()
    assert not clock.unannounced, "a step without a forward"
    clock.stepped(silent=True)
    assert clock.unannounced
    clock.begin_forward(training=True, grad=True, in_backward=False)
    clock.end_forward()
    clock.stepped(silent=True)
    assert not clock.unannounced
    clock.stepped(silent=True)
    assert clock.unannounced
