"""Writes the golden texts anew."""

from tests.golden.texts import write

write()
