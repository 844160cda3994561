"""Tests of the operators: bytes, bad calls, launches, and torch's requirements for operators."""
