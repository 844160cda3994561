"""Tests of files for inference servers."""
