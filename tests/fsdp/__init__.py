"""Tests of FSDP2: what is gathered, when, and what a step sends."""
