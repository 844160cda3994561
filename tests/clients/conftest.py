"""Tests with training libraries (see `harness`; ``make test-clients``)."""

import importlib.util

#: The clients that are installed for these tests only. Other tests use transformers and accelerate.
CLIENTS = ["axolotl", "lightning", "peft", "torchtitan"]

# If no client is installed, all of these tests would be skipped, so collect none.
if not any(importlib.util.find_spec(name) for name in CLIENTS):
    collect_ignore_glob = ["test_*.py"]
