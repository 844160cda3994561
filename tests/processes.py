"""Processes that start others."""

import subprocess

import psutil


def kill_with_children(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started.

    A signal to a process group does not reach the ranks of torchrun, which have sessions of their
    own.
    """
    parent = psutil.Process(process.pid)
    for member in (parent, *parent.children(recursive=True)):
        try:
            member.kill()
        except psutil.NoSuchProcess:  # it has ended since
            continue
