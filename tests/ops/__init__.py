"""Tests of the operators: bytes, bad calls, launches, and what torch asks of an operator."""
