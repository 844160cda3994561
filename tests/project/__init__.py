"""Tests of the project itself: pages, commands, the demo, how tests are chosen and run."""
