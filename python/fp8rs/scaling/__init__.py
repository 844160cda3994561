"""The state that scales depend on: counters, amax histories and reductions over ranks."""
