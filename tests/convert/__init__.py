"""Tests of conversion and of converted models: parameters, reports, third-party code."""
