"""Tests of conversion and of the converted model: parameters, reports, what others do with it."""
