"""Tests of the project: documentation, command line, demo, and the tests' own infrastructure."""
