"""Colour themes, one file each."""
