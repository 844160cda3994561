"""The state that scales depend on: forwards, steps, histories, reductions over ranks."""
