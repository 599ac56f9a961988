"""Write the golden texts again."""

from tests.golden.texts import write

write()
