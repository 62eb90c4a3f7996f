"""Tests of what a run leaves for people."""
