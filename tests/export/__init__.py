"""Tests of what servers are given."""
