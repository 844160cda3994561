"""The state of scales: forwards, steps, amax histories, and reductions over ranks."""
